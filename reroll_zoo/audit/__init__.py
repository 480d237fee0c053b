"""`reroll audit`: what a run's journal proves of every sample."""
