"""The levels of containment: what each does once for a warm interpreter, and once for every program."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from reroll_zoo.sandbox.inside import kernel, landlock, seccomp, tree, usage
from reroll_zoo.sandbox.inside.cgroup import ControlGroup
from reroll_zoo.sandbox.inside.wire import Job

_ZYGOTE_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
_OWN_ID = 1000
"""Who a program is in a user namespace of its own."""
_REMOVE_ATTEMPTS = 4
_FIRST_SPARE_UID = 1 << 30
"""Users from here on own nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the pool tells a warm interpreter at its start."""

    level: str
    folders: tuple[str, ...]
    """What programs may read beside the system: the interpreter, perhaps its packages."""
    packages: tuple[str, ...]
    """Which of them are searched for modules."""
    scratch: str
    """A folder of this interpreter's own on disk; empty where programs get theirs in memory."""
    group: str
    """The control group of its programs; empty where there is none, or where programs are one process each."""
    preload: tuple[str, ...]
    """Modules that all programs find imported."""

    @staticmethod
    def from_json(text: str) -> Settings:
        fields = json.loads(text)
        return Settings(**fields | {name: tuple(fields[name]) for name in ("folders", "packages", "preload")})


class Jail(Protocol):
    """One level of containment. The methods are called in this order, each in the process it names."""

    group: ControlGroup
    """Counts the CPU time of all processes together, where there is one."""

    def enter(self, control: socket.socket) -> None:
        """In the zygote, once."""

    def isolate(self) -> None:
        """In the supervisor of one program, while it waits for a job."""

    def furnish(self, job: Job) -> None:
        """In the supervisor, when the job is here: make the program's folder, go there, and give up every privilege."""

    def pids(self, child: int) -> list[int]:
        """In the supervisor: the program's processes."""

    def written_bytes(self, child: int, *, largest_bytes: int) -> int:
        """In the supervisor: what the program has on disk, where nothing else limits it but the size of each file."""

    def lock(self, job: Job) -> None:
        """In the program's own process, last of all."""

    def end(self, child: int) -> None:
        """In the supervisor: kill all that the program started."""

    def clean(self) -> None:
        """In the zygote, when the program and its supervisor are gone."""

    def leave(self) -> None:
        """In the zygote, last of all: leave nothing behind, for the pool may be gone."""


