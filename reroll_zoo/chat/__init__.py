"""`reroll chat`: talk to a model or a checkpoint."""
