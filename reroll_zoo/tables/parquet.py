"""Rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reroll.errors import DataError
from reroll_zoo.tables.config import INSTALL_FIX, ParquetSourceConfig


def read_parquet(config: ParquetSourceConfig) -> Iterator[Mapping[str, Any]]:
    """Its rows in order. Raises DataError if there is no such file, or it is no Parquet."""
    for found in config.violations():
        raise DataError(f"{found.problem} ({found.fix})")
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{config.path}: reading Parquet needs pyarrow: {INSTALL_FIX}") from error
    try:
        with parquet.ParquetFile(config.path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{config.path}: not a readable Parquet file: {error}") from error
