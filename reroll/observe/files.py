"""Files that a crash, a full disk or a power cut cannot leave half-written."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reroll.errors import RunFolderError

UNFINISHED_PREFIX = ".unfinished-"
"""Prefix of a file or folder that is still being written: it gets its own name when all of it is on disk."""


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Add one line of JSON. Numbers that JSON cannot say (nan, inf) become null."""
    # Half a character, which UTF-8 has not, becomes its escape: what a policy wrote may stand in a reason.
    with explained(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(to_line(row))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a last line that a crash tore off is left out. Raises RunFolderError on other damage."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:  # broken JSON or broken UTF-8
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise RunFolderError(f"{path} line {number} is damaged: {error} (delete that line)") from error
    return rows


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """All of it or nothing: readers never see half a file."""
    write_atomically(path, json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, after its new text has reached the disk."""
    unfinished = path.with_name(f"{UNFINISHED_PREFIX}{path.name}")
    with explained(path):
        try:
            with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            sync(path.parent)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a RunFolderError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a timeout, say: not the file system's
            raise
        raise RunFolderError(f"cannot write {path}: {error.strerror or error} ({_fix_for(error)})") from error


def _fix_for(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, then --resume; or set run.runs_dir to another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "set run.runs_dir to a folder you may write to"
    return "check the disk, or set run.runs_dir to another folder"


def is_disk_full(error: Exception, folder: Path) -> bool:
    """Writers in native code (safetensors) and in other processes hide the error number: ask the message, then the disk."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in full
    return any(os.strerror(number) in str(error) for number in full) or shutil.disk_usage(folder).free < 64 * 1024


def sync_files(folder: Path) -> list[Path]:
    """Wait until the files of this folder, those inside its folders left out, are on disk; returns them.

    For whoever wrote them: another machine cannot do it in its place.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        sync(path)
    return files


def sync_tree(folder: Path) -> None:
    """Wait until all that lies in a folder, and the folder itself, are on disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Wait until a file is on disk; of a folder, until the names in it are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_line(row: Mapping[str, Any]) -> str:
    """One line of JSONL."""
    return json.dumps(_finite(row), ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
