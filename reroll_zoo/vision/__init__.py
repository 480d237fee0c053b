"""Models that see: pictures in messages and rows, among tokens, in the trainer and in the embedded engine."""
