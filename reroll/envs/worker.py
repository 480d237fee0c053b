"""The worker that hosts environments: commands in, answers out, and a thread for each environment.

The same worker runs on threads of the run's process, in a process of its own and in a Ray actor.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from reroll.config.envs import EnvConfig
from reroll.envs.base import Env, InvalidAction, StepResult
from reroll.envs.checked import as_env_error, as_messages, as_step_result
from reroll.envs.make import env_name, import_problems, make_env
from reroll.errors import EnvError, short_error
from reroll.runtime.base import WorkerInfo
from reroll.types import Message

NOT_OPEN = "the environment is not open: reset it first, and step it no more after close"
CLOSE_TIMEOUT_S = 1.0
"""How long the environments that are left may take to close when their worker is closed."""
_LOOP_END_S = 1.0
"""How long the tasks of async environments may take to end once they are cancelled."""

_log = logging.getLogger(__name__)


class Open(NamedTuple):
    """Build the environment of a domain and reset it. Answered with its first messages."""

    call_id: int
    env_id: int
    domain: str
    seed: int


class Step(NamedTuple):
    """Act. Answered with a StepResult."""

    call_id: int
    env_id: int
    action: str


class Close(NamedTuple):
    """Close the environment, after what was asked of it before. Answered with nothing."""

    call_id: int
    env_id: int


class GiveUp(NamedTuple):
    """A call of this environment hangs: cancel what it awaits, close it if the call ever returns. Not answered."""

    env_id: int


Command = Open | Step | Close | GiveUp


class EnvAnswer(NamedTuple):
    """What came of one command: what it is answered with, or what the caller is to raise."""

    call_id: int
    value: tuple[Message, ...] | StepResult | InvalidAction | EnvError | None


class EnvWorker:
    """Runs commands. Every environment has a thread to itself from its first call to its last.

    So a slow or hung one holds up no other, and libraries that want to be called from one thread are.
    """

    def __init__(self, info: WorkerInfo, nodes: Mapping[str, EnvConfig], *, max_message_chars: int) -> None:
        self._nodes = dict(nodes)
        self._max_message_chars = max_message_chars
        self._problems = import_problems(self._nodes)
        self._loop = LoopThread()
        self._lock = threading.Lock()
        self._threads: dict[int, _EnvThread] = {}
        self._idle: list[_EnvThread] = []
        self._given_up: list[_EnvThread] = []
        self._early: dict[int, Sequence[Command]] = {}
        """Commands of exchanges that have overtaken another."""
        self._num_exchanges = 0
        self._answers: queue.SimpleQueue[EnvAnswer | None] = queue.SimpleQueue()
        self._collecting = threading.Lock()

    def import_problems(self) -> dict[str, str]:
        """Domains whose environment could not be imported, and why."""
        return self._problems

    def exchange(self, number: int, commands: Sequence[Command]) -> list[EnvAnswer]:
        """Take commands; wait for answers, to whatever command, and give those that there are.

        Does not wait while another exchange does: then it gives none. Exchanges are numbered from 0, and their commands
        are taken in that order, whichever thread comes first.
        """
        with self._lock:
            self._early[number] = commands
            while (next_commands := self._early.pop(self._num_exchanges, None)) is not None:
                self._num_exchanges += 1
                for command in next_commands:
                    self._take(command)
        if not self._collecting.acquire(blocking=False):
            return []
        try:
            answers = [self._answers.get()]
            while not self._answers.empty():
                answers.append(self._answers.get())
        finally:
            self._collecting.release()
        return [answer for answer in answers if answer is not None]

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close every environment and end every thread, except those that hang."""
        with self._lock:
            threads = [*self._threads.values(), *self._idle, *self._given_up]
            for env_id, thread in self._threads.items():
                thread.interrupt()
                thread.commands.put(Close(-1, env_id))
            self._threads, self._idle, self._given_up = {}, [], []
        for thread in threads:
            thread.commands.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        stuck = [thread for thread in threads if thread.is_alive()]
        for thread in stuck:
            thread.is_given_up = True
        if stuck:
            _log.warning("%d environments hang and cannot be closed: their threads are left behind", len(stuck))
        self._loop.stop()
        self._answers.put(None)  # Lets an exchange go that waits.

    def _take(self, command: Command) -> None:
        thread = self._threads.get(command.env_id)
        if isinstance(command, GiveUp):
            self._give_up(command.env_id)
        elif thread is not None:
            thread.commands.put(command)
        elif isinstance(command, Open):
            thread = self._threads[command.env_id] = self._idle.pop() if self._idle else _EnvThread(self._run)
            thread.commands.put(command)
        else:
            self._answers.put(EnvAnswer(command.call_id, EnvError(NOT_OPEN) if isinstance(command, Step) else None))

    def _give_up(self, env_id: int) -> None:
        """Its thread ends once the call returns; until then it counts as stuck."""
        thread = self._threads.pop(env_id, None)
        if thread is None:
            return
        self._given_up = [*(other for other in self._given_up if other.is_alive()), thread]
        thread.is_given_up = True
        thread.interrupt()
        thread.commands.put(Close(-1, env_id))
        thread.commands.put(None)

    def _run(self, thread: _EnvThread, command: Command) -> None:
        """In the environment's thread."""
        assert not isinstance(command, GiveUp)
        if isinstance(command, Open):
            thread.env = HostedEnv(self._nodes[command.domain], self._loop, max_message_chars=self._max_message_chars)
        value = _outcome(thread.env, command)
        if isinstance(command, Close) or (isinstance(command, Open) and isinstance(value, EnvError)):
            thread.env = None
            with self._lock:
                if self._threads.pop(command.env_id, None) is not None:
                    self._idle.append(thread)
        self._answers.put(EnvAnswer(command.call_id, value))


