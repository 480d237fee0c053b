"""The tool `search`: full-text search over passages, with SQLite's FTS5 in memory."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from reroll_zoo.full_text import TOKENIZE, all_of, any_of, query_words
from reroll_zoo.tool_use.tool import Tool

_STATEMENT = "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages, 8.0, 1.0), rowid LIMIT ?"


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text and what it is about."""

    title: str
    text: str


class PassageIndex:
    """An index to search. Any number of threads may share it."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        # One connection for all threads, behind a lock: a database in memory belongs to its connection.
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()
        self._connection.execute(f"CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='{TOKENIZE}')")
        rows = ((passage.title, passage.text) for passage in passages)
        self._connection.executemany("INSERT INTO passages VALUES (?, ?)", rows)

    def search(self, query: str, *, num_results: int) -> list[Passage]:
        """The best passages: first those with all words of the query, then those with any. Titles count most."""
        words = query_words(query)
        found: dict[Passage, None] = {}
        for expression in (all_of(words), any_of(words)):
            if words and len(found) < num_results:
                with self._lock:
                    rows = self._connection.execute(_STATEMENT, (expression, num_results)).fetchall()
                found |= dict.fromkeys(Passage(*row) for row in rows)
        return list(found)[:num_results]


def search_tool(index: PassageIndex, *, num_results: int) -> Tool:
    """The tool as a policy sees it: one passage a line, the best first."""

    def run(arguments: dict[str, Any], timeout_s: float) -> str:
        found = index.search(arguments["query"], num_results=num_results)
        return "\n".join(f"{passage.title}: {passage.text}" for passage in found) or "Nothing was found: try other words."

    return Tool(
        name="search",
        description="Search the library for passages with these words.",
        parameters={
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
            "additionalProperties": False,
        },
        run=run,
    )
