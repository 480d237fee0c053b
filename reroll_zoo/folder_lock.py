"""One run, one process: a file in the run's folder that names who works there.

It is made by `link`, which succeeds for one of many on every file system, shared ones too. The holder touches it now and then.
Whether it lives is asked of the system where it runs on this one, and told by the age of its last touch where it does not.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType

from reroll.errors import RunFolderError
from reroll.observe.files import explained
from reroll.observe.run_folder import LOCK_FILE

BEAT_S = 10.0
"""Between two touches."""
STALE_S = 120.0
"""A holder on another machine that has not touched its lock for so long is dead."""
WAIT_S = 150.0
"""How long a run that is to go on waits for its predecessor to end: longer than a dead one can seem alive."""
POLL_S = 0.5
_NUM_LOOKS = 10
"""At a lock that is there and still empty."""
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
"""What file systems answer that know no second names."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who works in a run's folder."""

    host: str
    system: str
    """This boot of this machine, and the container in it: inside one, process ids mean the same."""
    pid: int
    born: str
    """When the process started, in the system's own count: ids are used again. Empty where that cannot be told."""
    since: str
    token: str
    """Random text that tells this lock from every other."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """`with RunLock(folder):` nobody else works in this folder, or RunFolderError says who does.

    `wait_s`: how long to wait for another to end, after `on_wait` was told about it. A lock that another has taken all the
    same, because this machine slept or the disk was away too long, is lost: `check` raises, and nothing more may be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        wait_s: float = 0.0,
        on_wait: Callable[[str], None] = partial(print, flush=True),
        stale_s: float = STALE_S,
    ) -> None:
        self._folder, self._path = folder, folder / LOCK_FILE
        self._wait_s, self._on_wait, self._stale_s = wait_s, on_wait, stale_s
        self._mine = _myself()
        self._end = threading.Event()
        self._is_lost = False

    def __enter__(self) -> RunLock:
        with explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._acquire()
        threading.Thread(target=self._beat, name=f"lock {self._folder.name}", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        with suppress(OSError, RunFolderError):  # A lock that is left behind dies with this process.
            if self._is_held():
                self._path.unlink()

    def check(self) -> None:
        """Raise RunFolderError if the folder is no longer ours."""
        if self._is_lost or not self._is_held():
            self._is_lost = True
            holder = _read(self._path)
            raise RunFolderError(
                f"{self._folder} was taken from this run: it now belongs to {holder or 'nobody, or was deleted'} "
                "(this run writes no more; go on from there with --resume)"
            )

    def _acquire(self) -> None:
        draft = self._folder / f"{LOCK_FILE}-{self._mine.token}"
        deadline_s, has_told = time.monotonic() + self._wait_s, False
        try:
            draft.write_text(json.dumps(asdict(self._mine)) + "\n")
            while not self._link(draft):
                holder = _read(self._path)
                if holder is None:
                    continue  # It has just ended.
                if not self._is_alive(holder, draft):
                    self._remove(holder)
                    continue
                if time.monotonic() >= deadline_s:
                    raise RunFolderError(self._refusal(holder))
                if not has_told:
                    self._on_wait(f"{self._folder} is in use by {holder}: waiting up to {self._wait_s:.0f} s for it to end")
                    has_told = True
                time.sleep(min(POLL_S, max(0.0, deadline_s - time.monotonic())))
        finally:
            draft.unlink(missing_ok=True)

    def _link(self, draft: Path) -> bool:
        """Whether the lock is ours now. If the answer to a first try was lost on a network, there is one already: ours."""
        try:
            os.link(draft, self._path)
        except FileExistsError:
            return self._is_held()
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._create()
        return True

    def _create(self) -> bool:
        """The same where files cannot have two names: whole a moment after it is there."""
        try:
            with self._path.open("x") as file:
                file.write(json.dumps(asdict(self._mine)) + "\n")
        except FileExistsError:
            return False
        return True

    def _is_alive(self, holder: Holder, draft: Path) -> bool:
        if holder.system == self._mine.system:
            return _lives(holder)
        os.utime(draft)  # Both times are the file server's: clocks of machines differ.
        try:
            return _modified_s(draft) - _modified_s(self._path) < self._stale_s
        except FileNotFoundError:
            return False

    def _remove(self, dead: Holder) -> None:
        """Take a dead holder's lock away, one process at a time.

        Where the file system cannot see to that, one that a third has made meanwhile is put back.
        """
        aside = self._folder / f"{LOCK_FILE}-{self._mine.token}-dead"
        with (self._folder / f"{LOCK_FILE}-guard").open("a") as guard:
            with suppress(OSError):
                fcntl.flock(guard, fcntl.LOCK_EX)  # Until it is closed.
            if _read(self._path) != dead:
                return
            try:
                self._path.rename(aside)
            except FileNotFoundError:
                return
        if _read(aside) != dead:
            with suppress(FileExistsError):  # A fourth was quicker still: the third finds out by `check`.
                os.link(aside, self._path)
        aside.unlink()

    def _refusal(self, holder: Holder) -> str:
        fix = "wait for it, end it, or choose another run.name"
        if holder.system != self._mine.system:
            fix += f"; if it is dead, its lock is void {self._stale_s:.0f} s after its last sign of life"
        return f"{self._folder} is in use by {holder} ({fix})"

    def _beat(self) -> None:
        while not self._end.wait(BEAT_S):
            try:
                if not self._is_held():
                    self._is_lost = True
                    return
                os.utime(self._path)
            except RunFolderError:
                self._is_lost = True
                return
            except OSError:
                continue  # A disk that is away for a moment is no reason to give up: the next touch may reach it.

    def _is_held(self) -> bool:
        return _read(self._path) == self._mine


def hold(folder: Path, *, waits: bool) -> RunLock:
    """The lock of a run; one that is to go on waits for its predecessor to end."""
    return RunLock(folder, wait_s=WAIT_S if waits else 0.0)


def living_holder(folder: Path) -> Holder | None:
    """Who works in a folder now, as far as a look can tell: nothing is written there."""
    path = folder / LOCK_FILE
    try:
        holder = Holder(**json.loads(path.read_text()))
        if holder.system != this_system():
            return holder if time.time() - _modified_s(path) < STALE_S else None
    except (OSError, ValueError, TypeError):  # None, or one that is just being made.
        return None
    return holder if _lives(holder) else None


def _lives(holder: Holder) -> bool:
    """Whether a process of this system is still the one that took the lock."""
    birth = birth_of(holder.pid)
    return birth is not None and (birth == holder.born or not (birth and holder.born))


def _read(path: Path) -> Holder | None:
    """Whose lock it is; None where there is none. Opened anew, so that a network's caches are asked again."""
    try:
        text = path.read_text()
        for _ in range(_NUM_LOOKS):
            if text:
                break
            time.sleep(POLL_S)  # See `_create`.
            text = path.read_text()
        return Holder(**json.loads(text))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{path} is no lock of reroll: {error} (if no run works in this folder, delete it)") from error


def _modified_s(path: Path) -> float:
    with path.open() as file:  # Opening asks a file server for the present state; `stat` alone may not.
        return os.fstat(file.fileno()).st_mtime


def _myself() -> Holder:
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return Holder(socket.gethostname(), this_system(), os.getpid(), birth_of(os.getpid()) or "", since, secrets.token_hex(8))


def this_system() -> str:
    """This boot of this machine, and the container in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # Not Linux: as good as a name is.
        return socket.gethostname()


def birth_of(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if it does not live, empty where that is all that can be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else fields[19]
    except FileNotFoundError:  # It is gone, or hidden from us, or there is no /proc.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # Another user's: it lives.
            pass
        return ""
