"""The prompts of a run: domains mixed by weight, inside each its sources, inside these what the curriculum lets through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from reroll.config.data import CurriculumConfig
from reroll.data.curriculum import Curriculum, Level
from reroll.data.sampler import Mix, Walk, refuse_other_data
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
        self._curriculum: Curriculum = curriculum.implementation()(curriculum, levels) if curriculum else Curriculum()
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
        found.open([name for name, source in found.sources.items() if self._curriculum.is_open(domain, source.level)])
        return found.next_walk().next_that(self._curriculum.admits)

    def record_rewards(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """What the samples of a group earned that was trained on, or dropped: what a curriculum goes by."""
        if rewards:
            self._curriculum.record_rewards(prompt, rewards)

    def stats(self) -> Stats:
        """How the curriculum stands."""
        return self._curriculum.stats()

    def state(self) -> dict[str, Any]:
        """Where the walk stands, as JSON; includes what the walk depends on, so that `restore` can refuse another one."""
        return {
            **self._identity,
            "num_turns": list(self._mix.num_turns),
            "in_domains": {domain: found.state() for domain, found in self._domains.items()},
            "learned": self._curriculum.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError if the data, the seed or the kind of curriculum are others."""
        refuse_other_data(state, self._identity)
        self._mix.num_turns = list(state["num_turns"])
        for domain, found in self._domains.items():
            found.restore(state["in_domains"][domain])
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
