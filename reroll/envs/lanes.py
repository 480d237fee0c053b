"""The places where environments run, as the controller sees them: commands go in, awaited answers come out."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from reroll.config.envs import EnvConfig
from reroll.envs.base import InvalidAction
from reroll.envs.crew import CLOSE_TIMEOUT_S, Answer, Command, EnvCrew, EnvWorker
from reroll.errors import EnvError, EnvLost, WorkerDied, WorkerError
from reroll.runtime.base import Placement, Runtime, Workers
from reroll.runtime.children import Unframer, epitaph, framed, kill_group, search_path, with_one_thread

IMPORT_TIMEOUT_S = 120.0
"""How long a place may take to import the environments; user modules may import heavy libraries."""
EXIT_TIMEOUT_S = CLOSE_TIMEOUT_S + 2.0
"""How long a process may take to close its environments and leave."""
POLL_S = 1.0
"""How long a worker holds a call that has nothing to report."""

_log = logging.getLogger(__name__)


class Lane(ABC):
    """One place where environments run. Belongs to the event loop it was made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[dict[str, str]] = self._loop.create_future()
        """Resolves when all is imported, to the domains that cannot be and why; raises EnvLost if the place is lost first."""
        self.ready.add_done_callback(_mark_as_seen)
        self.on_lost: Callable[[Lane], None] = lambda lane: None
        """Called once, when the place is gone without having been stopped."""
        self.env_ids: set[int] = set()
        self.is_retired = False
        """It takes no new environments."""
        self.epitaph: str | None = None
        """Why it is gone, if it is."""
        self._calls: dict[int, tuple[int, asyncio.Future[Any]]] = {}

    @abstractmethod
    async def start(self) -> None:
        """Bring it to life; `ready` tells when it is. What goes wrong loses it."""

    @abstractmethod
    async def stop(self) -> None:
        """Close its environments and leave nothing behind. Safe to call twice."""

    @abstractmethod
    def _send(self, command: Command) -> None: ...

    def call(self, command: Command) -> asyncio.Future[Any]:
        """Send a command. The answer is messages, an StepResult or nothing; or raises InvalidAction, EnvError or EnvLost."""
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(_mark_as_seen)
        if self.epitaph is not None:
            future.set_exception(EnvLost(self.epitaph))
        else:
            self._calls[command.call_id] = (command.env_id, future)
            self._send(command)
        return future

    def abandon(self, env_id: int, reason: str) -> None:
        """Give up on an environment that hangs: its calls fail, and the place takes no new ones."""
        self.is_retired = True
        self._fail(reason, EnvError, env_id)

    @property
    def num_stuck(self) -> int:
        """Threads of this process that hang and cannot be ended."""
        return 0

    def lose(self, reason: str) -> None:
        """Whoever waits for this place gets EnvLost with the reason; so do later calls."""
        if self.epitaph is not None:
            return
        self.epitaph = reason
        self.is_retired = True
        if not self.ready.done():
            self.ready.set_exception(EnvLost(reason))
        self._fail(reason, EnvLost)
        self.on_lost(self)

    def _deliver(self, answers: list[Answer]) -> None:
        for answer in answers:
            _, future = self._calls.pop(answer.call_id, (0, None))
            if future is None or future.done():  # Given up in the meantime.
                continue
            if answer.failure is not None:
                future.set_exception(EnvError(answer.failure))
            elif answer.invalid is not None:
                future.set_exception(InvalidAction(answer.invalid))
            else:
                future.set_result(answer.value)

    def _fail(self, reason: str, kind: type[EnvError], env_id: int | None = None) -> None:
        """Fail the calls of one environment, or all."""
        for call_id, (caller, future) in list(self._calls.items()):
            if env_id in (None, caller):
                del self._calls[call_id]
                if not future.done():
                    future.set_exception(kind(reason))


class ThreadLane(Lane):
    """A crew in this process. It cannot be lost; threads that hang are counted and left."""

    def __init__(self, nodes: Mapping[str, EnvConfig], *, max_message_chars: int) -> None:
        super().__init__()
        self._crew = EnvCrew(nodes, self._report, max_message_chars=max_message_chars)
        self._answers: deque[Answer] = deque()
        self._will_deliver = False

    async def start(self) -> None:
        self.ready.set_result(self._crew.import_ahead())

    async def stop(self) -> None:
        await asyncio.to_thread(self._crew.close)

    def abandon(self, env_id: int, reason: str) -> None:
        self._fail(reason, EnvError, env_id)
        self._crew.abandon(env_id)
        _log.warning("%s: its thread cannot be ended and is left to itself (%d so far)", reason, self.num_stuck)

    @property
    def num_stuck(self) -> int:
        return self._crew.num_stuck

    def _send(self, command: Command) -> None:
        self._crew.do(command)

    def _report(self, answer: Answer) -> None:
        """Called from the crew's threads. One wake-up of the loop delivers all that has come until then."""
        self._answers.append(answer)
        if not self._will_deliver:
            self._will_deliver = True
            with suppress(RuntimeError):  # The loop is closed: nobody waits.
                self._loop.call_soon_threadsafe(self._deliver_all)

    def _deliver_all(self) -> None:
        self._will_deliver = False
        while self._answers:
            self._deliver([self._answers.popleft()])


