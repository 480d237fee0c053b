"""How adapters are built from config, and the randomness they share a process with."""

from __future__ import annotations

import random
import sys
from inspect import signature
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import TypeAdapter

from reroll.config.env_adapters import AdapterConfig, GymnasiumEnv
from reroll.envs.adapters import ADAPTERS, build_adapter
from reroll.envs.adapters.global_random import GlobalRandom
from reroll.errors import ConfigError

NODES = {node.model_fields["kind"].annotation.__args__[0]: node for node in get_args(get_args(AdapterConfig)[0])}


def test_every_config_node_has_an_adapter() -> None:
    assert set(ADAPTERS) == set(NODES)


@pytest.mark.parametrize("kind", sorted(ADAPTERS))
def test_the_fields_of_a_node_are_the_arguments_of_its_class(kind: str) -> None:
    package, name, _ = ADAPTERS[kind]
    pytest.importorskip(package)
    module = pytest.importorskip(f"reroll.envs.adapters.{package}")
    arguments = signature(getattr(module, name)).parameters
    assert set(arguments) == set(NODES[kind].model_fields) - {"kind"}
    for argument in arguments.values():
        field = NODES[kind].model_fields[argument.name]
        given = argument.default is not argument.empty
        assert given == (not field.is_required())
        default: Any = field.get_default(call_default_factory=True)
        assert not given or argument.default == default or (argument.default is None and default == {})


def test_a_node_is_chosen_by_its_kind() -> None:
    node = TypeAdapter(AdapterConfig).validate_python({"kind": "gymnasium", "env_id": "CartPole-v1", "repeat": 2})
    assert node == GymnasiumEnv(kind="gymnasium", env_id="CartPole-v1", repeat=2)


def test_a_missing_package_is_named_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "reroll.envs.adapters.gymnasium", raising=False)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"gymnasium needs a package .*pip install 'reroll\[gymnasium\]'"):
        build_adapter(GymnasiumEnv(kind="gymnasium", env_id="CartPole-v1"))


def test_episodes_draw_from_global_generators_of_their_own() -> None:
    def draw(generators: GlobalRandom) -> tuple[float, float]:
        with generators.in_place():
            return random.random(), float(np.random.random())

    alone = GlobalRandom(7)
    expected = [draw(alone) for _ in range(3)]
    first, second = GlobalRandom(7), GlobalRandom(8)
    interleaved = [(draw(first), draw(second))[0] for _ in range(3)]
    assert interleaved == expected
    assert len(set(expected)) == 3


def test_the_global_generators_are_left_as_they_were_even_by_an_error() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()

    def fail() -> None:
        with GlobalRandom(1).in_place():
            raise ZeroDivisionError(random.random() + np.random.random())

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
