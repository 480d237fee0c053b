"""Events of a journal that are no longer written to, compressed: they prove what they did, in a fraction of the room.

Lines of JSON with checksums shrink to a fifth or less; what reads journals reads both forms.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import struct
from pathlib import Path

from reroll.observe.files import UNFINISHED_PREFIX, sync
from reroll.observe.journal import PACKED, segments

NUM_PLAIN = 2
"""The newest segments stay as they are: one is being written, and a resumed run reads the one before."""
MAX_AT_ONCE = 8
"""A checkpoint waits for it: seconds for each, where they are large."""
LEVEL = 6

log = logging.getLogger(__name__)


def pack(journal: Path) -> None:
    """Compress the events of all closed segments but the newest. Whenever the process is killed, each is there in one form.

    Where that cannot be done, on a full disk for one, they stay as they are until the next time.
    """
    plain = [segment for segment in segments(journal)[:-NUM_PLAIN] if segment.exists()]
    for segment in plain[:MAX_AT_ONCE]:
        unfinished, packed = journal / f"{UNFINISHED_PREFIX}{segment.name}{PACKED}", packed_form(segment)
        try:
            if not packed.exists():
                _compress(segment, unfinished)
                unfinished.rename(packed)
                sync(journal)
            segment.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s is not packed: %s", segment, error)
            unfinished.unlink(missing_ok=True)
            return


def _compress(source: Path, target: Path) -> None:
    with source.open("rb") as plain, target.open("wb") as file:
        # No time in it: equal events are equal bytes.
        with gzip.GzipFile("", "wb", LEVEL, file, mtime=0) as compressed:
            shutil.copyfileobj(plain, compressed, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def packed_form(segment: Path) -> Path:
    """Where a segment's events are, once they are packed."""
    return segment.with_name(segment.name + PACKED)


def unpacked_size(segment: Path) -> int:
    """Of a segment's events, packed or not; -1 where there are none."""
    try:
        return segment.stat().st_size
    except FileNotFoundError:
        pass
    try:
        with packed_form(segment).open("rb") as file:
            file.seek(-4, os.SEEK_END)
            size: int = struct.unpack("<I", file.read(4))[0]  # gzip ends with it.
            return size
    except OSError:
        return -1
