"""Processes that run rewards, kept warm. Each may hang, crash or lie without harm to anything else."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from typing import Any

from reroll.config.reward_base import InProcess
from reroll.errors import RewardError
from reroll.rewards.memory import Spent
from reroll.runtime.children import epitaph, kill_group
from reroll.types import Prompt, Score, Trajectory

IMPORT_TIMEOUT_S = 120.0
"""How long a process may take to import the rewards; user modules may import heavy libraries."""
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
        process = self._take()
        verdicts: list[Score | RewardError] = []
        try:
            process.wait_until_loaded()
            for answer in process.ask((name, list(cases), together_s), timeout_s=self._rewards[name].timeout_s):
                if isinstance(answer, Spent):
                    raise _LostJudging(answer)
                verdicts.append(answer if isinstance(answer, Score) else RewardError(answer))
        except _LostJudging as lost:
            self._replace(process)
            return [*verdicts, self._unjudged(name, str(lost))]
        except _Lost as lost:
            self._replace(process)
            return [RewardError(str(lost))]
        except BaseException:
            self._replace(process)
            raise
        self._free.put(process)
        return verdicts

    def _unjudged(self, name: str, why: str) -> Score | RewardError:
        """The verdict on an answer that could not be judged."""
        verdict = self._rewards[name].verdict_on_hang
        return RewardError(why) if verdict is None else Score(value=verdict, parts={"unjudged": 1.0})

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
        if self._free.empty():
            self._start()
        process = self._free.get()
        if process is None:
            self._free.put(None)  # For the next one who waits.
            raise RewardError("the run is closing: rewards take no more calls")
        return process

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


class _Process:
    """One child process and the socket to it. It imports its rewards while nobody waits for it."""

    def __init__(self, rewards: Mapping[str, InProcess], search_path: Sequence[str]) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            # -P keeps the working directory off the path until the child's own imports are done: it may hold a `types.py`.
            # A session of its own: Ctrl-C reaches only the controller, and a kill reaches what user code has started.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "reroll.rewards.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._ending = threading.Lock()
        self._is_killed = False
        self._problems: dict[str, str] | None = None
        self._connection.send((list(search_path), dict(rewards)))

    def wait_until_loaded(self) -> dict[str, str]:
        """Rewards that could not be made, by name, and why."""
        if self._problems is None:
            self._problems = self._receive(IMPORT_TIMEOUT_S, doing="importing the rewards")
        return self._problems

    def ask(self, message: Any, *, timeout_s: float) -> Iterator[Score | str]:
        """The child's answers, each within this time: scores or reasons."""
        try:
            self._connection.send(message)
        except OSError:
            raise _Lost(f"the reward's process is gone{self._epitaph()}") from None
        try:
            while (answer := self._receive(timeout_s, doing="judging")) is not None:
                yield answer
        except _Lost as lost:
            raise _LostJudging(str(lost)) from None

    def hang_up(self) -> None:
        """Let the child leave when it is idle. Only for who has taken it: another may be reading."""
        self._connection.close()

    def end(self) -> None:
        """Wait for the child to leave, not for long."""
        try:
            self._child.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the child and everything it started, now. Safe to call twice, and while another waits for an answer."""
        with self._ending:
            if not self._is_killed:  # Its number may be another's by the second time.
                self._is_killed = True
                kill_group(self._child.pid)
                self._child.wait()

    def _receive(self, timeout_s: float, *, doing: str) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise _Lost(f"the reward took longer than {timeout_s:g} s {doing}: killed")
            return self._connection.recv()
        except (EOFError, OSError):
            raise _Lost(f"the reward's process died {doing}{self._epitaph()}") from None

    def _epitaph(self) -> str:
        try:
            code = self._child.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ""
        return epitaph(code)
