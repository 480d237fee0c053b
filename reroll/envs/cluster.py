"""Environments as episodes play them: admitted in turn, timed, on workers that are replaced when they hang or die."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, cast

from reroll.config.envs import (
    EnvConfig,
    EnvWorkersConfig,
    ImportEnvConfig,
    InlineEnvsConfig,
    ProcessEnvsConfig,
    RayEnvsConfig,
    TimedEnvsConfig,
)
from reroll.envs.base import AsyncEnv, StepResult
from reroll.envs.inline import InlineEnv
from reroll.envs.make import env_name, import_problems
from reroll.envs.meter import EnvMeter
from reroll.envs.worker import NOT_OPEN, Close, Command, EnvAnswer, EnvWorker, GiveUp, Open, Step, num_stuck_threads
from reroll.errors import ConfigError, EnvError, EnvLost, RerollError, Violation, WorkerDied, short_error
from reroll.observe.metrics import Stats
from reroll.runtime.base import Placement, Runtime, Workers
from reroll.runtime.devices import num_usable_cores
from reroll.runtime.local import LocalRuntime
from reroll.runtime.processes import ProcessRuntime
from reroll.types import Message

START_TIMEOUT_S = 240.0
"""How long a worker may take to find room on a cluster (two minutes) and to import the environments, which may be heavy."""
LAST_LOOK_S = 0.1
"""How long this process looks for the answer of a call whose time is up: it may have been busy itself when it came."""
MAX_EXCHANGES = 2
"""With one worker at once: one waits there for answers, the other brings it commands."""

_CLOSING = "the run is closing: its environments take no more calls"

_log = logging.getLogger(__name__)


class EnvCluster:
    """Every domain's environments. `live` gives one; at most `max_live` exist at once, and others wait in order of asking.

    A hung call fails its episode; the worker that hosts it takes no new environments and is replaced, and stopped once it
    hosts no other: its process is then killed, a hung thread is left to itself. A worker that dies is replaced; the
    episodes that it hosted get EnvLost.
    """

    def __init__(
        self, config: EnvWorkersConfig, envs: Mapping[str, EnvConfig], *, runtime: Runtime | None, num_workers: int
    ) -> None:
        """Without a runtime environments run in this event loop itself."""
        self.config = config
        self.envs = dict(envs)
        self.meter = EnvMeter(self.envs)
        self.inline: set[InlineEnv] = set()
        """Those that are open in this loop itself."""
        self._runtime = runtime
        self._num_workers = num_workers
        self._handles: list[EnvHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(config.max_live)
        self._live: dict[int, EnvHandle | None] = {}
        self._ids = itertools.count()
        self._is_closed = False

    @classmethod
    async def start(cls, runtime: Runtime, config: EnvWorkersConfig, envs: Mapping[str, EnvConfig]) -> EnvCluster:
        """Start the workers that host environments, which import there what they need.

        User modules are looked for where this process looks. Raises ConfigError with every environment that cannot be
        imported.
        """
        runs_on, num_workers = _workers_of(runtime, config)
        cluster = cls(config, envs, runtime=runs_on, num_workers=num_workers)
        # What is imported into this process is so by this thread: some modules insist on the main one.
        found = [import_problems(envs)] if runs_on is None or runs_on.shares_memory else []
        try:
            cluster._fill()
            found += [await handle.ready for handle in cluster._handles]
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

    def live(self, domain: str, seed: int) -> AsyncEnv:
        """An environment for one episode. It takes its turn when it is reset and gives it back when it is closed."""
        if domain not in self.envs:
            raise ValueError(f"domain {domain} has no environment: add envs.{domain}")
        if self._runtime is not None:
            return _RemoteEnv(self, domain, seed)
        return InlineEnv(self, domain, seed)

    def stats(self) -> Stats:
        """What happened since the last call: waiting, durations and failures by domain, and how many live now."""
        return self.meter.stats(num_live=len(self._live), num_stuck=num_stuck_threads())

    async def close(self) -> None:
        """Close what lives and stop every worker. Episodes that still play get EnvError. Safe to call twice."""
        self._is_closed = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        handles, self._handles = self._handles, []
        await asyncio.gather(*(handle.stop() for handle in handles))
        for error in await asyncio.gather(*(env.close() for env in self.inline), return_exceptions=True):
            if error is not None:
                _log.warning("an environment did not close: %s", error)
        for handle in handles:
            handle.lose(_CLOSING)
        for env_id in list(self._live):
            self.leave(env_id)

    async def enter(self) -> int:
        """Wait for a turn; the id of a new environment."""
        start_s = time.perf_counter()
        await self._turns.acquire()
        self.meter.waited(time.perf_counter() - start_s)
        env_id = self.next_id()
        self._live[env_id] = None
        if self._is_closed:
            self.leave(env_id)
            raise EnvError(_CLOSING)
        return env_id

    async def enter_worker(self) -> tuple[int, EnvHandle]:
        """Wait for a turn; the id of a new environment, and the worker that is to host it.

        That is the one that hosts the fewest; those that have yet to start come last.
        """
        env_id = await self.enter()
        try:
            self._fill()
            open_handles = [handle for handle in self._handles if not handle.is_retired]
            handle = min(open_handles, key=lambda handle: (not handle.ready.done(), len(handle.env_ids)))
            self._live[env_id] = handle
            handle.env_ids.add(env_id)
            await asyncio.shield(handle.ready)
            return env_id, handle
        except BaseException:
            self.leave(env_id)
            raise

    def leave(self, env_id: int) -> None:
        """The environment is no more: the next in line has its turn. Safe to call twice."""
        if env_id not in self._live:
            return
        handle = self._live.pop(env_id)
        self._turns.release()
        if handle is not None:
            handle.env_ids.discard(env_id)
            if handle.is_retired and not handle.env_ids:
                self._remove(handle)

    def is_live(self, env_id: int) -> bool:
        """Whether it holds a turn: it was neither closed, nor given up, nor lost with its worker."""
        return env_id in self._live

    def next_id(self) -> int:
        """A number that no other call or environment of this cluster has."""
        return next(self._ids)

    def _fill(self) -> None:
        """Start workers until there are as many that take environments as there should be."""
        if self._runtime is None or self._is_closed:
            return
        assert isinstance(self.config, TimedEnvsConfig)
        while sum(not handle.is_retired for handle in self._handles) < self._num_workers:
            handle = EnvHandle(self.config.timeout_s, on_hang=self._given_up, on_lost=self._replace)
            handle.start(self._runtime, self.envs, max_message_chars=self.config.max_message_chars)
            self._handles.append(handle)

    def _given_up(self, env_id: int) -> None:
        self.leave(env_id)
        self._fill()

    def _replace(self, handle: EnvHandle) -> None:
        """A worker is gone: its environments with it. One that never worked is replaced when somebody asks for it."""
        if self._is_closed:
            return
        for env_id in list(handle.env_ids):
            self.leave(env_id)
        self._remove(handle)
        if handle.ready.exception() is None:
            self._fill()

    def _remove(self, handle: EnvHandle) -> None:
        if handle in self._handles:
            self._handles.remove(handle)
            task = asyncio.create_task(handle.stop())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class EnvHandle:
    """One worker that hosts environments, as the controller sees it. Belongs to the event loop that it was made in.

    The commands of one turn of the loop travel together, and so do answers that meet: the number of remote calls follows
    time, not steps.
    """

    def __init__(self, timeout_s: float, *, on_hang: Callable[[int], None], on_lost: Callable[[EnvHandle], None]) -> None:
        """`on_hang` is told the environment that was given up, `on_lost` once that the worker is gone."""
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[dict[str, str]] = self._loop.create_future()
        """Resolves when all is imported, to the domains that cannot be and why; raises EnvLost if the worker is lost first."""
        self.ready.add_done_callback(_mark_as_seen)
        self.env_ids: set[int] = set()
        self.is_retired = False
        """It takes no new environments."""
        self.why_lost: str | None = None
        """Why it is gone, if it is."""
        self._timeout_s, self._on_hang, self._on_lost = timeout_s, on_hang, on_lost
        self._workers: Workers[EnvWorker] | None = None
        self._calls: dict[int, _EnvCall] = {}
        """Those that have no answer yet, oldest first."""
        self._late: set[int] = set()
        """Calls whose time was up at the last look."""
        self._timer: asyncio.TimerHandle | None = None
        self._outbox: list[Command] = []
        self._will_flush = False
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        """What is under way: its start, then exchanges."""

    def start(self, runtime: Runtime, nodes: Mapping[str, EnvConfig], *, max_message_chars: int) -> None:
        """Have it made; `ready` tells when it is. What goes wrong loses it."""
        placement = Placement("env", ("cpu",), concurrency=MAX_EXCHANGES, runs_user_code=True)

        async def bring_up() -> None:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    self._workers = await runtime.spawn(EnvWorker, placement, nodes, max_message_chars=max_message_chars)
                    problems = await self._workers.one(0, EnvWorker.import_problems)
            except TimeoutError:
                self.lose(f"importing the environments took longer than {START_TIMEOUT_S:g} s")
            except WorkerDied as error:
                self.lose(f"the process of the environments {error.how} when it imported them")
            except Exception as error:  # Whoever waits for the worker must hear of it.
                why = str(error) if isinstance(error, RerollError) else short_error(error)
                self.lose(f"a worker for environments could not be started: {why}")
            else:
                self.ready.set_result(problems)

        self._begin(bring_up())

    async def stop(self) -> None:
        """Close its environments and leave nothing behind. Safe to call twice."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        if self._workers is not None:
            await self._workers.stop()

    def call(self, command: Open | Step | Close, name: str) -> asyncio.Future[Any]:
        """Send a command to the environment of this name. What it is answered with; or raises InvalidAction, EnvError or
        EnvLost. Whoever stops waiting may cancel it: it goes on, so that a hang is still noticed."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.why_lost is not None:
            future.set_exception(EnvLost(self.why_lost))
            return future
        self._calls[command.call_id] = _EnvCall(command, name, future, self._loop.time() + self._timeout_s)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)
        self._send(command)
        return future

    def has_answered(self, call_id: int) -> bool:
        """Whether nothing comes any more of a call that was sent."""
        return call_id not in self._calls

    def lose(self, reason: str) -> None:
        """Whoever waits for this worker gets EnvLost with the reason; so do later calls."""
        if self.why_lost is not None:
            return
        self.why_lost = reason
        self.is_retired = True
        if not self.ready.done():
            self.ready.set_exception(EnvLost(reason))
        self._fail(reason, EnvLost)
        self._on_lost(self)

    def _send(self, command: Command) -> None:
        self._outbox.append(command)
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what has gathered. One exchange is always out: it brings the answers, or the news that the worker is gone."""
        self._will_flush = False
        num_out = len(self._tasks)
        if self.why_lost is None and (not num_out or (self._outbox and num_out < MAX_EXCHANGES)):
            commands, self._outbox = self._outbox, []
            self._begin(self._exchange(next(self._numbers), commands))

    async def _exchange(self, number: int, commands: list[Command]) -> None:
        assert self._workers is not None
        try:
            answers = await self._workers.one(0, EnvWorker.exchange, number, commands)
        except WorkerDied as error:
            self.lose(f"the process of the environment {error.how}")
        except RerollError as error:
            self.lose(f"the worker of the environment failed: {error}")
        else:
            self._deliver(answers)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():  # Else it is being stopped.
            self._flush()  # Episodes have seen their answers by now, and have sent what they ask next.

    def _deliver(self, answers: list[EnvAnswer]) -> None:
        for call_id, value in answers:
            call = self._calls.pop(call_id, None)
            if call is None or call.future.done():  # Given up in the meantime.
                continue
            if isinstance(value, Exception):
                call.future.set_exception(value)
            else:
                call.future.set_result(value)

    def _look(self) -> None:
        """Give up on the calls whose time is up and was at the last look; look again when the next may be."""
        late = [call for call in self._calls.values() if call.deadline_s <= self._loop.time()]
        for call in late:
            if call.command.call_id in self._late and call.command.call_id in self._calls:
                self._give_up(call)
        self._late = {call.command.call_id for call in late} & self._calls.keys()
        self._timer = None
        if self._late:
            self._timer = self._loop.call_later(LAST_LOOK_S, self._look)
        elif self._calls:
            self._timer = self._loop.call_at(next(iter(self._calls.values())).deadline_s, self._look)

    def _give_up(self, call: _EnvCall) -> None:
        """Its environment hangs: all its calls fail, and the worker takes no new ones."""
        self.is_retired = True
        env_id = call.command.env_id
        method = "reset" if isinstance(call.command, Open) else type(call.command).__name__.lower()
        self._fail(f"{call.name}.{method} took longer than {self._timeout_s:g} s", EnvError, env_id)
        self._send(GiveUp(env_id))
        self._on_hang(env_id)

    def _fail(self, reason: str, kind: type[EnvError], env_id: int | None = None) -> None:
        """Fail the calls of one environment, or all."""
        for call_id, call in list(self._calls.items()):
            if env_id in (None, call.command.env_id):
                del self._calls[call_id]
                if not call.future.done():
                    call.future.set_exception(kind(reason))


