"""The process that runs sglang: start it, exchange messages with it, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from reroll.config.host import foreign_environment
from reroll.errors import WorkerError
from reroll_zoo.sglang.messages import CloseServer, Message, OpenServer, Ready, ServerError, StepOutput

_START = Path(__file__).with_name("start.py")
_TAIL_LINES = 40
_END_S = 10.0
"""For which a process that was asked to end is waited for."""


class SglangProcess:
    """One process, in a session of its own with those of other ranks. It ends when this object is closed or its owner dies."""

    def __init__(self, python: str, server_options: OpenServer) -> None:
        """Start and wait until sglang is open. Raises WorkerError, with the end of its log, if it is not."""
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # Open for as long as the process.
        flags = ["--saves-memory"] if server_options.server.get("enable_memory_saver") else []
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [python, str(_START), str(theirs.fileno()), *flags],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=foreign_environment(),
                )
            except OSError as error:
                ours.close()
                raise WorkerError(f"engine.python {python} does not run: {error}") from error
        self._connection = Connection(ours.detach())
        answer = self._exchange(server_options)
        assert isinstance(answer, Ready)
        self.ready = answer

    def ask(self, message: Message) -> StepOutput:
        """Send a message and wait for its answer. Raises WorkerError if the process has ended instead."""
        answer = self._exchange(message)
        assert isinstance(answer, StepOutput)
        return answer

    def close(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # It has ended by itself, or will not.
            self._connection.send(CloseServer())
            self._process.wait(_END_S)
        self._kill()
        self._connection.close()
        self._log.close()

    def _exchange(self, message: Message | OpenServer) -> StepOutput | Ready:
        try:
            self._connection.send(message)
            answer: StepOutput | Ready | ServerError = self._connection.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            self._kill()
            raise WorkerError(f"sglang's process ended with {code}. Its last words:\n{self._tail()}") from error
        if isinstance(answer, ServerError):
            self._kill()
            raise WorkerError(f"sglang stopped on an error:\n{answer.traceback}\nIts last words:\n{self._tail()}")
        return answer

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:]) or "none"
