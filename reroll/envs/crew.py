"""Threads that run a host's environments. The same crew works in the run's own process, in a child and in a Ray actor."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from reroll.config.envs import EnvConfig
from reroll.envs.base import InvalidAction, StepResult
from reroll.envs.host import NOT_OPEN, EnvHost
from reroll.envs.make import import_problems
from reroll.errors import EnvError
from reroll.runtime.base import WorkerInfo
from reroll.runtime.children import last_lines
from reroll.types import Message

CLOSE_TIMEOUT_S = 1.0
"""How long the environments that are left may take to close when their place is closed."""

_log = logging.getLogger(__name__)


class Open(NamedTuple):
    """Build the environment of a domain and reset it. Answered with its first messages."""

    call_id: int
    env_id: int
    domain: str
    seed: int


class Step(NamedTuple):
    """Act. Answered with an StepResult."""

    call_id: int
    env_id: int
    action: str


class Close(NamedTuple):
    """Close the environment, after what was asked of it before. Answered with nothing."""

    call_id: int
    env_id: int


Command = Open | Step | Close


class Answer(NamedTuple):
    """What came of one command."""

    call_id: int
    value: tuple[Message, ...] | StepResult | None = None
    invalid: str | None = None
    """The message of an InvalidAction."""
    failure: str | None = None
    """The message of an EnvError."""


class EnvCrew:
    """Runs commands and reports their answers. Every environment has a thread to itself from its first call to its last.

    So a slow or hung one holds up no other, and libraries that want to be called from one thread are.
    """

    def __init__(self, nodes: Mapping[str, EnvConfig], report: Callable[[Answer], None], *, max_message_chars: int) -> None:
        self._nodes = dict(nodes)
        self._report = report
        self._host = EnvHost(max_message_chars=max_message_chars)
        self._lock = threading.Lock()
        self._seats: dict[int, _Seat] = {}
        self._idle: list[_Seat] = []
        self._stuck: set[_Seat] = set()

    def import_ahead(self) -> dict[str, str]:
        """Import what the environments need. Domains that cannot, and why."""
        return import_problems(self._nodes)

    def do(self, command: Command) -> None:
        """Take a command; its answer is reported from another thread, or at once if there is nothing to do."""
        with self._lock:
            seat = self._seats.get(command.env_id)
            if seat is None and isinstance(command, Open):
                seat = self._seats[command.env_id] = self._idle.pop() if self._idle else _Seat(self._run)
            if seat is not None:
                seat.commands.put(command)
                return
        gone = NOT_OPEN if isinstance(command, Step) else None
        self._report(Answer(command.call_id, failure=gone))

    def abandon(self, env_id: int) -> None:
        """Give up on an environment whose call hangs. Its thread ends once the call returns; until then it counts as stuck."""
        self._host.interrupt(env_id)
        with self._lock:
            seat = self._seats.pop(env_id, None)
            if seat is None:
                return
            self._stuck.add(seat)
        seat.commands.put(Close(-1, env_id))
        seat.commands.put(None)

    @property
    def num_stuck(self) -> int:
        """Threads in a call that was given up and has not returned."""
        with self._lock:
            self._stuck = {seat for seat in self._stuck if seat.is_alive()}
            return len(self._stuck)

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close every environment and end every thread, except those that hang."""
        with self._lock:
            seats = {*self._seats.values(), *self._idle, *self._stuck}
            for env_id, seat in self._seats.items():
                self._host.interrupt(env_id)
                seat.commands.put(Close(-1, env_id))
            self._seats, self._idle, self._stuck = {}, [], set()
        for seat in seats:
            seat.commands.put(None)
        deadline_s = time.monotonic() + timeout_s
        for seat in seats:
            seat.join(max(0.0, deadline_s - time.monotonic()))
        if left := sum(seat.is_alive() for seat in seats):
            _log.warning("%d environments hang and cannot be closed: their threads are left behind", left)
        self._host.stop_loop()

    def _run(self, seat: _Seat, command: Command) -> None:
        try:
            answer = Answer(command.call_id, value=self._call(command))
        except InvalidAction as error:
            answer = Answer(command.call_id, invalid=str(error))
        except EnvError as error:
            answer = Answer(command.call_id, failure=str(error))
        except BaseException as error:  # Nothing may end the thread: others wait for its answer.
            answer = Answer(command.call_id, failure=last_lines(error))
        if isinstance(command, Close) or (isinstance(command, Open) and answer.failure is not None):
            self._free(seat, command.env_id)
        self._report(answer)

    def _call(self, command: Command) -> tuple[Message, ...] | StepResult | None:
        match command:
            case Open(_, env_id, domain, seed):
                return self._host.open(env_id, self._nodes[domain], seed)
            case Step(_, env_id, action):
                return self._host.step(env_id, action)
            case Close(_, env_id):
                self._host.close(env_id)
        return None

    def _free(self, seat: _Seat, env_id: int) -> None:
        with self._lock:
            if self._seats.pop(env_id, None) is not None:
                self._idle.append(seat)


class _Seat(threading.Thread):
    """One thread and the commands that wait for it. A daemon: a hung one must not keep the process alive."""

    def __init__(self, run: Callable[[_Seat, Command], None]) -> None:
        super().__init__(name="env", daemon=True)
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._run_command = run
        self.start()

    def run(self) -> None:
        while (command := self.commands.get()) is not None:
            self._run_command(self, command)


class EnvWorker:
    """A crew as a worker of a runtime. Commands and answers travel in batches, so the number of calls follows time."""

    def __init__(self, info: WorkerInfo, nodes: Mapping[str, EnvConfig], *, max_message_chars: int) -> None:
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._crew = EnvCrew(nodes, self._answers.put, max_message_chars=max_message_chars)

    def import_ahead(self) -> dict[str, str]:
        """Import what the environments need. Domains that cannot, and why."""
        return self._crew.import_ahead()

    def post(self, commands: Sequence[Command]) -> None:
        """Take commands, in this order."""
        for command in commands:
            self._crew.do(command)

    def collect(self, *, wait_s: float) -> list[Answer]:
        """The answers since the last call; waits for one if there are none."""
        answers: list[Answer] = []
        with suppress(queue.Empty):
            answers.append(self._answers.get(timeout=wait_s))
            while True:
                answers.append(self._answers.get_nowait())
        return answers

    def close(self) -> None:
        self._crew.close()
