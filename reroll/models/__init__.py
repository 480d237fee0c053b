"""Hugging Face models: loading, our attention, log-prob head, fetching, tiny ones for tests."""
