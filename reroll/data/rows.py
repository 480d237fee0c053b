"""Rows as they are stored or generated, each with the place it is from."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reroll.config.data import DatasetsSource, JsonlSource, ParquetSource, ReasoningGymSource, RowSource, Table
from reroll.config.data_code import CodeTasksSource
from reroll.config.data_instructions import InstructionsSource
from reroll.data.code_tasks import code_rows
from reroll.data.instructions import instruction_rows
from reroll.errors import DataError

INSTALL_FIX = "pip install 'reroll[data]'"


class BadRow(Exception):
    """What is wrong with one row; the loader adds the file and the place."""


Row = Mapping[str, Any] | BadRow
"""A row by column name, or why it could not be read: one broken line must not hide the next."""


def read_rows(config: RowSource) -> Iterator[tuple[str, Row]]:
    """(place, row) pairs in file order, read as they are asked for. Raises DataError if the source as a whole is unusable."""
    match config:
        case JsonlSource():
            return _read_jsonl(config.path)
        case ParquetSource():
            return _read_parquet(config.path)
        case DatasetsSource():
            return _read_datasets(config.path, split=config.split)
        case ReasoningGymSource():
            return _read_reasoning_gym(config)
        case CodeTasksSource():
            return _numbered(code_rows(config))
        case InstructionsSource():
            return _numbered(instruction_rows(config))


def source_name(config: RowSource) -> str:
    """What to call the source in a message."""
    if isinstance(config, Table):
        return str(config.path)
    return f"reasoning-gym {config.name}" if isinstance(config, ReasoningGymSource) else config.kind


def _numbered(rows: Iterator[Mapping[str, Any]]) -> Iterator[tuple[str, Row]]:
    return ((f"task {number}", row) for number, row in enumerate(rows))


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    _require_file(path)
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


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    _require_file(path)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: {INSTALL_FIX}") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _read_datasets(path: Path, *, split: str | None) -> Iterator[tuple[str, Row]]:
    if not path.is_dir():
        raise DataError(f"{path}: no such folder, seen from {Path.cwd()} (write it with `Dataset.save_to_disk`)")
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path}: reading a datasets folder needs datasets: {INSTALL_FIX}") from error
    try:
        stored = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: not a folder that `Dataset.save_to_disk` wrote: {error}") from error
    if isinstance(stored, datasets.DatasetDict):
        if split not in stored:
            problem = "holds several splits" if split is None else f"has no split {split!r}"
            raise DataError(f"{path}: {problem} (set `split` to one of: {', '.join(stored)})")
        stored = stored[split]
    elif split is not None:
        raise DataError(f"{path}: holds one dataset without splits (remove `split: {split}`)")
    yield from ((f"row {number}", row) for number, row in enumerate(stored))


def _read_reasoning_gym(config: ReasoningGymSource) -> Iterator[tuple[str, Row]]:
    """Rows of `prompt` and `answer`, with a `reasoning_gym` column that holds what its verifier needs."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"reasoning-gym {config.name}: needs the reasoning-gym package: {INSTALL_FIX}") from error
    if config.name not in DATASETS:
        close = difflib.get_close_matches(config.name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(sorted(DATASETS))}"
        raise DataError(f"reasoning-gym has no generator {config.name!r} ({hint})")
    try:
        tasks = reasoning_gym.create_dataset(config.name, size=config.size, seed=config.seed, **config.options)
    except (TypeError, ValueError, AssertionError) as error:  # how its generators refuse their options
        raise DataError(f"reasoning-gym {config.name}: options {config.options} are refused: {error}") from error
    for number in range(config.size):
        entry = tasks[number]
        task = {"name": config.name, "options": config.options, "entry": entry}
        yield f"task {number}", {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": task}


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path}: is a folder (name a file in it)")
    if not path.exists():
        raise DataError(f"{path}: no such file, seen from {Path.cwd()} (check `path`)")
