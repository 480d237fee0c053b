"""The algorithms as loops."""
