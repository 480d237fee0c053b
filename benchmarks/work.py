"""The work that the speed comparisons share: SmolLM2-135M-Instruct, 4 prompts × 8 siblings × 64 tokens. No reroll imports:
the peers' processes read it too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

NUM_SIBLINGS = 8
NUM_TOKENS = 64
QUESTIONS = (
    "A farmer has 17 sheep and buys 8 more. Then 5 run away. How many sheep does the farmer have?",
    "Write down the months of the year that have exactly thirty days, in order.",
    "What is 23 plus 48? Explain each step of the addition briefly before the answer.",
    "Name three animals that live in the sea and say one thing about each of them.",
)
WARM_UP = 2
"""Training steps that are run and not counted: memory and caches are not settled yet."""
NUM_NEW_TOKENS = len(QUESTIONS) * NUM_SIBLINGS * NUM_TOKENS


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def report(run: Callable[[], int], *, warmups: int = 1) -> None:
    """Warm up, time one run of `run` (which returns how many tokens it wrote), print the result for the parent process."""
    for _ in range(warmups):
        run()
    started = time.perf_counter()
    num_tokens = run()
    seconds = time.perf_counter() - started
    print("RESULT " + json.dumps({"seconds": seconds, "tokens": num_tokens}), flush=True)
