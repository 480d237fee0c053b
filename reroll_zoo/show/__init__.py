"""`reroll show`: a run and its samples, in a terminal or as a page for a browser."""
