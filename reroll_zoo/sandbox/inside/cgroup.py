"""A control group (version 2) for an interpreter's programs: the kernel adds up the CPU time of all their processes.

Without one, what a process has used is lost when nobody waits for its end. No controller is needed, only a place where we may
make a group: below our own, so that no limit set for us is left behind.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress

_REMOVE_WITHIN_S = 3.0
_LOOK_EVERY_S = 0.01


class ControlGroup:
    """The group of a warm interpreter and of all that it starts. Nothing is counted where the folder is no group's."""

    def __init__(self, folder: str) -> None:
        """Open all that will be needed: the interpreter goes where there is no such folder."""
        self._name = os.path.basename(folder)
        self._usage = -1
        if folder:
            parent = os.path.dirname(folder)
            self._parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
            self._outside = os.open(f"{parent}/cgroup.procs", os.O_WRONLY)
            self._inside = os.open(f"{folder}/cgroup.procs", os.O_WRONLY)
            self._usage = os.open(f"{folder}/cpu.stat", os.O_RDONLY)

    def join(self) -> None:
        """Count this process from now on. Once for an interpreter: it costs milliseconds, and programs inherit it."""
        if self._usage >= 0:
            with suppress(OSError):  # A kernel that refuses counts nothing, as without a group.
                os.write(self._inside, b"0")

    def cpu_s(self) -> float:
        """CPU time of all who are or were in the group."""
        if self._usage < 0:
            return 0.0
        fields = dict(line.split() for line in os.pread(self._usage, 4096, 0).decode().splitlines())
        return int(fields["usage_usec"]) / 1e6

    def leave(self) -> None:
        """Leave the group and remove it, for whoever made it may be gone."""
        if self._usage >= 0:
            with suppress(OSError):
                os.write(self._outside, b"0")
                os.rmdir(self._name, dir_fd=self._parent)


def make_group() -> str:
    """The folder of a new group below our own that processes of ours may join and leave; empty where there can be none."""
    try:
        own = _own_folder()
        folder = f"{own}/reroll-sandbox-{secrets.token_hex(8)}"
        os.mkdir(folder)
    except OSError:
        return ""
    if all(os.access(f"{path}/cgroup.procs", os.W_OK) for path in (own, folder)) and _read(f"{folder}/cgroup.type") == "domain":
        return folder
    os.rmdir(folder)
    return ""


def remove_group(folder: str) -> None:
    """Remove a group whose processes are about to end. Harmless if it is gone."""
    deadline_s = time.monotonic() + _REMOVE_WITHIN_S
    while True:
        try:
            return os.rmdir(folder)
        except FileNotFoundError:
            return None
        except OSError:  # Its last processes are still on their way out.
            if time.monotonic() > deadline_s:
                return None
        time.sleep(_LOOK_EVERY_S)


def _own_folder() -> str:
    """The folder of the group that this process is in. Raises FileNotFoundError if it cannot be seen."""
    with open("/proc/self/cgroup") as file:
        own = next((line.rstrip("\n")[3:] for line in file if line.startswith("0::")), "")
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split() for line in file]
    for fields in mounts:
        root, folder, kind = fields[3], fields[4], fields[fields.index("-") + 1]
        below = os.path.relpath(own, root) if own else ".."
        if kind == "cgroup2" and not below.startswith(".."):
            return os.path.normpath(f"{folder}/{below}")
    raise FileNotFoundError("no control groups of version 2")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
