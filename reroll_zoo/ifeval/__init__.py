"""Instruction following as IFEval measures it: generated tasks, and the checks of all its instructions."""
