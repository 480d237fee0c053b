"""A run's samples as its journal has them, for `show`, the page and the trace: their lives in time, and each to read."""
