"""One simulated run: the production scheduler, router and leases in the order of a real step, on the clock of this loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

from reroll.config.parts import RolloutConfig
from reroll.envs.base import AsyncEnv, StepResult
from reroll.errors import RewardError
from reroll.infer.cluster import InferCluster
from reroll.observe.journal import Journal
from reroll.observe.metrics import Stats
from reroll.rollout.in_flight import TokenKeeper
from reroll.rollout.play import SingleTurn, play, stable_seed
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime.cpu import gc_frozen
from reroll.runtime.devices import DeviceMap
from reroll.tokens.renderer import Renderer
from reroll.types import Group, Message, Prompt, SamplingParams, Score, Trajectory
from reroll_zoo.simulate.clock import VirtualLoop, run_virtually
from reroll_zoo.simulate.cores import Cores
from reroll_zoo.simulate.engines import EngineModel, ModelledWorkers, marked
from reroll_zoo.simulate.workload import Workload

DOMAIN = "simulated"
_ASK: Message = {"role": "user", "content": ""}


@dataclass(frozen=True, kw_only=True)
class System:
    """The machines of a run: who is where, and what each can do."""

    engine: EngineModel
    engine_seats: tuple[tuple[str, ...], ...]
    policy_seats: tuple[tuple[str, ...], ...]
    train_s: float
    """Of an update, whatever its size."""
    train_token_s: float = 0.0
    """For each token of prompt or completion that is trained on."""
    streams_from: int | None = None
    """An update begins as soon as groups with so many written tokens are ready (`train.stream`); None: when all are."""
    overhead_s: float = 0.0
    """Between a step and the next: what the controller itself does."""
    turn_s: float = 0.0
    """CPU time of the controller for one turn of one sample. It has one core, so whatever else is due waits as long."""
    is_charged: bool = False
    """The CPU time that the controller takes here passes on the clock, too, in place of `turn_s`."""
    scores_together: bool = False
    """No sample of a step is scored before the last one is written: a step is a row of phases. Else each is as it ends."""
    sharing: float = 0.0
    """How far trainer and engines slow each other while both are at work: 0 if not at all, 1 if they have the same cores."""
    num_devices: int = 1
    losses: tuple[tuple[float, tuple[int, ...]], ...] = ()
    """When which engines are lost."""
    joins: tuple[tuple[float, int], ...] = ()
    """When there is room for how many more (`engine.devices: elastic`)."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One step: seconds of each of its parts."""

    wait_s: float
    train_s: float
    push_s: float
    step_s: float
    tokens: int
    """Written ones that it trained on."""


