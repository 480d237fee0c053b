"""The file tree of the level namespaces: what an interpreter and a compiler need, read-only, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable

from reroll_zoo.sandbox.inside import kernel

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
"""Libraries and tools of the system. They hold no one's data."""
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
ZEROS = "/dev/zero"
"""Not among the devices: who may open it to write gets shared memory from it that no limit counts."""
SCRATCH = "/scratch"
"""The one place that a program may write to."""

_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": SCRATCH,
    "/tmp": SCRATCH,
}
_SAFE = kernel.MS_NOSUID | kernel.MS_NODEV
MAX_FILES = 4096
"""How many files a program may have at a time."""


def enter(folders: Iterable[str]) -> None:
    """Make a tree with the system and `folders` this process's root, in a mount namespace that it has just entered."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", _SAFE, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for path in [*SYSTEM, *folders]:
        _show(path)
    for path in DEVICES:
        _bind(path)
    for path, target in _LINKS.items():
        if not os.path.lexists(path):  # An interpreter may be installed below /tmp.
            os.symlink(target, path)
    for path in ("/proc", SCRATCH):
        os.mkdir(path)
    kernel.mount("proc", "/proc", "proc", _SAFE | kernel.MS_NOEXEC)
    kernel.call("umount2", b"/old", kernel.MNT_DETACH)
    os.rmdir("/old")
    kernel.mount("none", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _SAFE)


def furnish(*, size_bytes: int, uid: int) -> None:
    """An empty scratch folder of limited size and a /proc with nothing but this namespace's processes, for one program."""
    limits = f"size={size_bytes},nr_inodes={MAX_FILES},mode=700,uid={uid},gid={uid}"
    kernel.mount("tmpfs", SCRATCH, "tmpfs", _SAFE, limits)
    kernel.mount("proc", "/proc", "proc", _SAFE | kernel.MS_NOEXEC, "subset=pid")


def _show(path: str) -> None:
    """A file, a folder or a link of the old root at the same place in the new one. Harmless if there is no such path."""
    if os.path.lexists(path) or not os.path.lexists(f"/old{path}"):
        return
    if os.path.islink(f"/old{path}"):
        os.symlink(os.readlink(f"/old{path}"), path)
        return
    _bind(path)
    kernel.restrict_mounts(path, kernel.MS_RDONLY | _SAFE)


def _bind(path: str) -> None:
    if os.path.isdir(f"/old{path}"):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o444))
    kernel.mount(f"/old{path}", path, "", kernel.MS_BIND | kernel.MS_REC)
