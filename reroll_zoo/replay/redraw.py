"""Draws the samples of a recorded run again: each token must come out as it did, by the weights that wrote it.

A token is a function of (seed, position, weights). A completion that weights of several versions wrote is drawn in as many
parts, each from the tokens before it; a later turn is drawn from the prompt that it had. So neither environments nor the
moments at which pushes came in matter, and an asynchronous run can be drawn again as well as a synchronous one. Only where the
engine kept what older weights had read of a context are later parts left out: what they were drawn from is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from reroll.config.tree import RlvrConfig
from reroll.observe.metrics import Max, Stats, Sum
from reroll.pipeline.episode_runner import sampling_of
from reroll.rollout.play import Generate, stable_seed
from reroll.types import Completion, Group, Request, Turn, WrittenTokens


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of tokens of one version in a recorded turn, and the request that draws it again."""

    request: Request
    recorded: Completion
    start: int

    def num_differing(self, drawn: Completion) -> int:
        """How many of its tokens did not come out as they were, counted from the first that did not."""
        stop = self.request.sampling.max_tokens
        ours, theirs = drawn.token_ids[self.start : stop], self.recorded.token_ids[self.start : stop]
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        return len(theirs) - same

    def logp_gap(self, drawn: Completion) -> float:
        """The largest distance between the log-probs of tokens, then and now."""
        pairs = zip(drawn.logprobs[self.start :], self.recorded.logprobs[self.start :], strict=False)
        return max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)


class Redraw:
    """Draws again what weights of one version wrote, of groups that were trained on. What agents asked for is left out: the
    journal does not say which of their requests were refused."""

    def __init__(self, config: RlvrConfig, generate: Generate, stop_token_ids: Sequence[int]) -> None:
        self._config = config
        self._generate = generate
        self._stop_token_ids = tuple(stop_token_ids)

    async def draw(self, groups: Iterable[Group], *, version: int) -> Stats:
        """Weights of this version are with the engine: draw what they wrote, and compare."""
        parts = list(self._parts(groups, version))
        drawn = await asyncio.gather(*(self._generate(part.request) for part in parts))
        stats = Stats({"replay/drawn_tokens": Sum(0.0), "replay/differing_tokens": Sum(0.0), "replay/logp_gap_max": Max(0.0)})
        for part, completion in zip(parts, drawn, strict=True):
            num_differing = part.num_differing(completion)
            stats.add("replay/drawn_tokens", Sum(float(part.request.sampling.max_tokens - part.start)))
            stats.add("replay/differing_tokens", Sum(float(num_differing)))
            if num_differing == 0:
                stats.add("replay/logp_gap_max", Max(part.logp_gap(completion)))
        return stats

    def _parts(self, groups: Iterable[Group], version: int) -> Iterator[_Part]:
        for group in groups:
            if group.prompt.domain in self._config.agents:
                continue
            for trajectory in group.trajectories:
                index = int(trajectory.id.partition(".")[2])
                seed = stable_seed(self._config.run.seed, group.number, index)
                for number, turn in enumerate(trajectory.turns):
                    yield from self._parts_of_turn(turn, f"{trajectory.id}.{number}", group, stable_seed(seed, number), version)

    def _parts_of_turn(self, turn: Turn, id: str, group: Group, seed: int, version: int) -> Iterator[_Part]:
        rollout = self._config.rollout.of(group.prompt.domain)
        sampling = replace(sampling_of(rollout, seed=seed), stop_token_ids=self._stop_token_ids)
        recorded, start = turn.completion, 0
        for number, (written_by, num_tokens) in enumerate(recorded.versions):
            if written_by == version and (number == 0 or self._config.engine.reads_again):
                written = WrittenTokens(
                    token_ids=recorded.token_ids[:start],
                    logprobs=recorded.logprobs[:start],
                    versions=tuple(islice(recorded.versions, number)),
                )
                asked = replace(sampling, max_tokens=start + num_tokens)
                yield _Part(
                    Request(id=f"{id}.{start}", prompt_ids=turn.prompt_ids, sampling=asked, written=written), recorded, start
                )
            start += num_tokens