@dataclass(kw_only=True)
class Prediction:
    """What came of it."""

    wall_s: float = 0.0
    steps: list[StepTimes] = field(default_factory=list)
    num_samples: int = 0
    """Trained on."""
    trained_tokens: int = 0
    written_tokens: int = 0
    wasted_tokens: int = 0
    """Written, and neither trained on nor still in flight."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Groups trained on, by the versions between their admission and their training."""
    ends: dict[str, int] = field(default_factory=dict)
    engine_busy: list[float] = field(default_factory=list)
    """Share of the time that each engine was at work."""
    num_running: float = 0.0
    """Sequences in a step of an engine, on average."""
    life_s: dict[str, float] = field(default_factory=lambda: {"engines": 0.0, "envs": 0.0, "rewards": 0.0})
    """Seconds that samples spent with each."""
    max_in_flight: int = 0
    num_devices: int = 1
    controller_s: float = 0.0
    """CPU seconds of scheduler, router, token keeper, journal and event loop."""
    models_s: float = 0.0
    """CPU seconds of the modelled engines, which a real run spends elsewhere."""
    num_started: int = 0

    @property
    def steady(self) -> list[StepTimes]:
        """The steps without the first quarter, in which the pipeline fills."""
        return self.steps[len(self.steps) // 4 :]

    def mean(self, name: str) -> float:
        """Of a part, over the steady steps."""
        return sum(float(getattr(step, name)) for step in self.steady) / len(self.steady)

    @property
    def step_s(self) -> float:
        return self.mean("step_s")

    @property
    def samples_per_step(self) -> float:
        return self.num_samples / len(self.steps)

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_step / self.step_s

    @property
    def device_s_per_sample(self) -> float:
        """What a trained sample costs."""
        return self.step_s * self.num_devices / self.samples_per_step

    @property
    def idle(self) -> dict[str, float]:
        """Share of the time in which each role has nothing to do."""
        busy_s = self.mean("train_s")
        return {"trainer": 1 - busy_s / self.step_s, "engines": 1 - sum(self.engine_busy) / len(self.engine_busy)}

    @property
    def bound(self) -> str:
        """What a faster step would have to begin with: where it waits for samples, what they spend most of their life in."""
        longest = max(self.life_s, key=lambda name: self.life_s[name])
        parts = {longest: self.mean("wait_s"), "trainer": self.mean("train_s"), "push": self.mean("push_s")}
        return max(parts, key=lambda name: parts[name])

    @property
    def life(self) -> dict[str, float]:
        """Shares of the samples' time, waiting for each included."""
        total_s = sum(self.life_s.values())
        return {name: spent_s / total_s for name, spent_s in self.life_s.items() if spent_s > 0}

    @property
    def mean_staleness(self) -> float:
        return sum(age * num for age, num in self.staleness.items()) / max(1, self.staleness.total())


class _Prompts:
    """An endless supply of prompts of which only the number matters."""

    shares: Mapping[str, float] = {DOMAIN: 1.0}

    def __init__(self) -> None:
        self._numbers = count()

    def next_domain(self) -> str:
        return DOMAIN

    def next(self, domain: str) -> Prompt:
        return Prompt(id=f"{next(self._numbers)}", messages=(_ASK,), domain=domain)

    def record_rewards(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        return None

    def stats(self) -> Stats:
        return Stats()

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None


class _Marks:
    """Stands in for the tokenizer: a prompt is its number, and a conversation grows by what was said."""

    stop_token_ids = (0,)

    def __init__(self, number: int) -> None:
        self._number = number

    def kept(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return messages

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (marked(self._number),)

    def extend(self, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...], messages: Sequence[Message]) -> Any:
        return (*prompt_ids, *completion_ids, 1)

    def decode(self, ids: tuple[int, ...]) -> str:
        return ""


class _ModelledEnv:
    """An environment that takes its time, and ends after as many turns as its seed draws."""

    def __init__(self, workload: Workload, seed: int, slots: asyncio.Semaphore | None, life_s: dict[str, float]) -> None:
        self._workload, self._seed, self._slots, self._life_s = workload, seed, slots, life_s
        self._num_left = max(1, round(workload.turns.of(seed)))
        self._has_slot = False

    async def reset(self) -> tuple[Message, ...]:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        if self._slots is not None:
            await self._slots.acquire()
            self._has_slot = True
        await asyncio.sleep(self._workload.reset_s.of(self._seed))
        self._life_s["envs"] += loop.time() - asked_s
        return (_ASK,)

    async def step(self, action: str) -> StepResult:
        self._num_left -= 1
        step_s = self._workload.env_s.of(self._seed * 31 + self._num_left)
        await asyncio.sleep(step_s)
        self._life_s["envs"] += step_s
        return StepResult(messages=(_ASK,), terminated=self._num_left == 0)

    async def close(self) -> None:
        if self._slots is not None and self._has_slot:
            self._slots.release()


class Simulation:
    """Opens what a run has, and steps through it."""

    def __init__(self, rollout: RolloutConfig, workload: Workload, system: System, folder: Path, *, seed: int = 0) -> None:
        self._rollout, self._workload, self._system = rollout, workload, system
        self._loop = cast(VirtualLoop, asyncio.get_running_loop())
        self._cores = Cores(system.sharing) if system.sharing else None
        self.workers = ModelledWorkers(len(system.engine_seats), system.engine, workload, self._cores)
        max_workers = self.workers.size + sum(num for _, num in system.joins)
        self.engine = InferCluster(self.workers, max_workers=max_workers if system.joins else 0)
        self.devices = DeviceMap({"policy": system.policy_seats, "engine": system.engine_seats}, independent=["engine"])
        self.devices.set_hooks("engine", on_enter=self.engine.resume, on_leave=self.engine.pause)
        self.journal = Journal(folder / "journal", clock=self._loop.time)
        self._generate = TokenKeeper(self.journal, self.engine.generate).generate
        self._slots = asyncio.Semaphore(workload.env_slots) if workload.env_slots else None
        self._has_envs = workload.turns.longest > 1 or workload.env_s.longest > 0 or workload.reset_s.longest > 0
        self._limits = {"max_prompt_tokens": 1 << 30, "max_turns": 1 << 30}
        self.rollouts = RolloutScheduler(
            rollout, _Prompts(), episode=self._episode, score=self._score, journal=self.journal, seed=seed
        )
        self.lengths: dict[str, int] = {}
        """Tokens of the samples in flight that have ended."""
        self.outcome = Prediction(num_devices=system.num_devices)
        self._num_in_flight = 0
        self._all_written = asyncio.Event()

    async def run(self, num_steps: int) -> Prediction:
        """So many steps, from the first admission to the last release."""
        started_s, cpu_s = self._loop.time(), time.process_time()
        changes = [self._lose(at_s, ranks) for at_s, ranks in self._system.losses]
        changes += [self._grow(at_s, num) for at_s, num in self._system.joins]
        changing = [asyncio.create_task(change) for change in changes]
        try:
            for step in range(num_steps):
                await self._step(step)
        except BaseException:
            await self.close()
            raise
        outcome = self.outcome
        outcome.wall_s = self._loop.time() - started_s
        outcome.models_s = sum(engine.cpu_s for engine in self.workers.all_engines)
        outcome.controller_s = time.process_time() - cpu_s - outcome.models_s
        self._account()
        for task in changing:
            task.cancel()
        await self.close()
        return outcome

    async def close(self) -> None:
        await self.rollouts.close()
        await self.engine.close()
        self.journal.close()

    async def _step(self, step: int) -> None:
        """As `RlvrPipeline.step`: take, train under the policy's lease, push under the engine's, release."""
        started_s = self._loop.time()
        groups, waiting, streamed_s = await self._take()
        taken_s = self._loop.time()
        await self._train(waiting, fixed_s=self._system.train_s)
        trained_s = self._loop.time()
        async with self.devices.lease("engine"):
            await self.engine.load_weights({}, version=step + 1, adopt=False)
        pushed_s, trained_before = self._loop.time(), self.outcome.trained_tokens
        for group in groups:
            self.outcome.staleness[step - group.version] += 1
            for one in group.trajectories:
                self.outcome.num_samples += 1
                self.outcome.trained_tokens += self.lengths.pop(one.id)
        num_tokens = self.outcome.trained_tokens - trained_before
        self.rollouts.release(groups, version=step + 1)
        if self._system.overhead_s:
            await (self._cores.work(self._system.overhead_s) if self._cores else asyncio.sleep(self._system.overhead_s))
        self.outcome.steps.append(
            StepTimes(
                wait_s=taken_s - started_s - streamed_s,
                train_s=trained_s - taken_s + streamed_s,
                push_s=pushed_s - trained_s,
                step_s=self._loop.time() - started_s,
                tokens=num_tokens,
            )
        )

    async def _take(self) -> tuple[list[Group], list[Group], float]:
        """As `StreamedUpdate`: the groups of a step, those of them that are still to be trained on, and seconds of training."""
        num_prompts, least = self._rollout.prompts_per_step, self._system.streams_from
        groups: list[Group] = []
        waiting: list[Group] = []
        if least is None or self.devices.overlap("policy", "engine"):
            groups = await self.rollouts.take(num_prompts)
            return groups, groups, 0.0
        streamed_s = 0.0
        async with aclosing(self.rollouts.take_parts(num_prompts)) as parts:
            async for part in parts:
                groups, waiting = groups + part, waiting + part
                if len(groups) < num_prompts and self._num_written(waiting) >= least:
                    began_s = self._loop.time()
                    await self._train(waiting)
                    waiting, streamed_s = [], streamed_s + self._loop.time() - began_s
        return groups, waiting, streamed_s

    async def _train(self, groups: Sequence[Group], *, fixed_s: float = 0.0) -> None:
        num_tokens = self._num_written(groups) + len(groups) * self._workload.prompt_tokens
        work_s = fixed_s + num_tokens * self._system.train_token_s
        async with self.devices.lease("policy"):
            await (self._cores.work(work_s) if self._cores else asyncio.sleep(work_s))

    def _num_written(self, groups: Sequence[Group]) -> int:
        return sum(self.lengths[one.id] for group in groups for one in group.trajectories)

    async def _episode(self, prompt: Prompt, id: str, seed: int) -> Trajectory:
        env: Any = (
            _ModelledEnv(self._workload, seed, self._slots, self.outcome.life_s) if self._has_envs else SingleTurn(prompt)
        )
        self._num_in_flight += 1
        self.outcome.num_started += 1
        self.outcome.max_in_flight = max(self.outcome.max_in_flight, self._num_in_flight)
        seeds: list[int] = []

        async def generate(request: Any) -> Any:
            seeds.append(request.sampling.seed)
            started_s = self._loop.time()
            try:
                return await self._generate(request)
            finally:
                self.outcome.life_s["engines"] += self._loop.time() - started_s
                self._loop.jump(self._system.turn_s)

        try:
            trajectory = await play(
                cast(AsyncEnv, env),
                generate,
                cast(Renderer, _Marks(int(prompt.id))),
                SamplingParams(max_tokens=1 << 30, seed=seed),
                id=id,
                **self._limits,
            )
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._all_written.set()
                self._all_written = asyncio.Event()
        self.lengths[id] = sum(self._workload.num_tokens(one, int(prompt.id)) for one in seeds)
        return trajectory

    async def _score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        if self._system.scores_together and self._num_in_flight:
            await self._all_written.wait()
        seed = stable_seed(*map(int, trajectory.id.split(".")))
        if (score_s := self._workload.score_s.of(seed)) > 0:
            self.outcome.life_s["rewards"] += score_s
            await asyncio.sleep(score_s)
        if self._workload.failed and (seed * 0x9E3779B97F4A7C15 >> 20) % 10_000 < self._workload.failed * 10_000:
            raise RewardError("modelled failure")
        return Score(value=self._workload.rewards.of(seed))

    async def _lose(self, at_s: float, ranks: Sequence[int]) -> None:
        await asyncio.sleep(at_s)
        for rank in ranks:
            self.workers.engines[rank].die()

    async def _grow(self, at_s: float, num: int) -> None:
        await asyncio.sleep(at_s)
        self.workers.num_places += num

    def _account(self) -> None:
        """What became of every token."""
        outcome, written = self.outcome, self.workers.written()
        in_flight = {row["number"] for row in self.rollouts.state()["queue"] if row["number"] is not None}
        kept = sum(num for id, num in written.items() if int(id.partition(".")[0]) in in_flight)
        outcome.written_tokens = sum(written.values())
        outcome.wasted_tokens = max(0, outcome.written_tokens - outcome.trained_tokens - kept)
        engines = self.workers.engines
        outcome.engine_busy = [engine.busy_s / outcome.wall_s for engine in engines]
        num_steps = sum(engine.num_steps for engine in self.workers.all_engines)
        outcome.num_running = sum(engine.num_tokens for engine in self.workers.all_engines) / max(1.0, num_steps)
        outcome.ends = {
            name.removeprefix("rollout/").removesuffix("_samples"): int(value)
            for name, value in self.rollouts.stats().values_by_name().items()
            if name.startswith("rollout/") and name.endswith("_samples")
        }


def simulate(
    rollout: RolloutConfig, workload: Workload, system: System, *, num_steps: int, folder: Path, seed: int = 0
) -> Prediction:
    """A run of so many steps on a virtual clock. What happens to samples is written to `folder` as a run's journal."""
    longest = min(workload.max_tokens, workload.lengths.longest)
    per_mark = max(1, round(longest / 64))
    told_every = max(system.engine.report_every, round(longest / 8))
    system = replace(system, engine=replace(system.engine, tokens_per_mark=per_mark, report_every=told_every))

    async def main() -> Prediction:
        return await Simulation(rollout, workload, system, folder, seed=seed).run(num_steps)

    with gc_frozen():  # As in a run.
        return run_virtually(main(), is_charged=system.is_charged)
