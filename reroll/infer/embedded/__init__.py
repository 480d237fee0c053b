"""reroll's own engine: continuous batching over the Hugging Face modules."""
