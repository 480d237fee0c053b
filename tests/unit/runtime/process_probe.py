"""The worker that the tests of processes spawn. In a file of its own, without torch, so that a process starts fast."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from reroll.runtime.base import WorkerInfo
from reroll.runtime.frames import Kind, header, pack
from reroll.runtime.watchdog import at_work, beat


class Probe:
    """A worker that shows what happens to it, and misbehaves when asked."""

    def __init__(self, info: WorkerInfo, value: Any = None) -> None:
        self.info, self.value = info, value
        self.seen: list[int] = []

    def tell(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def device(self) -> str:
        return self.info.device

    def session(self) -> tuple[int, int]:
        return os.getpid(), os.getsid(0)

    def thread(self) -> str:
        return threading.current_thread().name

    def built_with(self) -> Any:
        return self.value() if callable(self.value) else self.value

    def echo(self, value: Any) -> Any:
        return value

    def add_one(self, array: np.ndarray) -> float:
        """In place."""
        array += 1
        return float(array[0])

    def remember(self, value: int, *, gate: Path | None = None) -> list[int]:
        """When there is a file `gate`."""
        while gate is not None and not gate.exists():
            time.sleep(0.01)
        self.seen.append(value)
        return self.seen

    def say(self, words: str) -> None:
        print(words)

    def hang(self, *, holding_the_gil: bool = False) -> None:
        """At work, without a sign of life."""
        with at_work():
            if holding_the_gil:
                ctypes.PyDLL(None).sleep(600)
            time.sleep(600)

    def work(self, *, num_beats: int, pause_s: float) -> str:
        """At work, with so many signs of life."""
        with at_work():
            for _ in range(num_beats):
                time.sleep(pause_s)
                beat()
        return "done"

    def lock(self) -> Any:
        return threading.Lock()

    def leave(self, code: int) -> None:
        os._exit(code)

    def hang_with_children(self, file: Path) -> None:
        """Two of them: one in this session, and a daemon that has left it."""
        programs = [
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=apart)
            for apart in (False, True)
        ]
        file.write_text(" ".join(str(program.pid) for program in programs))
        time.sleep(600)

    def babble(self) -> None:
        """Into every descriptor but the standard ones."""
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                try:
                    os.write(int(name), b"garbage" * 10)
                except OSError:
                    continue
        time.sleep(60)

    def mutter(self) -> int:
        """A few stray bytes, once it has answered."""
        threading.Timer(0.1, os.write, (int(sys.argv[1]), b"oh")).start()
        return os.getpid()

    def answer_another(self, number: int) -> None:
        payload = pack("an answer", what="an answer")
        assert payload.inline is not None
        os.write(int(sys.argv[1]), header(Kind.ANSWER, number, payload) + payload.inline)
        time.sleep(60)

    def hang_up(self) -> None:
        """Say no more to whoever listens, and live on."""
        for name in map(int, os.listdir("/proc/self/fd")):
            try:
                if name > 2 and stat.S_ISSOCK(os.fstat(name).st_mode):
                    socket.socket(fileno=os.dup(name)).shutdown(socket.SHUT_WR)
            except OSError:
                continue
        time.sleep(60)

    def fork(self) -> int:
        """The fork comes back from here too."""
        return os.fork()

    def signal_itself(self, number: int) -> str:
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        return "alive"


class NeverBuilt:
    """Its constructor does not return. It tells its process first."""

    def __init__(self, info: WorkerInfo, file: Path) -> None:
        file.write_text(str(os.getpid()))
        time.sleep(600)
