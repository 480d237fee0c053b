"""How adapters are built from config, and the randomness they share a process with."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from pydantic import TypeAdapter

from reroll.config.env_base import EnvConfig
from reroll.errors import ConfigError
from reroll_zoo.adapters.config import GymnasiumConfig
from reroll_zoo.adapters.global_random import GlobalRandom


def test_a_node_is_chosen_by_its_kind() -> None:
    node = TypeAdapter(EnvConfig).validate_python({"kind": "gymnasium", "env_id": "CartPole-v1", "repeat": 2})
    assert node == GymnasiumConfig(env_id="CartPole-v1", repeat=2)


def test_a_missing_package_is_named_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "reroll_zoo.adapters.gymnasium", raising=False)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"gymnasium needs a package .*pip install 'reroll\[gymnasium\]'"):
        GymnasiumConfig(env_id="CartPole-v1").make()


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
