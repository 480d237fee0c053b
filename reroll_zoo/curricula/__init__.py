"""Which prompts are worth the next try: `filter`, `target` and `ladder`."""