class ProcessLane(Lane, asyncio.Protocol):
    """A child process. The commands of one turn of the loop travel as one message, and so do answers that meet."""

    def __init__(self, nodes: Mapping[str, EnvConfig], *, max_message_chars: int) -> None:
        super().__init__()
        self._setup = (search_path(), dict(nodes), max_message_chars)
        self._outbox: list[Command] = []
        self._unframer = Unframer()
        self._transport: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._hung_up = asyncio.Event()
        self._end: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # -P keeps the working directory off the path until the child's own imports are done: it may hold a
                # `types.py`. A session of its own: Ctrl-C reaches only the controller, a kill reaches what it has started.
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "reroll.envs.child", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env=with_one_thread(),
                )
            self._end = asyncio.create_task(self._watch(self._process))
            await self._loop.create_unix_connection(lambda: self, sock=ours)
        except OSError as error:
            ours.close()
            self.lose(f"a process for environments could not be started: {error}")

    async def stop(self) -> None:
        self._is_stopped = True
        if self._end is None:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        has_work = self.ready.done() and not self.is_retired
        done, _ = await asyncio.wait({self._end}, timeout=EXIT_TIMEOUT_S if has_work else 0.0)
        if not done:
            self._kill()
            await asyncio.wait({self._end})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(framed(self._setup))

    def data_received(self, data: bytes) -> None:
        for message in self._unframer.feed(data):
            if isinstance(message, dict):
                self.ready.set_result(message)
            else:
                self._deliver(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hung_up.set()
        self._kill()  # Without its socket it is of no use.

    def _send(self, command: Command) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(commands))

    def _kill(self) -> None:
        if self._process is not None:
            kill_group(self._process.pid)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of the process, then for its last words, then tell who waits."""
        import_timer = self._loop.call_later(IMPORT_TIMEOUT_S, self._give_up_import)
        exit_code = await process.wait()
        import_timer.cancel()
        self._kill()  # What it has started dies with it, and lets go of the socket.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hung_up.wait(), 1.0)
        if self._transport is not None:
            self._transport.close()
        if not self._is_stopped:
            self.lose(f"the process of the environment died{epitaph(exit_code)}")

    def _give_up_import(self) -> None:
        if not self.ready.done():
            self.lose(f"importing the environments took longer than {IMPORT_TIMEOUT_S:g} s: the process was killed")
            self._kill()


class RayLane(Lane):
    """A worker of the runtime, reached by two streams of calls: one that posts commands, one that waits for answers."""

    def __init__(self, runtime: Runtime, nodes: Mapping[str, EnvConfig], *, max_message_chars: int) -> None:
        super().__init__()
        self._runtime = runtime
        self._nodes = nodes
        self._max_message_chars = max_message_chars
        self._workers: Workers[EnvWorker] | None = None
        self._outbox: list[Command] = []
        self._has_mail = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        placement = Placement("env", ("cpu",), concurrency=4)  # Post, collect, close, and one to spare.
        try:
            self._workers = await self._runtime.spawn(
                EnvWorker, placement, self._nodes, max_message_chars=self._max_message_chars
            )
            problems = await asyncio.wait_for(self._workers.one(0, EnvWorker.import_ahead), IMPORT_TIMEOUT_S)
        except TimeoutError:
            self.lose(f"importing the environments took longer than {IMPORT_TIMEOUT_S:g} s")
        except WorkerError as error:
            self.lose(_actor_epitaph(error))
        else:
            self._tasks = [asyncio.create_task(self._guard(stream)) for stream in (self._post, self._collect)]
            self.ready.set_result(problems)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._workers is not None:
            await self._workers.stop()

    def _send(self, command: Command) -> None:
        self._outbox.append(command)
        self._has_mail.set()

    async def _guard(self, stream: Callable[[Workers[EnvWorker]], Any]) -> None:
        assert self._workers is not None
        try:
            await stream(self._workers)
        except WorkerError as error:
            self.lose(_actor_epitaph(error))

    async def _post(self, workers: Workers[EnvWorker]) -> None:
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            commands, self._outbox = self._outbox, []
            await workers.one(0, EnvWorker.post, commands)

    async def _collect(self, workers: Workers[EnvWorker]) -> None:
        while True:
            self._deliver(await workers.one(0, EnvWorker.collect, wait_s=POLL_S))


def _actor_epitaph(error: WorkerError) -> str:
    if isinstance(error, WorkerDied):
        return "the actor of the environment died: it crashed, was killed, ran out of memory, or its node was lost"
    return f"the actor of the environment failed: {error}"


def _mark_as_seen(future: asyncio.Future[Any]) -> None:
    """Whoever waited may be gone: an error nobody reads is no bug."""
    if not future.cancelled():
        future.exception()
