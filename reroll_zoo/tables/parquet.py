"""Rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reroll.data.rows import require_file
from reroll.errors import DataError
from reroll_zoo.tables.config import ParquetSourceConfig


def read_parquet(config: ParquetSourceConfig) -> Iterator[Mapping[str, Any]]:
    """In order, read as they are asked for. Raises DataError."""
    path = config.path
    require_file(path)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: {config.pip_line}") from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
