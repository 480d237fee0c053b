"""Estimators, losses and divergences beyond those that the core needs, and the presets that are made of them."""
