"""The process that runs user rewards: `python -m reroll.rewards.child FD`. It may hang or die; its pool starts another.

First it is told where to look for modules and which rewards there are, imports them, and answers what went wrong with
each. Then it answers one trajectory at a time, with a Score or with the reason why there is none. It speaks over a socket
of its own: what user code prints goes nowhere.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from reroll.config.rewards import ImportReward, ReasoningGymReward
from reroll.errors import RewardError
from reroll.rewards.match import extract
from reroll.runtime.children import follow_parent, last_lines
from reroll.types import Prompt, Score, Trajectory

Judge = Callable[[Prompt, Trajectory], Any]


def main() -> None:
    """Serve until the pool closes its end of the socket."""
    follow_parent()
    connection = Connection(int(sys.argv[1]))
    with connection, asyncio.Runner() as runner:
        search_path, configs = connection.recv()
        sys.path[:0] = [path for path in search_path if path not in sys.path]
        judges, problems = _load(configs)
        connection.send(problems)
        while True:
            try:
                domain, prompt, trajectory = connection.recv()
            except EOFError:
                return
            connection.send(_judge(runner, judges[domain], prompt, trajectory) if domain in judges else problems[domain])


def _load(configs: Mapping[str, ImportReward | ReasoningGymReward]) -> tuple[dict[str, Judge], dict[str, str]]:
    """What judges each domain, and what is wrong with the domains that have nothing to judge them."""
    judges: dict[str, Judge] = {}
    problems: dict[str, str] = {}
    for domain, config in configs.items():
        try:
            judges[domain] = _imported(config) if isinstance(config, ImportReward) else _reasoning_gym(config)
        except (Exception, SystemExit) as error:
            problems[domain] = last_lines(error)
    return judges, problems


def _imported(config: ImportReward) -> Judge:
    module_name, _, name = config.path.partition(":")
    function = reduce(getattr, name.split("."), importlib.import_module(module_name))
    if not callable(function):
        raise TypeError(f"{config.path} is {type(function).__name__}, not a function")
    return lambda prompt, trajectory: function(prompt, trajectory, **config.options)


def _reasoning_gym(config: ReasoningGymReward) -> Judge:
    import reasoning_gym

    generators: dict[str, Any] = {}

    def judge(prompt: Prompt, trajectory: Trajectory) -> float:
        if "reasoning_gym" not in prompt.extra:
            raise RewardError(f"prompt {prompt.id} is not a reasoning-gym task: give its domain another reward")
        task = prompt.extra["reasoning_gym"]
        key = repr((task["name"], task["options"]))
        if key not in generators:
            generators[key] = reasoning_gym.create_dataset(task["name"], **task["options"])
        score: float = generators[key].score_answer(extract(trajectory.text, config.pattern), task["entry"])
        return score

    return judge


def _judge(runner: asyncio.Runner, judge: Judge, prompt: Prompt, trajectory: Trajectory) -> Score | str:
    """A score, or the reason why there is none."""
    try:
        verdict = judge(prompt, trajectory)
        if inspect.isawaitable(verdict):
            verdict = runner.run(_wait_for(verdict))
        return as_score(verdict)
    except RewardError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return last_lines(error)


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def as_score(verdict: object) -> Score:
    """What a user function returned, as a finite Score. Raises RewardError for anything else."""
    if isinstance(verdict, Score):
        parts = {name: _finite(part, f"part {name}") for name, part in verdict.parts.items()}
        return Score(value=_finite(verdict.value, "value"), parts=parts)
    return Score(value=_finite(verdict, "value"))


def _finite(number: object, what: str) -> float:
    if not isinstance(number, numbers.Real | np.bool_):
        raise RewardError(f"the reward's {what} is a {type(number).__name__}: return a number or a Score")
    value = float(number)
    if not math.isfinite(value):
        raise RewardError(f"the reward's {what} is {value}: return a finite number")
    return value


if __name__ == "__main__":
    main()
