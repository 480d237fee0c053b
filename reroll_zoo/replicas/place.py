"""Where the replicas of a run lie: in a folder of this machine's shared memory, which outlives the processes that wrote it.

Its name says whose it is: the process that lives as long as the run does, which is the one that waits for controllers where
there is one. Nobody else opens it, and whoever comes by deletes it once that process is gone. Loads no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from hashlib import sha256
from pathlib import Path

from reroll_zoo.folder_lock import birth_of, this_system

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "reroll-replicas"
_NUM_DIGITS = 12
_MEMORY_INFO = Path("/proc/meminfo")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def place_of(run: Path, *, owner: int) -> Path:
    """Of the replicas of the run in this folder, as long as the process `owner` lives. It need not be there."""
    return SHARED_MEMORY / f"{_of_owner(owner)}-{_digest(str(run.resolve()))}"


def make_place(place: Path) -> None:
    """For this user alone. Raises OSError if it cannot be, and if somebody else has made it."""
    place.mkdir(mode=0o700, exist_ok=True)
    if not is_ours(place):
        raise PermissionError(f"{place} is another user's")


def is_ours(place: Path) -> bool:
    """Whether it is there, and nobody else can write there: all may make files in shared memory."""
    try:
        found = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700


def remove_all_of(owner: int) -> None:
    """What the runs of a process have left."""
    for place in SHARED_MEMORY.glob(f"{_of_owner(owner)}-*"):
        shutil.rmtree(place, ignore_errors=True)


def sweep() -> None:
    """Delete what runs of this system have left whose processes were killed, all of them at a time."""
    here = re.escape(f"{_PREFIX}-{_digest(this_system())}")
    for place in SHARED_MEMORY.glob(f"{_PREFIX}-*"):
        match = re.fullmatch(rf"{here}-(\d+)-(\d+)-.*", place.name)
        if match and is_ours(place) and birth_of(int(match[1])) != match[2]:
            shutil.rmtree(place, ignore_errors=True)


def has_room(num_bytes: int) -> bool:
    """Whether so much fits into shared memory, and takes at most half of the memory that nobody uses."""
    return num_bytes <= min(_free_bytes() / 2, shutil.disk_usage(SHARED_MEMORY).free)


def _of_owner(pid: int) -> str:
    return f"{_PREFIX}-{_digest(this_system())}-{pid}-{birth_of(pid)}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:_NUM_DIGITS]


def _free_bytes() -> float:
    """Of this machine, or of the part of it that this process may use."""
    machine = re.search(r"MemAvailable:\s+(\d+) kB", _MEMORY_INFO.read_text())
    return min(int(machine[1]) * 1024 if machine else 0, *(_left_of(group) for group in _groups()))


def _groups() -> list[Path]:
    """The control groups that this process is in, from the root on."""
    try:
        own = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    except OSError:
        own = None
    group = _CONTROL_GROUPS / (own[1] if own else "")
    return [_CONTROL_GROUPS, *(folder for folder in (group, *group.parents) if _CONTROL_GROUPS in folder.parents)]


def _left_of(group: Path) -> float:
    """What its limit leaves. Files that are kept in memory, and can be read again, do not count."""
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        files = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # There is none: `max`.
        return float("inf")
    return limit - used + (int(files[1]) if files else 0)
