"""Prompt sources and the mix of domains."""
