"""Environments as episodes play them: admitted in turn, timed, and replaced where they run when that place hangs or dies."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

from reroll.config.envs import EnvConfig, EnvWorkersConfig, ImportEnv, InlineEnvs, ProcessEnvs, RayEnvs, ThreadEnvs, TimedEnvs
from reroll.envs.base import Env, LiveEnv, StepResult
from reroll.envs.crew import Close, Command, Open, Step
from reroll.envs.host import NOT_OPEN, as_messages, as_outcome, blaming
from reroll.envs.lanes import Lane, ProcessLane, RayLane, ThreadLane
from reroll.envs.make import env_name, import_problems, make_env
from reroll.envs.meter import EnvMeter
from reroll.errors import ConfigError, EnvError, EnvLost, Violation
from reroll.observe.metrics import Stats
from reroll.runtime.base import Runtime
from reroll.runtime.children import last_lines
from reroll.runtime.devices import num_usable_cores
from reroll.types import Message

_CLOSING = "the run is closing: its environments take no more calls"

_log = logging.getLogger(__name__)


class EnvCluster:
    """Every domain's environments. `live` gives one; at most `max_live` exist at once, and others wait in order of asking.

    A hung call fails its episode; the place where it ran takes no new environments and is replaced, and a process or
    actor is killed once no other environment needs it. A place that dies is replaced; the episodes it ran get EnvLost.
    """

    def __init__(
        self, config: EnvWorkersConfig, envs: Mapping[str, EnvConfig], *, make_lane: Callable[[], Lane] | None, num_lanes: int
    ) -> None:
        self.config = config
        self.envs = dict(envs)
        self.meter = EnvMeter(self.envs)
        self._make_lane = make_lane
        self._num_lanes = num_lanes
        self._lanes: list[Lane] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(config.max_live)
        self._live: dict[int, Lane | None] = {}
        self.inline: set[_InlineEnv] = set()
        """Those that are open in this loop itself."""
        self._ids = itertools.count()
        self._is_closed = False

    @classmethod
    async def start(cls, runtime: Runtime, config: EnvWorkersConfig, envs: Mapping[str, EnvConfig]) -> EnvCluster:
        """Start the places where environments run and import there what they need.

        User modules are looked for where this process looks. Raises ConfigError with every environment that cannot be
        imported.
        """
        make_lane, num_lanes = _lanes_of(runtime, config, envs)
        cluster = cls(config, envs, make_lane=make_lane, num_lanes=num_lanes)
        try:
            cluster._fill()
            found = [await lane.ready for lane in cluster._lanes] or [import_problems(envs)]
        except EnvError as error:
            await cluster.close()
            raise ConfigError([Violation("env_workers", str(error), "check that the environments can be imported")]) from error
        except BaseException:
            await cluster.close()
            raise
        if problems := {domain: why for problems in found for domain, why in problems.items()}:
            await cluster.close()
            raise ConfigError([_violation(domain, cluster.envs[domain], why) for domain, why in problems.items()])
        return cluster

    def live(self, domain: str, seed: int) -> LiveEnv:
        """An environment for one episode. It takes its place when it is reset and gives it back when it is closed."""
        if domain not in self.envs:
            raise ValueError(f"domain {domain} has no environment: add envs.{domain}")
        kind = _InlineEnv if self._make_lane is None else _RemoteEnv
        return kind(self, domain, seed)

    def stats(self) -> Stats:
        """What happened since the last call: waiting, durations and failures by domain, and how many live now."""
        return self.meter.stats(num_live=len(self._live), num_stuck=sum(lane.num_stuck for lane in self._lanes))

    async def close(self) -> None:
        """Close what lives and stop every place. Episodes that still play get EnvError. Safe to call twice."""
        self._is_closed = True
        for lane in self._lanes:
            lane.on_lost = lambda lane: None
        await asyncio.gather(*self._tasks, return_exceptions=True)
        lanes, self._lanes = self._lanes, []
        await asyncio.gather(*(lane.stop() for lane in lanes))
        for error in await asyncio.gather(*(env.close() for env in self.inline), return_exceptions=True):
            if error is not None:
                _log.warning("an environment did not close: %s", error)
        for lane in lanes:
            lane.lose(_CLOSING)
        for env_id in list(self._live):
            self.leave(env_id)

    async def enter(self) -> tuple[int, Lane | None]:
        """Wait for a turn; the id of a new environment and the place where it shall run, if not here."""
        start_s = time.perf_counter()
        await self._turns.acquire()
        self.meter.waited(time.perf_counter() - start_s)
        env_id = self.next_id()
        self._live[env_id] = None
        try:
            if self._is_closed:
                raise EnvError(_CLOSING)
            return env_id, None if self._make_lane is None else await self._settle(env_id)
        except BaseException:
            self.leave(env_id)
            raise

    def leave(self, env_id: int) -> None:
        """The environment is no more: the next in line has its turn. Safe to call twice."""
        if env_id not in self._live:
            return
        lane = self._live.pop(env_id)
        self._turns.release()
        if lane is not None:
            lane.env_ids.discard(env_id)
            if lane.is_retired and not lane.env_ids:
                self._remove(lane)

    def call(self, lane: Lane, command: Command, *, domain: str) -> asyncio.Future[Any]:
        """Send a command to a place, and give up on it after the time limit."""
        assert isinstance(self.config, TimedEnvs)
        answer = lane.call(command)
        timer = asyncio.get_running_loop().call_later(self.config.timeout_s, self._give_up, lane, command, domain)
        answer.add_done_callback(lambda _: timer.cancel())
        return answer

    def is_live(self, env_id: int) -> bool:
        """Whether it holds a turn: it was neither closed, nor given up, nor lost with its place."""
        return env_id in self._live

    def next_id(self) -> int:
        """A number that no other call or environment of this cluster has."""
        return next(self._ids)

    def _give_up(self, lane: Lane, command: Command, domain: str) -> None:
        assert isinstance(self.config, TimedEnvs)
        method = "reset" if isinstance(command, Open) else type(command).__name__.lower()
        reason = f"{env_name(self.envs[domain])}.{method} took longer than {self.config.timeout_s:g} s"
        lane.abandon(command.env_id, reason)
        self.leave(command.env_id)
        self._fill()

    async def _settle(self, env_id: int) -> Lane:
        """The place for a new environment: the one with the fewest; those that have yet to start come last."""
        self._fill()
        open_lanes = [lane for lane in self._lanes if not lane.is_retired]
        lane = min(open_lanes, key=lambda lane: (not lane.ready.done(), len(lane.env_ids)))
        self._live[env_id] = lane
        lane.env_ids.add(env_id)
        await asyncio.shield(lane.ready)
        return lane

    def _fill(self) -> None:
        """Start places until there are as many that take environments as there should be."""
        if self._make_lane is None or self._is_closed:
            return
        while sum(not lane.is_retired for lane in self._lanes) < self._num_lanes:
            lane = self._make_lane()
            lane.on_lost = self._replace
            self._lanes.append(lane)
            self._background(_start(lane))

    def _replace(self, lane: Lane) -> None:
        """A place is gone: its environments with it. One that never worked is replaced when somebody asks for it."""
        for env_id in list(lane.env_ids):
            self.leave(env_id)
        self._remove(lane)
        if lane.ready.exception() is None:
            self._fill()

    def _remove(self, lane: Lane) -> None:
        if lane in self._lanes:
            self._lanes.remove(lane)
            lane.on_lost = lambda lane: None
            self._background(lane.stop())

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _InlineEnv:
    """An environment in the event loop itself."""

    def __init__(self, cluster: EnvCluster, domain: str, seed: int) -> None:
        self._cluster = cluster
        self._domain = domain
        self._seed = seed
        self._node = cluster.envs[domain]
        self._name = env_name(self._node)
        self._max_chars = cluster.config.max_message_chars
        self._env: Env | None = None
        self._id: int | None = None

    async def reset(self) -> tuple[Message, ...]:
        if self._id is not None:
            raise EnvError("reset was called before: an environment is for one episode")
        self._id, _ = await self._cluster.enter()
        with self._cluster.meter.timing(self._domain, "reset"):
            with blaming(self._name, "__init__"):
                self._env = make_env(self._node)
            self._cluster.inline.add(self)
            with blaming(self._name, "reset"):
                messages: Any = self._env.reset(self._seed)
                if inspect.isawaitable(messages):
                    messages = await messages
                return as_messages(messages, max_chars=self._max_chars)

    async def step(self, action: str) -> StepResult:
        if self._env is None:
            raise EnvError(NOT_OPEN)
        with self._cluster.meter.timing(self._domain, "step"), blaming(self._name, "step", max_chars=self._max_chars):
            outcome: Any = self._env.step(action)
            if not isinstance(outcome, StepResult) and inspect.isawaitable(outcome):
                outcome = await outcome
            return as_outcome(outcome, max_chars=self._max_chars)

    async def close(self) -> None:
        env, self._env = self._env, None
        self._cluster.inline.discard(self)
        if self._id is not None:
            self._cluster.leave(self._id)
        if env is not None:
            close: Callable[[], Any] = env.close
            with self._cluster.meter.counting_failures(self._domain), blaming(self._name, "close"):
                closed = close()
                if inspect.isawaitable(closed):
                    await closed


class _RemoteEnv:
    """An environment on another thread, in another process or on another machine."""

    def __init__(self, cluster: EnvCluster, domain: str, seed: int) -> None:
        self._cluster = cluster
        self._domain = domain
        self._seed = seed
        self._id: int | None = None
        self._lane: Lane | None = None
        self._last: asyncio.Future[Any] | None = None

    async def reset(self) -> tuple[Message, ...]:
        if self._id is not None:
            raise EnvError("reset was called before: an environment is for one episode")
        with self._cluster.meter.counting_failures(self._domain):
            self._id, self._lane = await self._cluster.enter()
        with self._cluster.meter.timing(self._domain, "reset"):
            opening = Open(self._cluster.next_id(), self._id, self._domain, self._seed)
            return cast(tuple[Message, ...], await self._call(opening))

    async def step(self, action: str) -> StepResult:
        with self._cluster.meter.timing(self._domain, "step"):
            if self._id is None:
                raise EnvError(NOT_OPEN)
            return cast(StepResult, await self._call(Step(self._cluster.next_id(), self._id, action)))

    async def close(self) -> None:
        """Wait until it is closed; but do not wait for a call that nobody awaits any more: it is closed after that."""
        lane, self._lane = self._lane, None
        if lane is None or self._id is None or not self._cluster.is_live(self._id):
            return
        env_id, is_busy = self._id, self._last is not None and not self._last.done()
        closed = self._cluster.call(lane, Close(self._cluster.next_id(), env_id), domain=self._domain)
        closed.add_done_callback(lambda _: self._cluster.leave(env_id))
        if not is_busy:
            with self._cluster.meter.counting_failures(self._domain):
                await asyncio.shield(closed)

    async def _call(self, command: Open | Step) -> Any:
        if self._lane is None:
            raise EnvError(NOT_OPEN)
        if not self._cluster.is_live(command.env_id):
            if self._lane.epitaph is not None:
                raise EnvLost(self._lane.epitaph)
            raise EnvError("the environment was given up after a call that hung")
        self._last = self._cluster.call(self._lane, command, domain=self._domain)
        # What is under way goes on when the episode is cancelled, so that a hang is still noticed.
        return await asyncio.shield(self._last)


def _lanes_of(
    runtime: Runtime, config: EnvWorkersConfig, envs: Mapping[str, EnvConfig]
) -> tuple[Callable[[], Lane] | None, int]:
    """How a place is made, and how many there are; none for environments that run right here."""
    max_chars = config.max_message_chars
    match config:
        case InlineEnvs():
            return None, 0
        case ThreadEnvs():
            return lambda: ThreadLane(envs, max_message_chars=max_chars), 1
        case ProcessEnvs():
            return lambda: ProcessLane(envs, max_message_chars=max_chars), config.num_workers or num_usable_cores()
        case RayEnvs():
            if runtime.shares_memory:
                fix = "set runtime.kind to ray, or env_workers.kind to processes"
                raise ConfigError([Violation("env_workers.kind", "is ray, but the runtime is local", fix)])
            return lambda: RayLane(runtime, envs, max_message_chars=max_chars), config.num_workers


async def _start(lane: Lane) -> None:
    try:
        await lane.start()
    except Exception as error:  # Whoever waits for the place must hear of it.
        lane.lose(f"a place for environments could not be started: {last_lines(error)}")


def _violation(domain: str, node: EnvConfig, why: str) -> Violation:
    if isinstance(node, ImportEnv):
        fix = "the folder of the YAML and the working directory are searched: correct the path, the options or the module"
        return Violation(f"envs.{domain}.env.path", f"{node.path} cannot be used: {why}", fix)
    fix = node.pip_line if node.packages else "mend or reinstall the package that it comes from"
    return Violation(f"envs.{domain}.env.kind", f"{node.kind} cannot be imported: {why}", fix)
