"""RL post-training of language models, from one laptop CPU to a Ray cluster."""

__version__ = "0.1.0"