class _EnvCall(NamedTuple):
    """A command that has no answer yet."""

    command: Open | Step | Close
    name: str
    future: asyncio.Future[Any]
    deadline_s: float


class _RemoteEnv:
    """An environment on another thread, in another process or on another machine."""

    def __init__(self, cluster: EnvCluster, domain: str, seed: int) -> None:
        self._cluster = cluster
        self._domain = domain
        self._name = env_name(cluster.envs[domain])
        self._seed = seed
        self._id: int | None = None
        self._handle: EnvHandle | None = None
        self._last_call = -1

    async def reset(self) -> tuple[Message, ...]:
        if self._id is not None:
            raise EnvError("reset was called before: an environment is for one episode")
        with self._cluster.meter.counting_failures(self._domain):
            self._id, self._handle = await self._cluster.enter_worker()
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
        handle, self._handle = self._handle, None
        if handle is None or self._id is None or not self._cluster.is_live(self._id):
            return
        env_id, is_busy = self._id, not handle.has_answered(self._last_call)
        closed = handle.call(Close(self._cluster.next_id(), env_id), self._name)
        closed.add_done_callback(_mark_as_seen)
        closed.add_done_callback(lambda _: self._cluster.leave(env_id))
        if not is_busy:
            with self._cluster.meter.counting_failures(self._domain):
                await asyncio.shield(closed)

    def _call(self, command: Open | Step) -> asyncio.Future[Any]:
        if self._handle is None:
            raise EnvError(NOT_OPEN)
        if not self._cluster.is_live(command.env_id):
            if self._handle.why_lost is not None:
                raise EnvLost(self._handle.why_lost)
            raise EnvError("the environment was given up after a call that hung")
        self._last_call = command.call_id
        return self._handle.call(command, self._name)


