"""A run's journal as it grows, read from the outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from reroll.observe.journal import Event, open_events, parse_line, segments
from reroll_zoo.packed_journal import unpacked_size

_BYTES_AT_ONCE = 1 << 26
"""Of events that one call reads."""


class JournalFollower:
    """Reads a journal that may still be written, from the outside: each call gives the events that have come since the last.

    Of a long journal only the newest `max_bytes` of events are read, in whole segments.
    """

    def __init__(self, folder: Path, *, max_bytes: int | None = None) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        """How far each segment was read."""
        self._damaged: set[Path] = set()
        self._first = 0
        """The number of the first segment that is read."""
        self.is_behind = False
        """Whether the last call left events that were there."""
        if max_bytes is not None:
            self._first = _first_within(segments(folder), max_bytes)

    @property
    def was_replaced(self) -> bool:
        """Whether what was read is no longer there: another run has taken the folder's name."""
        return any(unpacked_size(segment) < offset for segment, offset in self._offsets.items())

    def new_events(self, max_bytes: int = _BYTES_AT_ONCE) -> Iterator[Event]:
        """In their order, of at most so many bytes at once: `is_behind` says if that left some."""
        self.is_behind = False
        for segment in segments(self._folder):
            if int(segment.stem) < self._first or segment in self._damaged:
                continue
            offset = self._offsets.get(segment, 0)
            if unpacked_size(segment) == offset:
                continue
            if max_bytes <= 0:
                self.is_behind = True
                return
            with open_events(segment) as file:
                file.seek(offset)
                data = file.read(max_bytes)
            lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
            self._offsets[segment] = offset + sum(map(len, lines))
            for line in lines:
                if not (events := parse_line(line, segment)):
                    self._damaged.add(segment)
                    break
                yield from events
            self.is_behind = len(data) == max_bytes
            max_bytes -= len(data)


def _first_within(paths: Sequence[Path], max_bytes: int) -> int:
    """The number of the first of the newest segments that have no more bytes together; the last one always counts."""
    first, total = 0, 0
    for place, path in enumerate(reversed(paths)):
        total += unpacked_size(path)
        if place and total > max_bytes:
            break
        first = int(path.stem)
    return first
