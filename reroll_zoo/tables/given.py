"""Data as Python code hands it over: rows, a table, a file, a name of the hub. Made a source that a config can hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from reroll.config.base import Node
from reroll.errors import DataError

ROWS_FOLDER = ".rows"
"""In the folder of all runs: rows that were handed over are kept there under a name made from their content."""


def source_of(data: Any, *, folder: Path) -> Any:
    """The source that `data` stands for: as it is if it is one, else the node of a config. Rows are written below `folder`.

    Raises DataError for what is no data.
    """
    if isinstance(data, Node) or (isinstance(data, Mapping) and "kind" in data) or callable(data):
        return data
    if isinstance(data, str | Path):
        return _stored(Path(data))
    rows = _rows(data)
    if not rows:
        raise DataError("data: there are no rows in it")
    return {"kind": "jsonl", "path": str(store_rows(rows, folder / ROWS_FOLDER))}


def _stored(path: Path) -> dict[str, str]:
    kinds = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
    return {"kind": kinds.get(path.suffix, "datasets"), "path": str(path)}


def _rows(data: Any) -> list[dict[str, Any]]:
    """The rows of a list, a `datasets.Dataset`, a data frame, or anything else that gives mappings one by one."""
    if isinstance(data, Mapping):
        raise DataError(
            f"data: a mapping of {', '.join(map(str, islice(data, 5)))} is no table: give a list of rows, a path, or a source "
            'with its kind, e.g. {"kind": "jsonl", "path": …}; of a DatasetDict choose a split'
        )
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        return list(data.to_dict("records"))
    if not isinstance(data, Iterable):
        raise DataError(f"data: a {type(data).__name__} has no rows: give a list of dicts, a datasets.Dataset, or a path")
    rows = list(data)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(f"data: row {number} is a {type(row).__name__}, not a dict with `prompt` and `answer`")
    return [dict(row) for row in rows]


def store_rows(rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Write rows as JSONL under a name made from their content, so that a run that goes on finds the same rows."""
    text = "".join(_line(number, row) for number, row in enumerate(rows, start=1))
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    return path


def _line(number: int, row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, default=_plain) + "\n"
    except TypeError as error:
        raise DataError(f"data: row {number} cannot be stored: {error} (use text, numbers, lists and dicts)") from None


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy, dates: what tables hold."""
    for name in ("tolist", "isoformat"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"{type(value).__name__} is not plain data")
