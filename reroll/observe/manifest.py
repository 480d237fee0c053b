"""What a checkpoint's files were when they were written: their sizes and SHA-256 sums, in a file beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from reroll.observe.files import write_json

MANIFEST_FILE = "manifest.json"
VERSION = 1
NUM_THREADS = 4
"""Files read at a time: a sum is bound by one core, and Python lets the others work beside it."""


class FileSum(NamedTuple):
    """A file, as far as another can tell whether it is still the same."""

    num_bytes: int
    sha256: str


Sums = dict[str, FileSum]
"""By a file's path inside its checkpoint."""


def sums_of(folder: Path, files: Iterable[Path], *, num_threads: int = 1) -> Sums:
    """The sums of files that lie in a folder. Read right after they were written, they come from memory."""
    files = list(files)
    with ThreadPoolExecutor(num_threads) as threads:
        return {file.relative_to(folder).as_posix(): found for file, found in zip(files, threads.map(_sum, files), strict=True)}


def write_manifest(folder: Path, known: Mapping[str, FileSum]) -> None:
    """Vouch for all that a folder holds. What its writers have not summed up (`known`) is read here."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST_FILE]
    others = sums_of(folder, (path for path in files if path.relative_to(folder).as_posix() not in known))
    rows = {name: {"bytes": found.num_bytes, "sha256": found.sha256} for name, found in sorted({**known, **others}.items())}
    write_json(folder / MANIFEST_FILE, {"version": VERSION, "files": rows})


def find_damage(folder: Path, *, sums: bool = True) -> list[str]:
    """What is wrong with a checkpoint, file by file; nothing if it is as it was written, or has no manifest to say so.

    Without `sums` names and sizes alone are looked at. Raises OSError where a file cannot be read: that is no damage.
    """
    try:
        rows = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))["files"]
        known = {name: FileSum(row["bytes"], row["sha256"]) for name, row in rows.items()}
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})"]
    damage = [found for name, expected in known.items() if (found := _size_damage(folder / name, name, expected))]
    if damage or not sums:
        return damage
    found_sums = sums_of(folder, (folder / name for name in known), num_threads=NUM_THREADS)
    return [f"{name} holds other bytes than were written" for name in known if found_sums[name] != known[name]]


def has_manifest(folder: Path) -> bool:
    """Whether anybody vouches for a checkpoint: earlier versions wrote none."""
    return (folder / MANIFEST_FILE).is_file()


def _size_damage(path: Path, name: str, expected: FileSum) -> str | None:
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    return None if num_bytes == expected.num_bytes else f"{name} has {num_bytes} bytes instead of {expected.num_bytes}"


def _sum(path: Path) -> FileSum:
    with path.open("rb") as file:
        return FileSum(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