def _workers_of(runtime: Runtime, config: EnvWorkersConfig) -> tuple[Runtime | None, int]:
    """Where the workers run, and how many there are; none for environments that run right here."""
    match config:
        case InlineEnvsConfig():
            return None, 0
        case ProcessEnvsConfig():
            return ProcessRuntime(), config.num_workers or num_usable_cores()
        case RayEnvsConfig():
            if runtime.shares_memory:
                fix = "set runtime.kind to ray, or env_workers.kind to processes"
                raise ConfigError([Violation("env_workers.kind", "is ray, but the runtime is local", fix)])
            return runtime, config.num_workers
        case _:
            return LocalRuntime(), 1


def _violation(domain: str, node: EnvConfig, why: str) -> Violation:
    if isinstance(node, ImportEnvConfig):
        fix = "the folder of the YAML and the working directory are searched: correct the path, the options or the module"
        return Violation(f"envs.{domain}.env.path", f"{node.path} cannot be used: {why}", fix)
    fix = node.pip_line if node.packages else "mend or reinstall the package that it comes from"
    return Violation(f"envs.{domain}.env.kind", f"{node.kind} cannot be imported: {why}", fix)


def _mark_as_seen(future: asyncio.Future[Any]) -> None:
    """Whoever waited may be gone: an error nobody reads is no bug."""
    if not future.cancelled():
        future.exception()
