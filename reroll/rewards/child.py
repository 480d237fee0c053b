"""The process that runs rewards which may hang or die: `python -m reroll.rewards.child FD`. Its pool starts another if so.

First it is told where to look for modules and which rewards there are, makes them, and answers what went wrong with
each. Then it is given questions: a number, and a few trajectories. It answers each with a Score or with the reason why there
is none, and ends with None: after the last, or before if the time for them is over. Every answer carries the number of its
question. It speaks over a socket of its own, which no process that user code starts gets hold of: what user code prints goes
nowhere.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from reroll.config.reward_base import InProcess
from reroll.errors import RewardError
from reroll.rewards.base import as_score, raised
from reroll.rewards.memory import MemoryLimit, Spent
from reroll.rewards.verifiers import Judge, make_judge
from reroll.runtime.children import follow_parent, framed, last_lines, read_frames
from reroll.types import Prompt, Score, Trajectory


def main() -> None:
    """Serve until the pool closes its end of the socket."""
    follow_parent()
    with _Line(int(sys.argv[1])) as line, asyncio.Runner() as runner:
        search_path, configs = next(line.questions)
        sys.path[:0] = [path for path in search_path if path not in sys.path]
        judges, problems = _load(configs)
        limits = {name: MemoryLimit(configs[name].memory_mb) for name in judges}
        line.answer(problems)

        def verdict(name: str, prompt: Prompt, trajectory: Trajectory) -> Score | RewardError:
            if name not in judges:
                return RewardError(problems[name])
            with limits[name]:
                return _judge(runner, judges[name], prompt, trajectory)

        for number, name, cases, together_s in line.questions:
            over_s = time.perf_counter() + together_s
            for place, (prompt, trajectory) in enumerate(cases):
                if place and time.perf_counter() > over_s:
                    break
                line.answer((number, verdict(name, prompt, trajectory)))
            line.answer((number, None))


class _Line:
    """The process's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # A program that user code runs does not get it.
        self._pid = os.getpid()
        self._socket = socket.socket(fileno=descriptor)
        self._stream = self._socket.makefile("rb")
        self.questions = read_frames(self._stream)
        os.register_at_fork(after_in_child=self._let_go)  # Nor does a process that it forks.

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        self._socket.close()

    def answer(self, message: Any) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # A fork of user code that came back here: the original answers.
        self._socket.sendall(framed(message))

    def _let_go(self) -> None:
        if (descriptor := self._socket.detach()) >= 0:  # A fork of a fork has let go of it already.
            os.close(descriptor)


def _load(configs: Mapping[str, InProcess]) -> tuple[dict[str, Judge], dict[str, str]]:
    """What judges each name, and what is wrong with the names that have nothing to judge them."""
    judges: dict[str, Judge] = {}
    problems: dict[str, str] = {}
    for name, config in configs.items():
        try:
            judges[name] = make_judge(config)
        except (Exception, SystemExit) as error:
            problems[name] = last_lines(error)
    return judges, problems


def _judge(runner: asyncio.Runner, judge: Judge, prompt: Prompt, trajectory: Trajectory) -> Score | RewardError:
    """A score, or the reason why there is none."""
    try:
        verdict = judge(prompt, trajectory)
        if inspect.isawaitable(verdict):
            verdict = runner.run(_wait_for(verdict))
        return as_score(verdict)
    except RewardError as error:
        return RewardError(str(error))  # Not one of user code's own making, which the pool could not read.
    except MemoryError:
        return Spent("the reward wanted more memory than its memory_mb allows: raise it, or null for no limit")
    except (Exception, SystemExit) as error:
        return raised(error)


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


if __name__ == "__main__":
    main()
