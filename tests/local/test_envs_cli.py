"""`reroll envs check` as a user types it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Check = Callable[..., "subprocess.CompletedProcess[str]"]

MY_ENVS = """
from reroll.envs.base import InvalidAction, StepResult

class Door:
    def __init__(self, *, key="red", broken=False):
        self.key, self.broken = key, broken

    def reset(self, seed):
        self.is_open = False
        return ({"role": "user", "content": f"Room {seed}. Use a key."},)

    def step(self, action):
        if self.is_open:
            return StepResult(terminated=True, reward=float(self.broken))
        if action != self.key:
            raise InvalidAction("name the key")
        self.is_open = True
        return StepResult(terminated=True, reward=1.0)

    def close(self):
        pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    return tmp_path


@pytest.fixture
def check(reroll: Callable[..., Any], folder: Path) -> Check:
    return lambda *words: reroll("envs", "check", *words, cwd=folder)


def test_a_bundled_kind_is_checked_with_its_options(check: Check) -> None:
    done = check("frozen_lake", "size=3", "slippery=true", "--seeds", "3")
    assert done.returncode == 0, done.stderr
    assert "equal seeds and actions give equal episodes" in done.stdout
    assert "3 of 3 begin differently" in done.stdout
    assert "failed" not in done.stdout


def test_a_class_of_ones_own_is_checked_with_given_actions(check: Check) -> None:
    done = check("my_envs:Door", "key=blue", "--action", "green", "--action", "blue")
    assert done.returncode == 0, done.stderr
    assert "an invalid action leaves the state unchanged" in done.stdout


def test_a_failure_is_shown_with_its_fix_and_ends_with_1(check: Check) -> None:
    done = check("my_envs:Door", "broken=true", "--action", "red")
    assert done.returncode == 1
    assert "failed" in done.stdout
    assert "it goes on, with reward 1" in done.stdout
    assert "→ raise EnvError, or answer with the same end and no reward" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["frozen_lake", "sise=3"], "did you mean size?"),
        (["maze"], "frozen_lake, sokoban"),
        (["frozen_lake", "size"], "is not key=value"),
    ],
)
def test_a_name_or_option_that_does_not_exist_is_refused_with_the_fix(check: Check, words: list[str], told: str) -> None:
    done = check(*words)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_class_that_cannot_be_imported_is_a_failed_check(check: Check) -> None:
    done = check("no_such_module:Env")
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stdout
