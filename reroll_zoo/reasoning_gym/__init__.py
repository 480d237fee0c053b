"""reasoning-gym: its tasks as prompts and as episodes, and its verifiers as a reward."""
