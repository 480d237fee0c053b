"""Instruction following: a check for each of IFEval's instructions, and the verifier that applies them to a row."""
