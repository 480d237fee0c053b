"""The program that has one answer scored inside the sandbox. It stands alone: only its text gets there.

The scorer may run the answer in this very process, so the answer may not name what could choose the verdict: it is looked at
as it is about to be run, when sympy has put its own words into it.
"""

from __future__ import annotations

import base64
import dis
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
_FORMULAS = """
    BINARY_OP BINARY_SLICE BINARY_SUBSCR BUILD_LIST BUILD_SET BUILD_SLICE BUILD_TUPLE CACHE CALL CALL_INTRINSIC_1 COMPARE_OP
    LIST_EXTEND LOAD_ATTR LOAD_CONST LOAD_METHOD LOAD_NAME LOAD_SMALL_INT NOP PRECALL PUSH_NULL RESUME RETURN_CONST RETURN_VALUE
    SET_UPDATE UNARY_INVERT UNARY_NEGATIVE UNARY_POSITIVE
"""
_INSTRUCTIONS = frozenset(_FORMULAS.split())
"""What formulas and lists of them compile to. There are no calls by keyword and no tables among them: with those sympy's
`Function` makes a class with any methods, one that is equal to everything among them."""
_STARTS = compile("from sympy import *", "<string>", "exec")
"""What sympy's parser runs before it reads anything."""


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
        if event == "exec" and args[0].co_filename.startswith("<") and not _is_formula(args[0], names):
            refused.append(args[0])
            raise RuntimeError("the answer names what it may not")

    sys.addaudithook(hear)
    try:
        value = float(score(given))
    except Exception:  # An answer that the scorer did not expect is wrong.
        value = 0.0
    print(f"\n{token}", 0.0 if refused or value != value else value, flush=True)


def _is_formula(code: CodeType, names: Collection[str]) -> bool:
    """Whether text that is about to be run computes with these names and variables of one letter, and does nothing else."""
    if (code.co_names, code.co_consts, code.co_code) == (_STARTS.co_names, _STARTS.co_consts, _STARTS.co_code):
        return True
    computes = all(instruction.opname in _INSTRUCTIONS for instruction in dis.get_instructions(code))
    return computes and all(name in names or len(name) == 1 for name in code.co_names)


if __name__ == "__main__":
    main()