class _EnvThread(threading.Thread):
    """A thread, the environment that it runs, and the commands that wait for it.

    A daemon: a hung one must not keep the process alive.
    """

    def __init__(self, run: Callable[[_EnvThread, Command], None]) -> None:
        super().__init__(name="env", daemon=True)
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.env: HostedEnv | None = None
        self.is_given_up = False
        self._run_command = run
        self.start()

    def run(self) -> None:
        while (command := self.commands.get()) is not None:
            self._run_command(self, command)

    def interrupt(self) -> None:
        """Cancel what its environment awaits, if it does: its call then fails."""
        env = self.env
        if env is not None:
            env.interrupt()


def num_stuck_threads() -> int:
    """Threads of this process in a call that was given up and has not returned."""
    return sum(isinstance(thread, _EnvThread) and thread.is_given_up for thread in threading.enumerate())


def _outcome(env: HostedEnv | None, command: Command) -> Any:
    """What the environment answers. Errors are made anew: theirs hold on to all that the environment was doing."""
    try:
        if env is None:
            raise EnvError(NOT_OPEN)
        match command:
            case Step(_, _, action):
                return env.step(action)
            case Open(_, _, _, seed):
                return env.open(seed)
            case Close():
                return env.close()
    except InvalidAction as error:
        return InvalidAction(str(error))
    except EnvError as error:
        return EnvError(str(error))
    except BaseException as error:  # Nothing may end the thread: others wait for its answer.
        return EnvError(short_error(error))


class HostedEnv:
    """One environment, called by one thread.

    What it raises becomes EnvError naming the method; InvalidAction passes. What it returns is checked; if it is async, it
    is awaited on that loop.
    """

    def __init__(self, node: EnvConfig, loop: LoopThread, *, max_message_chars: int) -> None:
        self._node = node
        self._name = env_name(node)
        self._loop = loop
        self._max_chars = max_message_chars
        self._env: Env | None = None
        self._awaited: Future[Any] | None = None

    def open(self, seed: int) -> tuple[Message, ...]:
        """Build the environment and reset it. If that fails, it is closed."""
        try:
            with as_env_error(self._name, "__init__"):
                self._env = make_env(self._node)
            with as_env_error(self._name, "reset"):
                return as_messages(self._settled(self._env.reset(seed)), max_chars=self._max_chars)
        except BaseException:
            try:
                self.close()
            except EnvError as error:
                _log.warning("an environment that failed to open failed to close too: %s", error)
            raise

    def step(self, action: str) -> StepResult:
        """What the environment answers."""
        if self._env is None:
            raise EnvError(NOT_OPEN)
        with as_env_error(self._name, "step", max_chars=self._max_chars):
            return as_step_result(self._settled(self._env.step(action)), max_chars=self._max_chars)

    def close(self) -> None:
        """Close the environment. Safe to call twice."""
        env, self._env = self._env, None
        if env is not None:
            close: Callable[[], Any] = env.close
            with as_env_error(self._name, "close"):
                self._settled(close())

    def interrupt(self) -> None:
        """From any thread: cancel what it awaits, if it does."""
        awaited = self._awaited
        if awaited is not None:
            awaited.cancel()

    def _settled(self, value: Any) -> Any:
        """The value itself, or what it is once awaited."""
        if isinstance(value, StepResult) or not inspect.isawaitable(value):
            return value
        self._awaited = self._loop.submit(value)
        try:
            return self._awaited.result()
        finally:
            self._awaited = None


class LoopThread:
    """An event loop in a thread of its own, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, value: Awaitable[Any]) -> Future[Any]:
        """Await it there."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="env loop", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(_awaited(value), self._loop)

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_LOOP_END_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # Its end cancels the tasks that are left.
        runner.get_loop().run_forever()


async def _awaited(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:  # Either would end the loop of all environments.
        raise EnvError(short_error(error)) from error
