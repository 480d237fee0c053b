"""A disk of a run's own, for `chaos.py` to fill, to slow down and to stop: an image behind a loop device, where it may."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE_MB = 48
SLOW_S = (1.0, 5.0)
"""How long it stays slow, or still."""
SLOW_BYTES_PER_S = 64 << 10
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
"""Where the kernel is told how fast a disk may be written to (version 1 of its control groups)."""


class Disk:
    """A folder that is a file system of its own, if `number` is given (`7:0`) behind a loop device of that number."""

    def __init__(self, path: Path, *, has_own: bool, number: str | None = None) -> None:
        self.path, self.has_own, self._number = path, has_own, number

    @property
    def can_be_slow(self) -> bool:
        return self._number is not None

    def fill(self) -> Path:
        """Leave no byte free. Returns the file to delete."""
        filler = self.path / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        return filler

    def be_slow(self, rng: random.Random) -> str:
        """For a while it takes few bytes a second, or does not answer at all. Returns which; it is over when this returns."""
        how = rng.choice(("slow", "still"))
        seconds = rng.uniform(*SLOW_S)
        if how == "slow":
            self._throttle(SLOW_BYTES_PER_S)
            time.sleep(seconds)
            self._throttle(0)
        else:
            thaw = threading.Timer(seconds, self._freeze, ["-u"])  # Not to be forgotten, whatever becomes of this thread.
            thaw.start()
            self._freeze("-f")
            thaw.join()
        return how

    def _throttle(self, bytes_per_s: int) -> None:
        """0: no limit."""
        THROTTLE.write_text(f"{self._number} {bytes_per_s}")

    def _freeze(self, flag: str) -> None:
        subprocess.run(["fsfreeze", flag, str(self.path)], check=True, capture_output=True)


@contextmanager
def own_disk(folder: Path, *, size_mb: int = SIZE_MB) -> Iterator[Disk]:
    """A small disk at `folder`: behind a loop device, else in memory, else (where nothing may be mounted) a folder."""
    folder.mkdir()
    image = folder.with_suffix(".img")
    if not (disk := _behind_loop(folder, image, size_mb) or _in_memory(folder, size_mb)):
        yield Disk(folder, has_own=False)
        return
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        image.unlink(missing_ok=True)


def _behind_loop(folder: Path, image: Path, size_mb: int) -> Disk | None:
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    made = _done("mkfs.ext4", "-q", "-F", "-m", "0", str(image)) and _done("mount", "-o", "loop", str(image), str(folder))
    if not made:
        image.unlink()
        return None
    device = os.stat(folder).st_dev
    is_throttled = os.access(THROTTLE, os.W_OK)
    return Disk(folder, has_own=True, number=f"{os.major(device)}:{os.minor(device)}" if is_throttled else None)


def _in_memory(folder: Path, size_mb: int) -> Disk | None:
    made = _done("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder))
    return Disk(folder, has_own=True) if made else None


def _done(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
