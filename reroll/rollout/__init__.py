"""Prompts in, scored groups out: admission (no I/O), the scheduler (async shell), play (one episode)."""
