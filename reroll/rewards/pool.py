"""Processes that run rewards, kept warm. Each may hang, crash or lie without harm to anything else."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from reroll.config.reward_base import InProcess
from reroll.errors import RewardError, RewardLost
from reroll.rewards.line import Garbled, Line
from reroll.rewards.memory import Spent
from reroll.runtime.children import epitaph, kill_group, kill_marked, marked, with_one_thread
from reroll.types import Prompt, Score, Trajectory

IMPORT_TIMEOUT_S = 120.0
"""How long a process may take to import the rewards; user modules may import heavy libraries."""
MAX_TRIES = 3
"""How many processes may die before they read a question."""
EXIT_TIMEOUT_S = 2.0
"""How long an idle process may take to leave."""

Case = tuple[Prompt, Trajectory]
"""What is to be judged."""


class ProcessPool:
    """Processes that all can judge by every reward. A call takes a free one; if there is none, it starts another or, where
    there are `max_processes` already, waits. Safe to use from many threads."""

    def __init__(
        self,
        rewards: Mapping[str, InProcess],
        *,
        num_processes: int,
        search_path: Sequence[str],
        max_processes: int | None = None,
    ) -> None:
        """`num_processes` are started at once; they import their rewards while nobody waits for them."""
        self._rewards = dict(rewards)
        self._search_path = list(search_path)
        self._max_processes = max_processes or num_processes
        self._lock = threading.Lock()
        self._closed = False
        self._processes: set[_Process] = set()
        self._free: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        for _ in range(num_processes):
            self._start()

    @property
    def num_processes(self) -> int:
        """How many there are now."""
        return len(self._processes)

    def score(self, name: str, cases: Sequence[Case], *, together_s: float = 0.0) -> list[Score | RewardError]:
        """For each case a finite score, or the reason for anything else. A process that hung or died is replaced.

        At least the first is judged. Those are left that come after a loss, or after `together_s`.
        """
        for _ in range(MAX_TRIES):
            with suppress(_NotTaken):
                return self._score(name, cases, together_s)
        return [RewardLost(f"{MAX_TRIES} processes of the reward died in a row before they read what to judge")]

    def _score(self, name: str, cases: Sequence[Case], together_s: float) -> list[Score | RewardError]:
        process = self._take()
        verdicts: list[Score | RewardError] = []
        try:
            process.wait_until_loaded()
            for answer in process.ask(name, list(cases), together_s, timeout_s=self._rewards[name].timeout_s):
                if isinstance(answer, Spent):
                    raise _LostJudging(str(answer))
                verdicts.append(answer)
        except _LostJudging as lost:
            self._replace(process)
            return [*verdicts, self._unjudged(name, str(lost))]
        except _Lost as lost:
            self._replace(process)
            return [RewardLost(str(lost))]
        except BaseException:  # `_NotTaken` among them: another process may be asked.
            self._replace(process)
            raise
        self._free.put(process)
        return verdicts

    def _unjudged(self, name: str, why: str) -> Score | RewardError:
        """The verdict on an answer that could not be judged."""
        verdict = self._rewards[name].verdict_on_hang
        return RewardError(why) if verdict is None else Score(value=verdict, info={"unjudged": 1.0})

    def problems(self) -> dict[str, str]:
        """Rewards that cannot be made, by name, and why."""
        process = self._take()
        try:
            problems = process.wait_until_loaded()
        except _Lost as lost:
            self._replace(process)
            return dict.fromkeys(self._rewards, str(lost))
        self._free.put(process)
        return problems

    def close(self) -> None:
        """Let idle processes leave, kill busy ones. Safe to call twice."""
        with self._lock:
            self._closed = True
            processes, self._processes = self._processes, set()
        self._free.put(None)
        idle = set(iter(self._free.get, None))
        self._free.put(None)  # For those who still wait or come later.
        for process in idle:
            process.hang_up()
        for process in processes:
            if process in idle:
                process.end()
            else:
                process.kill()

    def _take(self) -> _Process:
        while True:
            if self._free.empty():
                self._start()
            process = self._free.get()
            if process is None:
                self._free.put(None)  # For the next one who waits.
                raise RewardError("the run is closing: rewards take no more calls")
            if process.is_fit:
                return process
            self._replace(process)  # Something that user code left behind has ended it or spoken for it.

    def _start(self) -> None:
        with self._lock:
            if self._closed or len(self._processes) >= self._max_processes:
                return
            process = _Process(self._rewards, self._search_path)
            self._processes.add(process)
        self._free.put(process)

    def _replace(self, process: _Process) -> None:
        process.kill()
        process.hang_up()
        with self._lock:
            self._processes.discard(process)
        self._start()


class _Lost(Exception):
    """A process hung or died while it was being waited for."""


class _LostJudging(_Lost):
    """It did so over an answer."""


class _NotTaken(Exception):
    """A process died before it read the question to its end, so nothing that was asked can be the cause."""


class _Process:
    """One child process and the socket to it. It imports its rewards while nobody waits for it."""

    def __init__(self, rewards: Mapping[str, InProcess], search_path: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self._line = Line(ours)
        self._mark = uuid.uuid4().hex
        with theirs:
            # -P keeps the working directory off the path until the child's own imports are done: it may hold a `types.py`.
            # A session of its own: Ctrl-C reaches only the controller, and a kill reaches what user code has started.
            # Its mark is for what leaves that session.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "reroll.rewards.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=marked(self._mark, with_one_thread()),
            )
        self._ending = threading.Lock()
        self._is_killed = False
        self._problems: dict[str, str] | None = None
        self._num_asked = 0
        with suppress(OSError):  # Who waits until it is loaded is told of a child that is gone already.
            self._line.send((list(search_path), dict(rewards)), timeout_s=IMPORT_TIMEOUT_S)

    @property
    def is_fit(self) -> bool:
        """Whether it lives, as far as it can be seen, and waits to be asked."""
        return self._problems is None or self._line.is_quiet

    def wait_until_loaded(self) -> dict[str, str]:
        """Rewards that could not be made, by name, and why."""
        if self._problems is None:
            self._problems = self._receive(IMPORT_TIMEOUT_S, doing="importing the rewards")
        return self._problems

    def ask(self, name: str, cases: list[Case], together_s: float, *, timeout_s: float) -> Iterator[Score | RewardError]:
        """The child's answers, each within this time."""
        self._num_asked += 1
        try:
            self._line.send((self._num_asked, name, cases, together_s), timeout_s=timeout_s)
        except TimeoutError:
            raise _Lost("the reward's process does not read what it is asked") from None
        except OSError:
            raise _NotTaken from None
        while True:
            try:
                match self._receive(timeout_s, doing="judging"):
                    case (self._num_asked, None):
                        return
                    case (self._num_asked, Score() | RewardError() as answer):
                        pass
                    case other:
                        raise _Lost(f"the reward's process answered what it was not asked: {other!r:.100}")
            except _Lost as lost:
                raise _LostJudging(str(lost)) from None
            yield answer

    def hang_up(self) -> None:
        """Let the child leave when it is idle. Only for who has taken it: another may be reading."""
        self._line.close()

    def end(self) -> None:
        """Wait for the child to leave, not for long, then end what it has left behind."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(EXIT_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the child and everything it started, now. Safe to call twice, and while another waits for an answer."""
        with self._ending:
            if not self._is_killed:  # Its number may be another's by the second time.
                self._is_killed = True
                kill_group(self._child.pid)
                kill_marked(self._mark)
                self._child.wait()

    def _receive(self, timeout_s: float, *, doing: str) -> Any:
        try:
            return self._line.receive(timeout_s=timeout_s)
        except TimeoutError:
            raise _Lost(f"the reward took longer than {timeout_s:g} s {doing}: killed") from None
        except Garbled as error:
            raise _Lost(f"the reward's process sent what is no answer {doing} ({error}): killed") from None
        except (EOFError, OSError) as error:
            # A reset is the kernel's word for bytes that the other side left unread.
            if self._num_asked and isinstance(error, ConnectionResetError):
                raise _NotTaken from None
            raise _Lost(f"the reward's process died {doing}{self._epitaph()}") from None

    def _epitaph(self) -> str:
        try:
            code = self._child.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ""
        return epitaph(code)
