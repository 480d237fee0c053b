"""`reroll eval`: a checkpoint or a model, measured."""
