"""`reroll envs check` as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MY_ENVS = """
from reroll.envs.base import InvalidAction, Outcome

class Door:
    def __init__(self, *, key="red", broken=False):
        self.key, self.broken = key, broken

    def reset(self, seed):
        self.is_open = False
        return ({"role": "user", "content": f"Room {seed}. Use a key."},)

    def step(self, action):
        if self.is_open:
            return Outcome(terminated=True, reward=float(self.broken))
        if action != self.key:
            raise InvalidAction("name the key")
        self.is_open = True
        return Outcome(terminated=True, reward=1.0)

    def close(self):
        pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    return tmp_path


def check(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reroll", "envs", "check", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | {"COLUMNS": "160"})


def test_a_bundled_kind_is_checked_with_its_options(folder: Path) -> None:
    done = check("frozen_lake", "size=3", "slippery=true", "--seeds", "3", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "equal seeds and actions give equal episodes" in done.stdout
    assert "3 of 3 begin differently" in done.stdout
    assert "failed" not in done.stdout


def test_a_class_of_ones_own_is_checked_with_given_actions(folder: Path) -> None:
    done = check("my_envs:Door", "key=blue", "--action", "green", "--action", "blue", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "an invalid action leaves the state unchanged" in done.stdout


def test_a_failure_is_shown_with_its_fix_and_ends_with_1(folder: Path) -> None:
    done = check("my_envs:Door", "broken=true", "--action", "red", cwd=folder)
    assert done.returncode == 1
    assert "failed" in done.stdout
    assert "it goes on, with reward 1" in done.stdout
    assert "→ raise EnvError, or answer with the same end and no reward" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["frozen_lake", "sise=3"], "did you mean size?"),
        (["maze"], "choose one of: 'frozen_lake'"),
        (["frozen_lake", "size"], "is not key=value"),
    ],
)
def test_a_name_or_option_that_does_not_exist_is_refused_with_the_fix(folder: Path, words: list[str], told: str) -> None:
    done = check(*words, cwd=folder)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_class_that_cannot_be_imported_is_a_failed_check(folder: Path) -> None:
    done = check("no_such_module:Env", cwd=folder)
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stdout
