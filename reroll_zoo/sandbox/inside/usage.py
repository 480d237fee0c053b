"""What processes use, as the kernel tells it to the supervisor that looks at them from time to time."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from reroll_zoo.sandbox.inside.tree import MAX_FILES

ENDLESS = 1 << 62
"""More bytes than any limit: what cannot be counted counts as that."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of a process and of the children that it has buried."""
    fields = _stat_fields(f"/proc/{pid}")
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def num_threads(pid: int) -> int:
    """How many threads a process has."""
    return int(_stat_fields(f"/proc/{pid}")[17])


def memory_mb(pid: int) -> float:
    """Its share of memory and swap: a page that n processes hold counts 1/n. All it holds, where it does not let us look."""
    task = _living_task(pid)
    try:
        with open(f"{task}/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("Pss:", "SwapPss:"))) / 1024
    except PermissionError:
        with open(f"{task}/statm") as file:
            return int(file.read().split()[1]) * _PAGE / 2**20


def folder_bytes(folder: str) -> int:
    """What a folder takes on disk. One that cannot be read, is very deep or has very many files is as good as infinite."""
    num_files, size = 0, 0
    try:
        for path, folders, files in os.walk(folder, onerror=_raise_unless_gone):
            num_files += 1 + len(files)
            if num_files > MAX_FILES:
                return ENDLESS
            for name in [*folders, *files]:
                with suppress(FileNotFoundError):  # Deleted while we looked. What is beside it still counts.
                    size += os.lstat(f"{path}/{name}").st_blocks * 512
    except (OSError, RecursionError):
        return ENDLESS
    return size


def unlisted_bytes(pid: int, folder: str, *, largest_bytes: int) -> int:
    """What a process keeps on disk in files that no folder lists any more: deleted ones, open or mapped.

    A deleted file that is mapped and no longer open tells nothing of its size: it counts as the largest there may be. One
    that is on its way through a socket is not even seen: such a process holds as good as everything.
    """
    try:
        task = _living_task(pid)
        sizes: dict[int, int] = {}
        for name in os.listdir(f"{task}/fd"):
            with suppress(FileNotFoundError):  # Closed while we looked.
                file = os.stat(f"{task}/fd/{name}")
                if stat.S_ISSOCK(file.st_mode) and _carries_descriptors(f"{task}/fdinfo/{name}"):
                    return ENDLESS
                if file.st_nlink == 0 and not os.readlink(f"{task}/fd/{name}").startswith("/memfd:"):  # Its standard input.
                    sizes[file.st_ino] = file.st_blocks * 512
        for inode in _deleted_and_mapped(task, folder):
            sizes.setdefault(inode, largest_bytes)
    except (FileNotFoundError, ProcessLookupError):
        return 0  # The process has ended.
    except OSError:
        return ENDLESS
    return sum(sizes.values())


def _living_task(pid: int) -> str:
    """The folder of a thread that tells of its process; a first one that has ended does not. Raises if all have."""
    for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task"))):
        task = f"/proc/{pid}/task/{thread}"
        if _stat_fields(task)[0] not in "ZX":
            return task
    raise ProcessLookupError(f"process {pid} has ended")


def _stat_fields(task: str) -> list[str]:
    """The fields of `stat` from the third on: state, parent, … The second is whatever bytes the process calls itself by."""
    with open(f"{task}/stat", errors="surrogateescape") as file:
        return file.read().rpartition(")")[2].split()


def _carries_descriptors(fdinfo: str) -> bool:
    """Whether messages with descriptors wait in a socket."""
    with open(fdinfo) as file:
        return any(line.startswith("scm_fds:") and int(line.split()[1]) for line in file)


def _deleted_and_mapped(task: str, folder: str) -> set[int]:
    """The inodes of files below a folder that are mapped but no longer there."""
    with open(f"{task}/maps", errors="surrogateescape") as file:
        fields = [line.rstrip("\n").split(maxsplit=5) for line in file]
    paths = [(int(field[4]), field[5]) for field in fields if len(field) == 6]
    return {inode for inode, path in paths if path.startswith(f"{folder}/") and path.endswith(" (deleted)")}


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
