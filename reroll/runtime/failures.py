"""How a worker's failure reaches the controller: with the worker's own traceback, whatever carried it."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from reroll.errors import RerollError, WorkerError
from reroll.runtime.cpu import release_helper_threads

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception on its way to the controller. Notes travel beside it: a class that pickles itself may drop them."""

    error: RerollError
    notes: tuple[str, ...]

    def as_error(self) -> RerollError:
        """What to raise there."""
        self.error.__notes__ = list(self.notes)
        return self.error


def guarded(call: Callable[[], Any], *, role: str, rank: int) -> Any:
    """Run a call in a worker's own process. What it raises is returned, as Raised: it can be pickled."""
    try:
        result = call()
        release_helper_threads()
        return result
    except BaseException as error:
        text = describe(error)
        home = as_reroll_error(error, role=role, rank=rank, remote_traceback=text)
        if not _survives_pickling(home):
            home = WorkerError(f"{type(error).__name__} in worker {role}[{rank}]:\n{text}")
        return Raised(home, notes=tuple(getattr(home, "__notes__", ())))


def _survives_pickling(error: RerollError) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception as failure:
        log.debug("%r cannot be pickled: %s", error, failure)
        return False


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
