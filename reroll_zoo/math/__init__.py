"""Mathematics: whether two answers are the same."""
