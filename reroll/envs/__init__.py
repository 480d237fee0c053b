"""Environments: the seam and the single-turn task."""
