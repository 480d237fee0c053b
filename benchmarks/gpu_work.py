"""The work that the comparisons on a GPU share: a model of Qwen3-0.6B's shape with random weights, 64 prompts × 8 siblings ×
256 tokens. No reroll imports: the peers' processes read it too."""

from __future__ import annotations

import random

NUM_PROMPTS = 64
NUM_SIBLINGS = 8
NUM_TOKENS = 256
NUM_STEPS = 5
WARM_UP = 2
"""Training steps that are run and not counted: kernels are compiled, graphs captured."""
NUM_NEW_TOKENS = NUM_PROMPTS * NUM_SIBLINGS * NUM_TOKENS

_WORDS = ("apple", "river", "stone", "cloud", "green", "seven", "quick", "silver", "house", "light")


def prompts() -> list[str]:
    """Of about a hundred tokens with the chat template; enough for all steps."""
    draw = random.Random(0)
    return [" ".join(draw.choice(_WORDS) for _ in range(80)) for _ in range(NUM_PROMPTS * NUM_STEPS)]


def reward_of(text: str) -> float:
    return text.count("e") / 100
