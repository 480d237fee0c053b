"""Rows as they are stored or generated, each with the place it is from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reroll.config.data import JsonlSourceConfig, RowSourceConfig
from reroll.errors import DataError, RerollError


class BadRow(Exception):
    """What is wrong with one row; the loader adds the file and the place."""


Row = Mapping[str, Any] | BadRow
"""A row by column name, or why it could not be read: one broken line must not hide the next."""


def read_rows(config: RowSourceConfig) -> Iterator[tuple[str, Row]]:
    """(place, row) pairs in file order, read as they are asked for. Raises DataError if the source as a whole is unusable."""
    return _read_jsonl(config.path) if isinstance(config, JsonlSourceConfig) else _read_code(config)


def _read_code(config: RowSourceConfig) -> Iterator[tuple[str, Row]]:
    """Rows that a kind's own code gives, or a user's. What it raises says what is wrong with the source."""
    try:
        for number, row in enumerate(config.make()):
            yield f"row {number}", row if isinstance(row, Mapping) else BadRow(f"a {type(row).__name__}, not a mapping")
    except RerollError as error:
        raise error if isinstance(error, DataError) else DataError(f"{config.title}: {error}") from error
    except Exception as error:
        raise DataError(f"{config.title}: gives no rows: {type(error).__name__}: {error}") from error


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    require_file(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number}", _parse_line(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_line(line: bytes) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8 at byte {error.start + 1} (save the file as UTF-8)")
    except json.JSONDecodeError as error:
        return BadRow(f"broken JSON at column {error.colno}: {error.msg}")
    except RecursionError:
        return BadRow("broken JSON: nested too deeply")
    if not isinstance(row, dict):
        return BadRow(f"a JSON {type(row).__name__}, not an object (write one {{...}} a line)")
    return row


def require_file(path: Path) -> None:
    """Raise DataError unless there is such a file."""
    if path.is_dir():
        raise DataError(f"{path}: is a folder (name a file in it)")
    if not path.exists():
        raise DataError(f"{path}: no such file, seen from {Path.cwd()} (check `path`)")
