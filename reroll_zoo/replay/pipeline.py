"""A run trained again from its journal: the same samples in the same order, to the same weights, or under another loss."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load_file

from reroll.config.explain import with_new_names
from reroll.config.load import apply_overrides, config_class_of, parse_config, read_yaml
from reroll.config.pipeline import PipelineConfig
from reroll.config.tree import RecordedRunConfig, RlvrConfig
from reroll.errors import ConfigError, RunFolderError, Violation
from reroll.models.load import load_tokenizer
from reroll.observe.files import read_jsonl
from reroll.observe.metrics import Stats
from reroll.observe.run_folder import Checkpoint, RunFolder
from reroll.pipeline.base import RunContext
from reroll.pipeline.build import ReplayComponents, build_replay
from reroll.pipeline.rlvr import GroupLearner, rollout_stats
from reroll.tokens.renderer import Renderer
from reroll.types import Group
from reroll_zoo.replay.recorded_steps import num_recorded_steps, recorded_steps
from reroll_zoo.replay.redraw import Redraw

DECIDES_SAMPLES = frozenset(
    {"data", "engine", "rewards", "reward_workers", "envs", "env_workers", "agents", "endpoint", "rollout", "weights", "eval"}
)
"""Parts of a config that a replay has no use for."""


class ReplayPipeline(GroupLearner):
    """Trains on the groups that a run was trained on. It has no engine, so nothing is evaluated."""

    title = "training again from a journal"
    parts: ReplayComponents

    @classmethod
    @asynccontextmanager
    async def open(cls, config: RlvrConfig, context: RunContext) -> AsyncIterator[Self]:
        recorded = config.recorded
        assert recorded is not None
        source = RunFolder(recorded.run)
        first = first_checkpoint(source, recorded.start)
        last_step = _last_step(source, recorded)
        async with build_replay(config, folder=context.folder.path, draw=recorded.draw) as parts:
            yield cls(parts.config, context, parts, source, first=first, last_step=last_step)

    def __init__(
        self,
        config: RlvrConfig,
        context: RunContext,
        parts: ReplayComponents,
        source: RunFolder,
        *,
        first: Checkpoint | None,
        last_step: int,
    ) -> None:
        super().__init__(config, context, parts)
        self._source, self._first, self._last_step = source, first, last_step
        self._steps: Iterator[tuple[int, list[Group]]] = iter(())
        self._ahead: deque[tuple[int, list[Group]]] = deque()
        """Recorded steps that were read already: weights of the moment wrote some of their tokens."""
        self._redraw = self._make_redraw(parts) if parts.engine else None
        self._drawn = Stats()
        self._committed_state = self.learner_state()

    @property
    def last_step(self) -> int:
        return self._last_step

    @property
    def begins_from(self) -> Checkpoint | None:
        return self._first

    async def start(self, num_steps: int) -> None:
        self._steps = recorded_steps(self._source.journal_path, start=num_steps)
        await self._draw_again(num_steps)

    async def step(self, step: int) -> Stats:
        number, groups = self._ahead.popleft() if self._ahead else next(self._steps)
        if number != step + 1:
            raise RunFolderError(f"{self._source.journal_path} has no step {step + 1}: see `reroll audit {self._source.path}`")
        if self.config.has_greedy_baseline and any(group.baseline is None for group in groups):
            raise RunFolderError(f"{self._source.path} drew no greedy samples, which advantage remax compares with")
        trained = await self.train_on(groups, step)
        self._committed_state = self.learner_state()
        drawn, self._drawn = self._drawn, Stats()
        await self._draw_again(step + 1)
        return trained + rollout_stats(groups) + drawn

    async def _draw_again(self, version: int) -> None:
        """Draw again what weights of this version, which the policy has now, wrote of the steps to come."""
        if self._redraw is None or version >= self.last_step:
            return
        num_ahead = self.config.rollout.max_staleness + 1
        self._ahead += islice(self._steps, num_ahead - len(self._ahead))
        with self.context.view.doing(lambda: f"drawing again what version {version} wrote"):
            async with self.parts.devices.lease("engine"):
                assert self.parts.weights is not None
                await self.parts.weights.push(version=version)
                groups = [group for _, step in self._ahead for group in step]
                self._drawn = await self._redraw.draw(groups, version=version)

    def _make_redraw(self, parts: ReplayComponents) -> Redraw:
        assert parts.engine is not None
        stop_token_ids = Renderer(load_tokenizer(self.config.policy.model)).stop_token_ids
        return Redraw(self.config, parts.engine.generate, stop_token_ids)

    async def finish(self) -> None:
        pass

    async def evaluate(self) -> Stats:
        return Stats()

    @property
    def eval_every(self) -> int:
        return 0

    def state(self) -> dict[str, Any]:
        return self._committed_state

    def restore(self, state: dict[str, Any]) -> None:
        self.restore_learner(state)
        self._committed_state = self.learner_state()


def _last_step(source: RunFolder, recorded: RecordedRunConfig) -> int:
    """Where to end. Raises RunFolderError if the journal does not hold the steps that are asked for."""
    num, start, stop = num_recorded_steps(source.journal_path), recorded.start, recorded.stop
    if start >= num or (stop or 0) > num:
        raise RunFolderError(f"{source.path} has finished {num} steps: choose steps of these")
    if stop is not None and stop <= start:
        raise RunFolderError(f"nothing lies between step {start} and step {stop}")
    return stop or num


def first_checkpoint(source: RunFolder, start: int) -> Checkpoint | None:
    """The checkpoint to begin from; None for step 0. Raises RunFolderError, with those that there are."""
    if start == 0:
        return None
    there = {checkpoint.step: checkpoint for checkpoint in source.all_checkpoints()}
    if start not in there:
        steps = ", ".join(map(str, there)) or "none"
        raise RunFolderError(f"{source.path} has no checkpoint of step {start}: there are {steps}, and 0, where it began")
    return there[start]


def replay_config(
    source: Path,
    *,
    start: int = 0,
    stop: int | None = None,
    draw: bool = False,
    changes: Sequence[str] = (),
    name: str | None = None,
) -> PipelineConfig:
    """The config that trains a run again, with changes as `key=value`. Raises ConfigError."""
    tree = read_yaml(RunFolder(source).config_path)
    tree = with_new_names(config_class_of(tree, folder=source), tree)
    if tree["pipeline"] not in ("rlvr", "agentic"):
        problem = f"is {tree['pipeline']}: what is trained again is pipeline rlvr, with losses and advantages of your own"
        raise ConfigError([Violation("pipeline", problem, "give a run of pipeline rlvr or agentic")])
    problems = [_without_effect(change) for change in changes if change.split(".")[0].split("=")[0] in DECIDES_SAMPLES]
    problems += apply_overrides(tree, changes)
    tree["recorded"] = {"run": str(source), "start": start, "stop": stop, "draw": draw}
    tree["run"] |= {"name": name or f"{source.resolve().name}-replay", "runs_dir": str(source.resolve().parent)}
    return parse_config(tree, problems=problems, folder=source)


def _without_effect(change: str) -> Violation:
    return Violation(
        change.partition("=")[0], "decides what is sampled, and the samples are those of the journal", "leave it out"
    )


class DrawnAgain(NamedTuple):
    """What came of drawing a run's samples again."""

    num_tokens: int
    num_differing: int
    """Tokens from the first that came out otherwise to the end of what was drawn with it."""
    logp_gap: float
    """The largest distance between log-probs of tokens that are the same."""


