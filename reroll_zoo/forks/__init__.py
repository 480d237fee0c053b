"""Workers of the runtime `processes` that start in a moment."""
