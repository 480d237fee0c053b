"""What a sandbox is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Language = Literal["python", "cpp"]
Status = Literal["ok", "error", "timeout", "memory", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use, with all the processes it starts."""

    cpu_s: float = 5
    wall_s: float = 10
    """Counted from the program's own start, not from its place in the queue."""
    memory_mb: int = 512
    processes: int = 16
    """Processes and threads alive at a time."""
    file_mb: int = 16
    """All that it may have written to disk at a time."""
    output_kb: int = 256
    """Of standard output and of standard error, each. More ends the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Source code to run once, as the main program, with `stdin` on its standard input."""

    source: str
    language: Language = "python"
    stdin: str = ""
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What became of a program."""

    status: Status
    """`error`: it did not compile, or ended with a non-zero code or by a signal. `timeout`: its CPU or wall time was over.
    `output`: it wrote too much."""
    stdout: str
    stderr: str
    """Its end. For a C++ program that does not compile, the compiler's words."""
    exit_code: int
    """Negative: the signal that ended it."""
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class Sandbox(Protocol):
    """A place that runs untrusted programs, several at a time. Whatever a program does comes back as a `Ran`.

    Raises `SandboxError` where the sandbox itself fails: no place left to run, a remote one that does not answer.
    """

    @property
    def level(self) -> str:
        """What contains the programs: `namespaces`, `landlock`, `rlimits`, or `remote` (a service that answers for itself)."""
        ...

    async def run(self, program: Program) -> Ran:
        """Run the program to its end. Cancelling the call ends the program."""
        ...

    async def close(self) -> None:
        """End every program and leave nothing behind. A call in flight raises."""
        ...