def drawn_again(run: Path) -> DrawnAgain:
    """What a replay that drew its samples again has found."""
    rows = [row for row in read_jsonl(RunFolder(run).metrics_path) if "replay/drawn_tokens" in row]
    num_tokens, num_differing = (int(sum(row[f"replay/{kind}_tokens"] for row in rows)) for kind in ("drawn", "differing"))
    return DrawnAgain(num_tokens, num_differing, max((row["replay/logp_gap_max"] for row in rows), default=0.0))


class Comparison(NamedTuple):
    """The weights of two runs after the same number of steps."""

    step: int
    largest_difference: float
    """0: equal to the bit."""


def compare_weights(run: Path, other: Path) -> list[Comparison]:
    """At each step of which both runs have a checkpoint."""
    ours, theirs = ({one.step: one.path for one in RunFolder(path).all_checkpoints()} for path in (run, other))
    return [Comparison(step, _largest_difference(ours[step], theirs[step])) for step in sorted(ours.keys() & theirs.keys())]


def _largest_difference(folder: Path, other: Path) -> float:
    largest = 0.0
    for file in folder.rglob("*.safetensors"):
        tensors, others = load_file(file), load_file(other / file.relative_to(folder))
        for name, tensor in tensors.items():
            if not torch.equal(tensor, others[name]):
                largest = max(largest, float((tensor.double() - others[name].double()).abs().max()))
    return largest
