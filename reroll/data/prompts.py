"""The prompts of a run: domains mixed by weight, inside each its sources, inside these what the curriculum lets through."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, TypeVar

from reroll.config.data import CurriculumConfig
from reroll.data.curriculum import Curriculum, Level
from reroll.errors import DataError
from reroll.observe.metrics import Stats
from reroll.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """The prompts of one source, all of one domain."""

    prompts: Sequence[Prompt]
    domain: str = "default"
    weight: float = 1.0
    level: int = 0


class PromptSampler:
    """Draws prompts for ever. Whose turn it is and which prompt comes next are two questions, so that a group that was
    dropped can be replaced by one of its own domain, out of turn.

    Turns keep every domain within one of its share. Inside a domain its open sources are mixed in the same way. The same
    calls in the same order give the same prompts.
    """

    def __init__(
        self, sources: Sequence[PromptSource], *, seed: int, shuffle: bool, curriculum: CurriculumConfig | None = None
    ) -> None:
        if not sources:
            raise ValueError("a sampler needs at least one source")
        by_domain: dict[str, dict[int, PromptSource]] = {}
        for name, source in enumerate(sources):
            by_domain.setdefault(source.domain, {})[name] = source
        levels = [Level(domain=source.domain, number=source.level, prompts=source.prompts) for source in sources]
        self._curriculum: Curriculum | None = curriculum.implementation()(curriculum, levels) if curriculum else None
        self._domains = {domain: _DomainPrompts(found, seed=seed, shuffle=shuffle) for domain, found in by_domain.items()}
        weights = [_total_weight(found.values()) for found in by_domain.values()]
        self.shares: Mapping[str, float] = dict(zip(by_domain, map(float, weights), strict=True))
        """The weight of every domain, in the order of the data."""
        self._mix = Mix(weights)
        self._identity = {
            "domains": [source.domain for source in sources],
            "sizes": [len(source.prompts) for source in sources],
            "weights": [source.weight for source in sources],
            "levels": [source.level for source in sources],
            "seed": seed,
            "shuffle": shuffle,
            "curriculum": curriculum.kind if curriculum else None,
        }

    def next_domain(self) -> str:
        """Whose turn it is."""
        return list(self._domains)[self._mix.next()]

    def next(self, domain: str) -> Prompt:
        """The next prompt of a domain, whether or not it is its turn."""
        found = self._domains[domain]
        if self._curriculum is None:
            return found.next_walk().next()
        found.open([name for name, source in found.sources.items() if self._curriculum.is_open(domain, source.level)])
        return found.next_walk().next_that(self._curriculum.admits)

    def record_rewards(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """What the samples of a group earned that was trained on, or dropped: what a curriculum goes by."""
        if rewards and self._curriculum is not None:
            self._curriculum.record_rewards(prompt, rewards)

    def stats(self) -> Stats:
        """How the curriculum stands."""
        return Stats() if self._curriculum is None else self._curriculum.stats()

    def state(self) -> dict[str, Any]:
        """Where the walk stands, as JSON; includes what the walk depends on, so that `restore` can refuse another one."""
        return {
            **self._identity,
            "num_turns": list(self._mix.num_turns),
            "in_domains": {domain: found.state() for domain, found in self._domains.items()},
            "learned": {} if self._curriculum is None else self._curriculum.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError if the data, the seed or the kind of curriculum are others."""
        refuse_other_data(state, self._identity)
        self._mix.num_turns = list(state["num_turns"])
        for domain, found in self._domains.items():
            found.restore(state["in_domains"][domain])
        if self._curriculum is not None:
            self._curriculum.restore(state["learned"])


class _DomainPrompts:
    """The sources of one domain, those that are open mixed by weight."""

    def __init__(self, sources: Mapping[int, PromptSource], *, seed: int, shuffle: bool) -> None:
        self.sources = sources
        """By place in the data."""
        self._walks = {name: Walk(source.prompts, seed=seed, name=name, shuffle=shuffle) for name, source in sources.items()}
        self._open = list(sources)
        self._mix = Mix([source.weight for source in sources.values()])

    def open(self, names: list[int]) -> None:
        """Draw from these. Where they are others than before the mix starts anew, or the new ones had much to catch up."""
        if names != self._open:
            self._open = names
            self._mix = Mix([self.sources[name].weight for name in names])

    def next_walk(self) -> Walk[Prompt]:
        """The walk over the source whose turn it is."""
        return self._walks[self._open[self._mix.next()]]

    def state(self) -> dict[str, Any]:
        visited = [walk.num_visited for walk in self._walks.values()]
        return {"open": self._open, "num_turns": list(self._mix.num_turns), "num_visited": visited}

    def restore(self, state: dict[str, Any]) -> None:
        self.open(state["open"])
        self._mix.num_turns = list(state["num_turns"])
        for walk, num_visited in zip(self._walks.values(), state["num_visited"], strict=True):
            walk.num_visited = num_visited


def _total_weight(sources: Iterable[PromptSource]) -> Fraction:
    # As decimals: 0.1 and 0.2 are 0.3 here, as they are for whoever wrote them.
    return sum((Fraction(str(source.weight)) for source in sources), Fraction(0))


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
