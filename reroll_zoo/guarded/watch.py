"""Notices when a library does more with a policy's words than to read them."""

from __future__ import annotations

import dis
import sys
import threading
from functools import cache
from types import CodeType, TracebackType
from typing import Any, Self

_HARMLESS = frozenset(("builtins.id", "compile", "object.__getattr__", "sys._getframe"))
"""Events of which nothing comes: what is compiled is not run yet."""
_LITERAL = """
    BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SET BUILD_TUPLE CACHE DICT_UPDATE LIST_EXTEND LOAD_CONST LOAD_SMALL_INT NOP
    RESUME RETURN_CONST RETURN_VALUE SET_UPDATE UNARY_NEGATIVE
"""
_LITERAL_OPERATIONS = frozenset(_LITERAL.split())
"""Instructions that a number, a string or a list of them compiles to."""
_STARTS = compile("from sympy import *", "<string>", "exec")
_SYMPY_STARTS = (_STARTS.co_names, _STARTS.co_consts, _STARTS.co_code)
"""What sympy's parser runs before it reads anything."""


class Refused(RuntimeError):
    """What a library tried was not let happen."""


class AuditWatch:
    """While it is entered, this thread computes and does nothing else.

    Python tells its audit hooks before it runs text, imports, opens a file, starts a process, unpickles a class, loads a
    library (PEP 578). All of that raises `Refused` in the library, unless the text is a literal. Libraries catch what their
    scorers raise, so `refused` remembers the first such event.
    """

    def __init__(self) -> None:
        _install()
        self.refused: str | None = None

    def __enter__(self) -> Self:
        self._outer, _here.watch = _here.watch, self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _here.watch = self._outer


class _Here(threading.local):
    """The watch that this thread is in."""

    watch: AuditWatch | None = None


_here = _Here()


@cache
def _install() -> None:
    """Once a process: a hook cannot be taken out again."""
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    watch = _here.watch
    if watch is None or event in _HARMLESS or (event == "exec" and _is_harmless(args[0])):
        return
    watch.refused = watch.refused or event
    raise Refused(event)


def _is_harmless(code: CodeType) -> bool:
    if code.co_names:
        return (code.co_names, code.co_consts, code.co_code) == _SYMPY_STARTS
    return all(instruction.opname in _LITERAL_OPERATIONS for instruction in dis.get_instructions(code))
