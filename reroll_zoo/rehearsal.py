"""A user's code, tried before a run begins: imported, its signature read, a loss and an estimator called on a few tokens.
Where no run follows, what it would open is opened too (`opening.py`).

It happens in a process of its own, which is all that a module can spoil by being imported, and only there torch is loaded.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reroll
import reroll_zoo
from reroll.config.advantages import ImportAdvantageConfig
from reroll.config.imports import import_object
from reroll.config.losses import ImportLossConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.rewards import ImportRewardConfig, walk
from reroll.config.tree import RlvrConfig
from reroll.errors import RerollError, Violation, short_error
from reroll_zoo.opening import Attempt, openings

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_S = 300.0
"""Importing may load a model. What takes longer hangs."""

FIX = "mend it, then check again"


def code_violations(config: PipelineConfig, *, opens: bool) -> Iterator[Violation]:
    """What keeps the config's functions and classes from being used; with `opens` also its models, environments, agents and
    rewards. Modules are found as in this process."""
    first = next((where for where, _ in _attempts(config, opens=opens)), None)
    if first is None:
        return
    question = pickle.dumps(sys.path) + pickle.dumps((config, opens))
    command = [sys.executable, "-m", "reroll_zoo.rehearsal"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, input=question, capture_output=True, timeout=TIMEOUT_S, env=environment, check=False)
        problems: dict[str, str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        yield Violation(first, f"importing what the config names takes more than {TIMEOUT_S:g} s", FIX)
        return
    except ValueError:  # It ended before it could answer.
        yield Violation(first, f"importing what the config names ends Python with exit code {done.returncode}", FIX)
        return
    for where, problem in problems.items():
        yield Violation(where, problem, FIX)


def code_problems(config: PipelineConfig, *, opens: bool = False) -> dict[str, str]:
    """{path: problem} of what `code_violations` tries, tried in this process."""
    problems: dict[str, str] = {}
    for where, attempt in _attempts(config, opens=opens):
        try:
            attempt()
        except (Exception, SystemExit) as error:
            if not any(path.startswith(where) for path in problems):  # An environment fails for the code in it.
                problems[where] = _describe(error)
    return problems


def _describe(error: BaseException) -> str:
    """What was raised; and where, unless it is an error of the library's about the user's code."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [Path(package.__path__[0]) for package in (reroll, reroll_zoo)]
    is_ours = any(Path(files[-1]).is_relative_to(folder) for folder in ours)
    return str(error) if is_ours or isinstance(error, RerollError) else short_error(error)


def _attempts(config: PipelineConfig, *, opens: bool) -> Iterator[tuple[str, Attempt]]:
    """(path, attempt) of everything in the tree that is code of the user's; then of what is opened."""
    if isinstance(config, RlvrConfig):
        yield from _code(config)
    if opens:
        yield from openings(config)


def _code(config: RlvrConfig) -> Iterator[tuple[str, Attempt]]:
    for name, reward in walk(config.rewards):
        if isinstance(reward, ImportRewardConfig):
            yield f"rewards.{name}.path", reward.make
    for domain, entry in config.envs.items():
        for where, attempt in entry.env.rehearsals():
            yield f"envs.{domain}.env.{where}", attempt
    for domain, agent in config.agents.items():
        if agent.code is not None:
            yield f"agents.{domain}.path", agent.make
    if isinstance(config.advantage, ImportAdvantageConfig):
        yield "advantage.path", partial(_try_advantage, config.advantage)
    if isinstance(config.loss, ImportLossConfig):
        yield "loss.path", partial(_try_loss, config.loss)


def _try_loss(node: ImportLossConfig) -> None:
    import torch

    from reroll.algo.losses import Tokens

    logp = torch.tensor([-0.1, -0.7, -1.2, -0.2, -2.0, -0.4], requires_grad=True)
    tokens = Tokens(
        logp=logp,
        old_logp=logp.detach() - 0.05,
        advantage=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        mask=torch.tensor([False, True, True, False, True, True]),
        sequence=torch.tensor([0, 0, 0, 1, 1, 1]),
        sampler_logp=logp.detach() - 0.04,
        turn=torch.tensor([-1, 0, 0, -1, 0, 0]),
        entropy=-logp if "entropy" in node.needs else None,
    )
    loss = import_object(node.path)(tokens, **node.options)
    _check_per_token(loss, len(logp), node.path)
    if not loss.requires_grad:
        raise TypeError(f"{node.path} does not depend on the policy's log-probs, so nothing is learned: use t.logp or t.ratio")


def _try_advantage(node: ImportAdvantageConfig) -> None:
    import torch

    from reroll.algo.episodes import Episodes

    episodes = Episodes(
        group=torch.tensor([0, 0, 1, 1]),
        reward=torch.tensor([1.0, 0.0, 0.5, 0.0]),
        turn_episode=torch.arange(4),
        turn_reward=torch.tensor([1.0, 0.0, 0.5, 0.0]),
        turn_state=torch.tensor([0, 0, 1, 1]),
        token_turn=torch.tensor([-1, 0, 0, -1, 1, -1, 2, -1, 3, 3]),
    )
    _check_per_token(import_object(node.path)(episodes, **node.options), len(episodes.token_turn), node.path)


def _check_per_token(values: Tensor | Any, num_tokens: int, path: str) -> None:
    import torch

    if not isinstance(values, torch.Tensor) or values.shape != (num_tokens,):
        is_tensor = isinstance(values, torch.Tensor)
        given = f"a tensor of shape {list(values.shape)}" if is_tensor else f"a {type(values).__name__}"
        raise TypeError(f"{path} gives {given} for {num_tokens} tokens: give one value a token, [T]; averages are taken later")
    if not values.isfinite().all():
        raise ValueError(f"{path} gives numbers that are not finite for ordinary tokens: {values.tolist()}")


def _answer() -> None:
    """The child: reads a config, writes {path: problem}. What imported modules print must not get between."""
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.path[:] = pickle.load(sys.stdin.buffer)
    config, opens = pickle.load(sys.stdin.buffer)
    with answer:
        json.dump(code_problems(config, opens=opens), answer)


if __name__ == "__main__":
    _answer()
