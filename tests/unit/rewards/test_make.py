"""Every reward node is made into something that judges."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import get_args

import pytest

from reroll.config.reward_base import InProcess, Judged
from reroll.config.rewards import RewardConfig, needs_process
from reroll.errors import RewardError
from reroll.rewards.base import Inline
from reroll.rewards.said import said
from reroll.rewards.verifiers import VERIFIERS
from reroll.types import Prompt, Score, Trajectory

NODES: dict[str, type[Judged]] = {
    get_args(node.model_fields["kind"].annotation)[0]: node for node in get_args(get_args(RewardConfig)[0])
}
MADE_OTHERWISE = {"import", "stack", "cascade", "code", "judge", "reward_model"}


def test_the_table_of_verifiers_and_the_union_name_the_same_kinds() -> None:
    assert VERIFIERS.keys() | MADE_OTHERWISE == NODES.keys()
    assert not VERIFIERS.keys() & MADE_OTHERWISE


@pytest.mark.parametrize("kind", VERIFIERS)
def test_a_verifier_takes_the_node_of_its_kind(kind: str) -> None:
    module, name = VERIFIERS[kind]
    made = getattr(import_module(module), name)
    parameter = next(iter(inspect.signature(made).parameters.values()))
    assert parameter.annotation in (NODES[kind].__name__, NODES[kind])


@pytest.mark.parametrize("kind", NODES)
def test_what_runs_in_a_process_has_limits(kind: str) -> None:
    node = NODES[kind]
    assert issubclass(node, InProcess) or not node.in_process


@pytest.mark.parametrize("kind", NODES)
def test_every_kind_has_a_weight_and_says_what_it_is(kind: str) -> None:
    assert NODES[kind].model_fields["weight"].default == 1.0
    assert NODES[kind].__doc__


def test_where_a_kind_runs_depends_on_its_pattern_alone() -> None:
    exact = NODES["exact"]
    assert not needs_process(exact(kind="exact"))  # type: ignore[arg-type]
    assert needs_process(exact(kind="exact", pattern="a+"))  # type: ignore[arg-type]


async def test_a_verifier_that_raises_in_place_fails_its_sample_with_the_place() -> None:
    def broken(prompt: Prompt, trajectory: Trajectory) -> Score:
        raise ZeroDivisionError("an odd row")

    with pytest.raises(RewardError, match=r"ZeroDivisionError: an odd row \(.*test_make.py:\d+\)"):
        await Inline(broken)(Prompt(id="p", messages=(), domain="d"), said("x"))
