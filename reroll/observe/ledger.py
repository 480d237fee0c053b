"""What happened to every sample, one line each, in the order it happened."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from json.encoder import encode_basestring_ascii
from pathlib import Path
from types import TracebackType
from typing import Any

from reroll.errors import RunFolderError

_BUFFER_BYTES = 1 << 18

LEDGER_FILE = "ledger.jsonl"


class SampleState(StrEnum):
    """Where a sample is in its life. The last four end it."""

    QUEUED = "queued"
    GENERATING = "generating"
    SCORING = "scoring"
    DONE = "done"
    """Scored; waits for its siblings and for its turn to be trained on."""
    FILTERED = "filtered"
    """Fine by itself, but its group was dropped."""
    ABORTED = "aborted"
    """Stopped by the scheduler; the prompt is queued again."""
    FAILED = "failed"
    TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a ledger."""

    time_s: float
    sample_id: str
    state: SampleState
    detail: Mapping[str, Any]
    """What else is known at that point, e.g. `version`, `tokens`, `reason`."""


class Ledger:
    """Append-only JSONL of lifecycle events.

    Rows are buffered: `flush` puts all of them where a crash of this process cannot lose them. A line that a crash tore
    is cut off when the file is opened again.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            self._file = path.open("a", encoding="utf-8", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise _unwritable(path, error) from error

    def record(self, sample_id: str, state: SampleState, **detail: Any) -> None:
        """Add one event. Detail values must be plain JSON values."""
        tail = f",{json.dumps(detail, separators=(',', ':'))[1:]}" if detail else "}"
        # Put together by hand: several events per sample are on the controller's hot path.
        line = f'{{"t":{self._clock():.6f},"id":{encode_basestring_ascii(sample_id)},"state":"{state.value}"{tail}\n'
        try:
            self._file.write(line)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def flush(self) -> None:
        """Write out what is buffered."""
        try:
            self._file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Flush and close. Safe to call twice."""
        try:
            self._file.close()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_ledger(path: Path) -> Iterator[Event]:
    """The events of a ledger file, oldest first. A last line that a crash tore is left out."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line_number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    return
                yield _parse(line, path, line_number)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot read the ledger ({error.strerror}): is this a run folder?") from error


def _parse(line: str, path: Path, line_number: int) -> Event:
    try:
        row = json.loads(line)
        return Event(row.pop("t"), row.pop("id"), SampleState(row.pop("state")), row)
    except (ValueError, KeyError, AttributeError) as error:
        raise RunFolderError(
            f"{path}, line {line_number}: not a ledger event ({error}): the file was edited or damaged"
        ) from error


def _cut_torn_line(path: Path) -> None:
    """Drop what stands after the last newline, or the next event would be glued to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"{path}: cannot write the ledger ({error.strerror}): free space or choose another run.runs_dir")
