from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from reroll_zoo.guarded.watch import AuditWatch, Refused

TEXT = "abs(1) + 1"


class Marker:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize(
    "act",
    [
        lambda path: eval(TEXT),
        lambda path: exec(f"open({str(path)!r}, 'w')"),
        lambda path: eval("[0 for x in (1, 2)]"),
        lambda path: eval("f'{1:>9}'"),
        lambda path: eval("[0] * len('a')"),
        lambda path: exec("from os import *"),
        lambda path: path.touch(),
        lambda path: open(path, "w"),  # noqa: SIM115
        lambda path: subprocess.run(["touch", path]),
        lambda path: pickle.loads(pickle.dumps(Marker(path))),
        lambda path: __import__("antigravity"),
        lambda path: path.parent.chmod(0o777),
    ],
)
def test_nothing_but_computing_happens(act: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "mark"
    with AuditWatch() as watch:
        with pytest.raises(Refused):
            act(path)
        with pytest.raises(Refused):
            act(path)
    assert watch.refused
    assert not path.exists()
    assert "antigravity" not in sys.modules


def test_a_refusal_that_is_caught_is_remembered() -> None:
    with AuditWatch() as watch:
        try:
            eval(TEXT)
        except Exception:
            value = 0
    assert (value, watch.refused) == (0, "exec")


def test_computing_is_let_happen() -> None:
    with AuditWatch() as watch:
        assert json.loads("[1]") == [1]
        assert Fraction("1/2") * 2 == 1
        assert f"{1 / 3:.2f}" == "0.33"
    assert watch.refused is None


@pytest.mark.parametrize("text", ["1", "-1.5", "'a'", "[1, 'a', (2, None)]", "{'a': [1]}", "{1, 2}", "[]", "2 * 3"])
def test_a_literal_is_let_be_run(text: str) -> None:
    with AuditWatch() as watch:
        assert eval(text) is not None
    assert watch.refused is None


def test_what_does_not_compile_is_not_run() -> None:
    with AuditWatch() as watch, pytest.raises(SyntaxError):
        eval("this is no Python")
    assert watch.refused is None


def test_only_the_thread_that_is_in_it_is_watched() -> None:
    results: list[int] = []
    with AuditWatch() as watch:
        other = threading.Thread(target=lambda: results.append(eval(TEXT)))
        other.start()
        other.join()
    assert (results, watch.refused) == ([2], None)
    assert eval(TEXT) == 2


def test_a_watch_within_another_gives_way_to_it() -> None:
    with AuditWatch() as outer:
        with AuditWatch() as inner, pytest.raises(Refused):
            eval(TEXT)
        with pytest.raises(Refused):
            eval(TEXT)
    assert inner.refused == outer.refused == "exec"
    assert eval(TEXT) == 2
