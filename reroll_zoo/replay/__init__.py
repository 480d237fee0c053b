"""`reroll replay`: a run trained again from its journal."""
