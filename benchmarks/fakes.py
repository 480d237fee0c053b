"""Stand-ins for what the scheduler benchmarks do not measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from reroll.observe.metrics import Stats
from reroll.types import Prompt


class Prompts:
    shares: Mapping[str, float] = {"fake": 1.0}

    def __init__(self) -> None:
        self._numbers = count()

    def next_domain(self) -> str:
        return "fake"

    def next(self, domain: str) -> Prompt:
        return Prompt(id=f"fake/{next(self._numbers)}", messages=(), domain=domain)

    def record_rewards(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        return None

    def stats(self) -> Stats:
        return Stats()

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None
