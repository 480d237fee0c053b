"""A run as it is watched in a terminal or a notebook's cell."""
