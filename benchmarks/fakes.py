"""Stand-ins for what the scheduler benchmarks do not measure."""

from __future__ import annotations

from itertools import count
from typing import Any

from reroll.types import Prompt


class Prompts:
    def __init__(self) -> None:
        self._numbers = count()

    def next(self) -> Prompt:
        return Prompt(id=f"fake/{next(self._numbers)}", messages=(), domain="fake")

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None
