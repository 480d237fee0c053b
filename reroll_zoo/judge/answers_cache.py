"""What judges said, kept on disk: a question that was asked before, in this run or another, costs nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from reroll.types import Message, SamplingParams

T = TypeVar("T")

_BUSY_S = 30.0
"""How long to wait for another process that writes to the same file."""

_log = logging.getLogger(__name__)


def question_key(who: Any, messages: Sequence[Message], sampling: SamplingParams) -> str:
    """The name of a question: who is asked (plain data), all that is said, and how the reply is drawn, seed included."""
    # The first word says what is kept: earlier versions did not tell which replies were cut off.
    question = json.dumps(["reply and whether it is whole", who, list(messages), asdict(sampling)], sort_keys=True)
    return sha256(question.encode()).hexdigest()


class AnswersCache:
    """A table of replies by key in an SQLite file, which many tasks and processes may use at once; None keeps it in memory.

    A reply is safe once `put` returns, even if the process dies. A file that cannot be opened is a ValueError; but it is only
    a convenience: when it cannot be read or written later on, that is logged once and the judge is asked.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._has_complained = self._is_closed = False
        # One thread of its own: the disk never holds up the event loop, and SQLite wants to be used from one thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")
        self._file = self._thread.submit(_open, path).result()

    async def get(self, key: str) -> str | None:
        """The reply under this key, if there is one."""
        row = await self._run(lambda: self._file.execute("SELECT reply FROM answers WHERE key = ?", (key,)).fetchone())
        return None if row is None else str(row[0])

    async def put(self, key: str, reply: str) -> None:
        """Keep a reply. The first one under a key stays."""
        await self._run(lambda: self._file.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, reply)))

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._file.close).result()
            self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, UnicodeError) as error:
            if not self._has_complained:
                self._has_complained = True
                _log.warning("the judge's answers in %s cannot be used, so it is asked again: %s", self._path, error)
            return None


def _open(path: Path | None) -> sqlite3.Connection:
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID")
    except (sqlite3.Error, OSError) as error:
        raise ValueError(f"{path} cannot hold answers: {error}") from error
    return file
