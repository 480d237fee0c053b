"""The few system calls of Linux that Python does not offer."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_FILES = 0x0000_0400
CLONE_THREAD = 0x0001_0000
CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
CLONE_NEWTIME = 0x0000_0080

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_SCHED_CORE = 62

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_CAPABILITY_VERSION_3 = 0x2008_0522
_M_ARENA_MAX = -8
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442

MACHINE = platform.machine()
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int | bytes | None) -> int:
    """A function of the C library by name. Raises OSError that names it."""
    return _checked(name, getattr(_libc, name)(*map(_as_c, arguments)))


def syscall(name: str, number: int, *arguments: int | bytes | None) -> int:
    """A system call by number. Raises OSError that names it."""
    return _checked(name, _libc.syscall(ctypes.c_long(number), *map(_as_c, arguments)))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or change a mount."""
    try:
        call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())
    except OSError as error:
        raise OSError(error.errno, f"mount {kind or source} on {target}: {os.strerror(error.errno or 0)}") from None


def restrict_mounts(path: str, flags: int) -> None:
    """Add `flags` (read-only, no devices, no set-user-id) to a mount and to all below it. Linux 5.12 and later."""
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    syscall("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes))


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` this process's root; the old one appears at `put_old`."""
    syscall("pivot_root", _PIVOT_ROOT[MACHINE], new_root.encode(), put_old.encode())


def drop_capabilities() -> None:
    """Give up every power over the machine and over the namespaces this process is in."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    syscall("capset", _CAPSET[MACHINE], header, bytes(24))


def use_one_arena() -> None:
    """Let threads share one heap: each of their own would reserve 64 MB of address space, which is limited."""
    _libc.mallopt(_M_ARENA_MAX, 1)


def _as_c(argument: int | bytes | None) -> ctypes.c_long | bytes | None:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _checked(name: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
