"""A warm interpreter as the pool sees it: a process that takes one job at a time, each over a socket of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import reroll_zoo
from reroll.errors import SandboxError
from reroll_zoo.sandbox.base import Limits
from reroll_zoo.sandbox.config import SandboxLevel
from reroll_zoo.sandbox.inside.cgroup import make_group, remove_group
from reroll_zoo.sandbox.inside.jail import remove
from reroll_zoo.sandbox.inside.wire import STARTED, Job, Result, pack_job, unpack_result

START_TIMEOUT_S = 30.0
"""How long it may take an interpreter to start, or to clean up after a program, before it takes the next."""
_EXIT_TIMEOUT_S = 3.0
_BOOT = """
import sys
root, control, settings = sys.argv[1:]
sys.path.append(root)
from reroll_zoo.sandbox.inside.zygote import main
sys.path.remove(root)
main(int(control), settings)
"""
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    # Thread pools as wide as the machine would cost memory that a program does not have.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class InterpreterLost(Exception):
    """An interpreter is gone, or does not answer."""


class WarmInterpreter:
    """One process at one level. It runs its jobs one after the other; all that a job started is gone before the next begins."""

    def __init__(self, level: SandboxLevel, *, site_packages: bool, preload: Sequence[str] = ()) -> None:
        """`preload`: modules, out of the site-packages too if those are given, that every program finds imported."""
        self._scratch = "" if level == "namespaces" else tempfile.mkdtemp(prefix="reroll-sandbox-")
        self.group = make_group() if level == "namespaces" else ""
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process that writes to it
        prefix = os.path.realpath(sys.base_prefix)
        packages = _package_folders() if site_packages else []
        settings = {
            "level": level,
            "folders": [prefix, *packages],
            "packages": packages,
            "scratch": self._scratch,
            "group": self.group,
            "preload": list(preload),
        }
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(reroll_zoo.__file__).parent.parent)
        flags = ["-s", "-S", "-P", "-B"]  # No user's packages and no others, no working directory, no bytecode.
        with theirs:
            self.process = subprocess.Popen(
                [os.path.realpath(sys.executable), *flags, "-c", _BOOT, root, str(theirs.fileno()), json.dumps(settings)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._words,
                cwd="/",
                env=_ENVIRONMENT,
                start_new_session=True,
            )

    def probe(self) -> int:
        """Run a first program: the user that it runs as. Raises SandboxError with the reason if it does not run."""
        job = Job(source=b"import os; print(os.getuid())", limits=Limits(wall_s=START_TIMEOUT_S, cpu_s=START_TIMEOUT_S))
        try:
            with self.begin() as channel:
                channel.settimeout(START_TIMEOUT_S)
                channel.sendall(pack_job(job))
                channel.recv(len(STARTED))
                result = self.result(b"".join(iter(lambda: channel.recv(1 << 16), b"")))
        except (InterpreterLost, OSError):
            raise SandboxError(self._last_words()) from None
        if result.code:
            raise SandboxError(result.stderr.decode(errors="replace").strip() or f"the first program ended with {result.code}")
        return int(result.stdout)

    def begin(self) -> socket.socket:
        """The socket over which to send a job, then to receive STARTED and the result. Closing it ends the job."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"j"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise InterpreterLost from None
        return ours

    def result(self, data: bytes) -> Result:
        """What came over the socket, as a result."""
        try:
            result = unpack_result(data)
        except EOFError:
            raise InterpreterLost from None
        if isinstance(result, str):
            raise SandboxError(f"the sandbox could not run a program: {result}")
        return result

    def hang_up(self) -> None:
        """Let it leave when it has nothing to do."""
        self._control.close()

    def end(self) -> None:
        """Wait for it to leave after `hang_up`, not for long, and delete what it had on disk."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End it and all that it runs, now, and leave nothing of it behind. Safe to call twice."""
        self._control.close()
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._words.close()
        if self._scratch:
            remove(self._scratch)
        if self.group:
            remove_group(self.group)

    def _last_words(self) -> str:
        """Why it does not answer, as far as it could say."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_TIMEOUT_S)
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the interpreter does not answer"


def _package_folders() -> list[str]:
    """Where this interpreter finds installed packages."""
    found = [os.path.realpath(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [path for path in dict.fromkeys(found) if os.path.isdir(path)]
