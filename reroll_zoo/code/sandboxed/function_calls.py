"""Asks a program for values and tells them. No expected value is ever here: there is nothing to read or to overrule."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from reroll_zoo.code.sandboxed.wire import encode, load, take_stdio, tell

ALARM_INTERVAL_S = 0.1
"""The alarm repeats: a bare `except:` in the program swallows the first."""


class Late(BaseException):
    """A call ran past its time."""


def main() -> None:
    """Run the program of the job on stdin, then answer one question after the other, a line of JSON each."""
    job = json.loads(sys.stdin.read())
    out = take_stdio()
    signal.signal(signal.SIGALRM, _raise_late)
    try:
        names = load(job["program"], job["setup"])
    except BaseException as error:
        tell(out, {"broken": type(error).__name__})
        os._exit(1)
    tell(out, {"ready": True})
    for question in job["questions"]:
        reply = _reply(question, names, job["call_s"])
        tell(out, reply)
        if job["stop_early"] and "value" not in reply:
            break
    # The program may have left threads and exit hooks behind: they are not waited for.
    os._exit(0)


def _raise_late(*_: object) -> None:
    raise Late


def _reply(question: dict[str, Any], names: dict[str, Any], call_s: float) -> dict[str, Any]:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, call_s, ALARM_INTERVAL_S)
            if "expression" in question:
                value = eval(compile(question["expression"], "<test>", "eval"), names)
            else:
                value = _function(question["function"], names)(*question["args"], **question["kwargs"])
            return {"value": encode(value, lambda value: {"opaque": type(value).__name__}), "true": bool(value)}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Late:
        return {"late": True}
    except BaseException as error:
        return {"raised": type(error).__name__}


def _function(name: str, names: dict[str, Any]) -> Any:
    """The function of that name, or the method of a new `Solution`."""
    if name in names or "Solution" not in names:
        return names[name]
    return getattr(names["Solution"](), name)
