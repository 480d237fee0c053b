"""Rewards: the seam, the kinds, and the workers that run them."""
