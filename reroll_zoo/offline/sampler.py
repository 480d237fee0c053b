"""Which row comes next: an endless, exactly mixed and resumable walk over the sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from reroll.data.prompts import Mix, Walk, refuse_other_data

T = TypeVar("T")


class RowSampler(Generic[T]):
    """Draws items from weighted sources for ever: the mix says from which source, a walk says which item."""

    def __init__(self, sources: Sequence[tuple[Sequence[T], float]], *, seed: int, shuffle: bool) -> None:
        if not sources:
            raise ValueError("a sampler needs at least one source")
        self._mix = Mix([weight for _, weight in sources])
        self._walks = [Walk(items, seed=seed, name=name, shuffle=shuffle) for name, (items, _) in enumerate(sources)]
        self._identity = {
            "sizes": [len(items) for items, _ in sources],
            "weights": [float(weight) for _, weight in sources],
            "seed": seed,
            "shuffle": shuffle,
        }

    def next(self) -> T:
        return self._walks[self._mix.next()].next()

    def state(self) -> dict[str, Any]:
        """Where the walk stands, as JSON; includes what the walk depends on, so that `restore` can refuse another one."""
        return {"num_drawn": list(self._mix.num_turns), **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError if the sources, weights or seed are not those of the state."""
        refuse_other_data(state, self._identity)
        self._mix.num_turns = list(state["num_drawn"])
        for walk, num_drawn in zip(self._walks, state["num_drawn"], strict=True):
            walk.num_visited = num_drawn
