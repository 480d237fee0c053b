"""What a sandbox holds back, found out by trying: programs that do what they should not, within reason."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reroll.sandbox.base import Limits, Program, Ran, Sandbox, Status

_EVERYWHERE = ("namespaces", "landlock", "rlimits")
_LIMITS = Limits(cpu_s=1, wall_s=2, memory_mb=256, processes=8, file_mb=4, output_kb=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that a program tries. It is held back if that raises OSError, or if the program ends with the status `ends`."""

    name: str
    source: str
    """`FILE` is a file of ours, `PID` our process."""
    levels: Sequence[str] = _EVERYWHERE
    """Where it must be held back."""
    ends: Status | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of a check."""

    name: str
    held: bool
    promised: bool

    @property
    def broken(self) -> bool:
        return self.promised and not self.held


CHECKS = (
    Check(name="read a file of yours", source="open(FILE).read()", levels=("namespaces", "landlock")),
    Check(name="write to a file of yours", source="open(FILE, 'a').write('x')"),
    Check(name="make a file in the system's folders", source="open('/usr/lib/reroll-was-here', 'w')"),
    Check(
        name="read the environment of your process",
        source="open(f'/proc/{PID}/environ').read()",
        levels=("namespaces", "landlock"),
    ),
    Check(name="signal your process", source="import os; os.kill(PID, 0)"),
    Check(name="open a network socket", source="import socket; socket.socket()"),
    Check(name="open a local socket", source="import socket; socket.socket(socket.AF_UNIX)"),
    Check(
        name="start 100 processes",
        source="import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(5); os._exit(0)",
    ),
    Check(name="write 100 MB to disk", source="for i in range(100): open(f'big{i}', 'wb').write(bytes(2**20))", ends="output"),
    Check(name="use 1 GB of memory", source="bytearray(2**30)", ends="memory"),
    Check(name="compute for longer than allowed", source="while True: pass", ends="timeout"),
    Check(name="sleep for longer than allowed", source="import time; time.sleep(60)", ends="timeout"),
    Check(name="write without end", source="while True: print('x' * 1000)", ends="output"),
)


async def try_out(sandbox: Sandbox) -> list[Finding]:
    """Run every check in a sandbox of this machine."""
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_text("yours")
        file.chmod(0o666)
        Path(folder).chmod(0o755)
        for check in CHECKS:
            ran = await sandbox.run(Program(source=_program(check, file), limits=_LIMITS))
            findings.append(Finding(name=check.name, held=_held(check, ran), promised=sandbox.level in check.levels))
    return findings


def _program(check: Check, file: Path) -> str:
    names = f"FILE, PID = {str(file)!r}, {os.getpid()}\n"
    body = "".join(f"    {line}\n" for line in check.source.splitlines())
    return f"{names}try:\n{body}except OSError: print('held')\n"


def _held(check: Check, ran: Ran) -> bool:
    return ran.status == check.ends or ran.stdout == "held\n"
