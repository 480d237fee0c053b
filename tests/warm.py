"""Another process in a moment: a script, in a fork of one that has loaded torch and the library, once for all tests.

For a test that kills a run or has two work at once. One about how a process starts, or what it loads, starts an interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from contextlib import suppress

FORKS = multiprocessing.get_context("forkserver")
"""Of one process, whoever asks: it has loaded the library for runs and for ranks."""
FORKS.set_forkserver_preload(
    [
        *("reroll.pipeline.run", "reroll.pipeline.build", "reroll.pipeline.rlvr", "reroll.training.torch_strategy"),
        *("reroll.infer.embedded.engine", "reroll.infer.worker", "reroll.training.cluster", "reroll_zoo.fsdp2.strategy"),
        *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen2", "qwen3")),
    ]
)


class WarmProcess:
    """Runs `script` as `python -c` would, in a session of its own; what it prints is lost."""

    def __init__(self, script: str, *words: str) -> None:
        self._process = FORKS.Process(target=_run, args=(script, list(words), dict(os.environ), os.getcwd()))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it. None while it lives."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """For its end."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"{self.pid} still lives after {timeout_s} s"
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """If it lives."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """If it lives."""
        self.send_signal(signal.SIGKILL)


def _run(script: str, words: list[str], environment: dict[str, str], folder: str) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *words]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