class Namespaces:
    """A tree of files of its own, no network, and processes that die with their first one.

    As root, programs run as a user that owns nothing else. As anyone else, in a user namespace.
    """

    def __init__(self, settings: Settings) -> None:
        self.group = ControlGroup(settings.group)
        self._folders = settings.folders
        self._uid = spare_user()
        self._own_user = self._uid < 0

    def enter(self, control: socket.socket) -> None:
        ids = os.getuid(), os.getgid()
        kernel.call("unshare", _ZYGOTE_NAMESPACES | self._user_flag)
        if self._own_user:
            _map_ids(inside=0, outside=ids)
        zygote = os.fork()
        if zygote:
            control.close()
            _, status = os.waitpid(zygote, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        die_with_parent()
        self.group.join()
        kernel.call("sethostname", b"sandbox", 7)
        tree.enter(self._folders)

    def isolate(self) -> None:
        kernel.call("unshare", kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | self._user_flag)
        if self._own_user:
            _map_ids(inside=_OWN_ID, outside=(0, 0))
        first = os.fork()
        if first:
            _, status = os.waitpid(first, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)

    def furnish(self, job: Job) -> None:
        tree.furnish(size_bytes=job.room_bytes, uid=_OWN_ID if self._own_user else self._uid)
        if not self._own_user:
            become(self._uid)
        kernel.drop_capabilities()
        os.chdir(tree.SCRATCH)

    def pids(self, child: int) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def written_bytes(self, child: int, *, largest_bytes: int) -> int:
        return 0

    def lock(self, job: Job) -> None:
        # The supervisor counts, and so does the process that waits for it, where it is in the same user namespace.
        set_limit("RLIMIT_NPROC", job.limits.processes + (2 if self._own_user else 1))
        seccomp.install(seccomp.assemble(machine=kernel.MACHINE, pid=os.getpid()))

    def end(self, child: int) -> None:
        """Nothing to do: the supervisor is the first process of its namespace, and all others die with it."""

    def clean(self) -> None:
        """Nothing to do: the folder was in memory and is gone."""

    def leave(self) -> None:
        """All mounts were this process's own."""
        self.group.leave()

    @property
    def _user_flag(self) -> int:
        return kernel.CLONE_NEWUSER if self._own_user else 0


class Alone:
    """Limits and a filter of system calls: no network, no other process, no signal to one.

    With Landlock a program sees the system, the interpreter and a folder of its own. Without, it reads what our user may
    read, and writes nothing.
    """

    def __init__(self, settings: Settings) -> None:
        self.group = ControlGroup(settings.group)
        self._settings = settings
        self._folder = f"{settings.scratch}/program"
        self._uid = spare_user(readable=os.__file__)

    def enter(self, control: socket.socket) -> None:
        if self._settings.level == "landlock":
            landlock.version()
        os.chmod(self._settings.scratch, 0o711)

    def isolate(self) -> None:
        die_with_parent()
        kernel.call("prctl", kernel.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def furnish(self, job: Job) -> None:
        os.mkdir(self._folder, 0o700)
        os.chdir(self._folder)  # Now: the folders above it may be closed to the user whom we become.
        if self._uid >= 0:
            os.chown(".", self._uid, self._uid)
            become(self._uid)
            die_with_parent()
        kernel.drop_capabilities()

    def pids(self, child: int) -> list[int]:
        return [child]

    def written_bytes(self, child: int, *, largest_bytes: int) -> int:
        return usage.folder_bytes(".") + usage.unlisted_bytes(child, os.getcwd(), largest_bytes=largest_bytes)

    def lock(self, job: Job) -> None:
        landlocked = self._settings.level == "landlock"
        if landlocked:
            landlock.restrict(readable=self._settings.folders, scratch=".")
        strict = not job.trusted
        code = seccomp.assemble(
            machine=kernel.MACHINE,
            pid=os.getpid(),
            alone=strict,
            keep_attributes=strict,  # Landlock does not look after these.
            read_only=strict and not landlocked,
        )
        seccomp.install(code)

    def end(self, child: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):  # A compiler's children come to the supervisor to be buried.
            while True:
                os.waitpid(-1, 0)

    def clean(self) -> None:
        remove(self._folder)

    def leave(self) -> None:
        remove(self._settings.scratch)


def make_jail(settings: Settings) -> Jail:
    """The jail of a level."""
    return Namespaces(settings) if settings.level == "namespaces" else Alone(settings)


def spare_user(*, readable: str = "/") -> int:
    """A user that no other process of this machine has, if we are root and can become it and read that path as it. Else -1."""
    if os.geteuid():
        return -1
    uid = _FIRST_SPARE_UID + os.getpid()
    trial = os.fork()
    if trial == 0:
        try:
            become(uid)
            os.stat(readable)
        except OSError:
            os._exit(1)
        os._exit(0)
    return -1 if os.waitpid(trial, 0)[1] else uid


def become(uid: int) -> None:
    """Be this user, and no longer root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. A change of user makes the kernel forget it."""
    kernel.call("prctl", kernel.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_limit(name: str, amount: int) -> None:
    """Set a resource limit for good, no higher than it already is."""
    which = getattr(resource, name)
    _, hard = resource.getrlimit(which)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(which, (amount, amount))


def remove(folder: str) -> None:
    """Delete a folder, however deep it is and whatever rights its owner has taken from himself.

    A program that is on its way out may still write to it, so that it is not empty when it should be: then once more.
    """
    script = 'rm -rf "$1" 2>/dev/null || { chmod -R u+rwx "$1"; rm -rf "$1"; }'
    for _ in range(_REMOVE_ATTEMPTS):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError:
            sweeper = os.posix_spawn("/bin/sh", ["sh", "-c", script, "sh", folder], {"PATH": os.defpath})
            os.waitpid(sweeper, 0)


def _map_ids(*, inside: int, outside: tuple[int, int]) -> None:
    """Be `inside` in the user namespace just entered, and `outside` (user, group) for everyone else."""
    uid, gid = outside
    for file, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        with open(f"/proc/self/{file}", "w") as map_file:
            map_file.write(text)
