"""The work that the environment benchmarks share. No reroll imports: the peers' processes read it too."""

from __future__ import annotations

NUM_EPISODES = 1024
IN_FLIGHT = (1, 64, 512)
"""Episodes at once."""
GYMNASIUM_ID = "FrozenLake-v1"
