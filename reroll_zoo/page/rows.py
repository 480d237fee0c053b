"""A JSONL file that may still grow, row by row."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO


class RowFollower:
    """Every whole row of a file so far. Rows that are damaged are passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None
        self.rows: list[dict[str, Any]] = []
        self.generation = 0
        """Counts how often the file was replaced by another: a resumed run forgets what came after its checkpoint."""

    def refresh(self) -> None:
        """Read what has been added."""
        try:
            with self._path.open("rb") as file:
                self._read(file)
        except OSError:
            return  # Not there yet, or no longer.

    def _read(self, file: BinaryIO) -> None:
        about = os.fstat(file.fileno())
        if self._inode not in (None, about.st_ino) or about.st_size < self._offset:
            self._offset, self.rows = 0, []
            self.generation += 1
        self._inode = about.st_ino
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            with suppress(ValueError):
                self.rows.append(json.loads(line))
            self._offset += len(line)
