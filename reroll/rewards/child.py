"""The process that runs rewards which may hang or die: `python -m reroll.rewards.child FD`. Its pool starts another if so.

First it is told where to look for modules and which rewards there are, makes them, and answers what went wrong with
each. Then it is given trajectories, a few at once. It answers each with a Score or with the reason why there is none, and
ends with None: after the last, or before if the time for them is over. It speaks over a socket of its own: what user code
prints goes nowhere.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import Awaitable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from reroll.config.reward_base import InProcess
from reroll.errors import RewardError
from reroll.rewards.memory import MemoryLimit, Spent
from reroll.rewards.verifiers import Judge, as_score, make_judge
from reroll.runtime.children import follow_parent, last_lines
from reroll.types import Prompt, Score, Trajectory


def main() -> None:
    """Serve until the pool closes its end of the socket."""
    follow_parent()
    connection = Connection(int(sys.argv[1]))
    with connection, asyncio.Runner() as runner:
        search_path, configs = connection.recv()
        sys.path[:0] = [path for path in search_path if path not in sys.path]
        judges, problems = _load(configs)
        limits = {name: MemoryLimit(configs[name].memory_mb) for name in judges}
        connection.send(problems)

        def answer(name: str, prompt: Prompt, trajectory: Trajectory) -> Score | str:
            if name not in judges:
                return problems[name]
            with limits[name]:
                return _judge(runner, judges[name], prompt, trajectory)

        while True:
            try:
                name, cases, together_s = connection.recv()
            except EOFError:
                return
            over_s = time.perf_counter() + together_s
            for place, (prompt, trajectory) in enumerate(cases):
                if place and time.perf_counter() > over_s:
                    break
                connection.send(answer(name, prompt, trajectory))
            connection.send(None)


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


def _judge(runner: asyncio.Runner, judge: Judge, prompt: Prompt, trajectory: Trajectory) -> Score | str:
    """A score, or the reason why there is none."""
    try:
        verdict = judge(prompt, trajectory)
        if inspect.isawaitable(verdict):
            verdict = runner.run(_wait_for(verdict))
        return as_score(verdict)
    except RewardError as error:
        return str(error)
    except MemoryError:
        return Spent("the reward wanted more memory than its memory_mb allows: raise it, or null for no limit")
    except (Exception, SystemExit) as error:
        return last_lines(error)


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


if __name__ == "__main__":
    main()
