"""`reroll init`: a small project to start from."""
