"""Checkpoints in this machine's memory, from which a run that loses a process goes on."""
