"""A trained reward model as a reward."""
