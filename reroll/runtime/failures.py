"""How a worker's failure reaches the controller: with the worker's own traceback, whatever carried it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from reroll.errors import RerollError, WorkerError

T = TypeVar("T")


def describe(error: BaseException) -> str:
    """The traceback as Python would print it."""
    return "".join(traceback.format_exception(error)).rstrip()


def as_reroll_error(error: BaseException, *, role: str, rank: int, remote_traceback: str) -> RerollError:
    """The error to raise in the controller: our own errors keep their type, all others become WorkerError."""
    where = f"in worker {role}[{rank}]"
    if isinstance(error, RerollError):
        error.add_note(f"Raised {where}:\n{remote_traceback}")
        return error
    return WorkerError(f"{type(error).__name__} {where}: {error}\n\n{remote_traceback}")


async def gather_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Every result, in order. All calls are awaited before the first error is raised."""
    results: list[T] = []
    errors: list[BaseException] = []
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            errors.append(outcome)
        else:
            results.append(outcome)
    if errors:
        raise errors[0]
    return results
