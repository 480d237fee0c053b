"""The program that has one answer scored inside the sandbox. It stands alone: only its text gets there.

The scorer may run the answer in this very process, so the answer may not name what could choose the verdict: it is looked at
as it is about to be run, when sympy has put its own words into it.
"""

from __future__ import annotations

import base64
import pickle
import re
import sys
from collections.abc import Collection
from types import CodeType
from typing import Any

_MATHEMATICS = """
    Abs Add Eq Float Function Integer Mul Pow Rational Symbol abs acos acosh acot asin asinh atan atan2 atanh binomial cbrt
    ceiling cos cosh cot coth csc erf erfc erfi exp factorial floor gamma ln log max min oo pi root sec sech sign sin sinc sinh
    sqrt tan tanh zoo Ei Si Ci li Li Max Min Mod sympy
"""
_NAMES = frozenset(_MATHEMATICS.split())
"""What an answer may name beside the words of the reference. Not what would solve the task for it: `integrate`, `Integral`."""


def main() -> None:
    """Score the answer on standard input."""
    job = pickle.loads(base64.b64decode(sys.stdin.buffer.read()))
    token, given = job["token"], job["given"]
    scope: dict[str, Any] = job["task"]
    exec(job["scorer"], scope)
    print(token, "ready", flush=True)
    refused: list[CodeType] = []
    names = _NAMES.union(re.findall(r"[A-Za-z]+", job["reference"]))
    score = scope.pop("score")
    del job, scope

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event == "exec" and args[0].co_filename.startswith("<") and not _names_only(args[0], names):
            refused.append(args[0])
            raise RuntimeError("the answer names what it may not")

    sys.addaudithook(hear)
    try:
        value = float(score(given))
    except Exception:  # An answer that the scorer did not expect is wrong.
        value = 0.0
    print(f"\n{token}", 0.0 if refused or value != value else value, flush=True)


def _names_only(code: CodeType, names: Collection[str]) -> bool:
    """Whether text that is about to be run names only these and variables of one letter, and makes no function of its own."""
    nested = any(isinstance(constant, CodeType) for constant in code.co_consts)
    return not nested and all(name in names or len(name) == 1 for name in code.co_names)


if __name__ == "__main__":
    main()
