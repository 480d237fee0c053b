"""Work in processes of its own: what comes of each, and of one that dies or hangs."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))  # scripts, no package

from in_processes import Lost, in_processes


def end_as_named(name: str) -> str:
    if name == "dies":
        os._exit(3)
    if name == "raises":
        raise ValueError("no such thing")
    if name == "hangs":
        threading.Event().wait()
    return name.upper()


def test_one_that_raises_or_dies_costs_its_own_name_alone() -> None:
    found = dict(in_processes(end_as_named, ["dies", "one", "raises", "two"], at_once=2, limit_s=600))

    assert found["one"] == "ONE"
    assert found["two"] == "TWO"
    assert found["dies"] == Lost("its process ended with exit code 3")
    assert found["raises"] == Lost("ValueError: no such thing")


def test_one_that_hangs_is_ended_and_what_is_left_then_is_told() -> None:
    found = dict(in_processes(end_as_named, ["hangs", "late"], at_once=1, limit_s=0.2))

    assert found["hangs"] == Lost("it did not end in time")
    assert found["late"] == Lost("there was no time left for it")
