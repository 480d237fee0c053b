"""Which prompt comes next: an endless, exactly mixed and resumable walk over the sources."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Generic, TypeVar

from reroll.errors import DataError

T = TypeVar("T")

_MAX_PASSED_OVER = 10_000
"""Items that one draw passes over before it takes what comes: a source of which nothing fits must not hang the run."""


class Mix:
    """Whose turn it is, by weight, for ever: at any time each party has had its share of the turns to within one.

    Turn number k of a party with share s lies in the places (k - 1) / s to k / s of the order. Of the parties whose place
    has begun, the one whose place ends first has the turn. Weights are taken as the decimals they are written as, so the
    arithmetic is exact.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        for number, weight in enumerate(weights):
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"source {number} has weight {weight}: weights must be above 0")
        exact = [Fraction(str(weight)) for weight in weights]
        unit = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * unit) for weight in exact]
        self.num_turns = [0] * len(weights)
        """How many turns each party has had: the whole state."""

    def next(self) -> int:
        """The party that has this turn."""
        total, place = sum(self._weights), sum(self.num_turns)
        ends = [
            (-(-(num + 1) * total // weight), party)
            for party, (weight, num) in enumerate(zip(self._weights, self.num_turns, strict=True))
            if num * total < weight * (place + 1)
        ]
        _, party = min(ends)
        self.num_turns[party] += 1
        return party


class Walk(Generic[T]):
    """Goes through a source for ever, once per epoch, in an order that depends on (seed, name, epoch) alone."""

    def __init__(self, items: Sequence[T], *, seed: int, name: int, shuffle: bool) -> None:
        if not items:
            raise ValueError(f"source {name} is empty")
        self._items = items
        self._key = f"{seed}/{name}"
        self._shuffle = shuffle
        self._epoch, self._order = -1, list[int]()
        self.num_visited = 0
        """The whole state."""

    def next(self) -> T:
        epoch, position = divmod(self.num_visited, len(self._items))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._items)))
            if self._shuffle:
                random.Random(f"{self._key}/{epoch}").shuffle(self._order)
        self.num_visited += 1
        return self._items[self._order[position]]

    def next_that(self, admits: Callable[[T, float], bool]) -> T:
        """The next item that `admits(item, luck)`, with luck in 0..1 drawn for each visit; after very many, any."""
        for _ in range(_MAX_PASSED_OVER):
            item = self.next()
            luck = random.Random(f"{self._key}/luck/{self.num_visited}").random()
            if admits(item, luck):
                return item
        return item


def refuse_other_data(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise DataError if a state was taken over data that were not these."""
    for name, mine in identity.items():
        if state.get(name) != mine:
            raise DataError(
                f"the data differ from those of the checkpoint: {name} was {state.get(name)}, is {mine} "
                "(resume with the same data and seed, or start a new run)"
            )
