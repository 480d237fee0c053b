"""Which prompt comes next: an endless, exactly mixed and resumable walk over the sources."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from reroll.errors import DataError
from reroll.types import Prompt

T = TypeVar("T")


class Sampler(Generic[T]):
    """Draws items from weighted sources for ever.

    The source that lags furthest behind its share is drawn from, so after any number of draws no source is a whole item
    ahead of its share: weights hold over each step, not only on average. Each source is gone through once per epoch, in an
    order that depends on (seed, source, epoch) alone. The whole state is therefore how often each source was drawn.
    """

    def __init__(self, sources: Sequence[tuple[Sequence[T], float]], *, seed: int, shuffle: bool) -> None:
        if not sources:
            raise ValueError("a sampler needs at least one source")
        for number, (items, weight) in enumerate(sources):
            if not items:
                raise ValueError(f"source {number} is empty")
            if not weight > 0:
                raise ValueError(f"source {number} has weight {weight}: weights must be above 0")
        self._sources = [items for items, _ in sources]
        self._weights = [float(weight) for _, weight in sources]
        self._seed = seed
        self._shuffle = shuffle
        self._num_drawn = [0] * len(sources)
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def next(self) -> T:
        source = self._most_behind()
        items = self._sources[source]
        epoch, position = divmod(self._num_drawn[source], len(items))
        self._num_drawn[source] += 1
        return items[self._order(source, epoch)[position]]

    def state(self) -> dict[str, Any]:
        """Where the walk stands, as JSON; includes what the walk depends on, so that `restore` can refuse another one."""
        return {"num_drawn": list(self._num_drawn), **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError if the sources, weights or seed are not those of the state."""
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise DataError(
                    f"the data differ from those of the checkpoint: {name} was {state[name]}, is {mine} "
                    "(resume with the same data and seed, or start a new run)"
                )
        self._num_drawn = list(state["num_drawn"])

    def _most_behind(self) -> int:
        # Deficits are scaled by the total weight: whole-number weights then stay exact.
        total_weight, num_after = sum(self._weights), sum(self._num_drawn) + 1
        deficits = [w * num_after - n * total_weight for w, n in zip(self._weights, self._num_drawn, strict=True)]
        return deficits.index(max(deficits))

    def _order(self, source: int, epoch: int) -> list[int]:
        known_epoch, order = self._orders.get(source, (-1, []))
        if known_epoch != epoch:
            order = list(range(len(self._sources[source])))
            if self._shuffle:
                random.Random(f"{self._seed}/{source}/{epoch}").shuffle(order)
            self._orders[source] = (epoch, order)
        return order

    def _identity(self) -> dict[str, Any]:
        sizes = [len(items) for items in self._sources]
        return {"sizes": sizes, "weights": list(self._weights), "seed": self._seed, "shuffle": self._shuffle}


PromptSampler: TypeAlias = Sampler[Prompt]
