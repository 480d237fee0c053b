"""How a job reaches the process that runs it, and how the result comes back: a JSON header and byte strings."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

from reroll_zoo.sandbox.base import Limits

STARTED = b"+"
"""What a supervisor sends first: it has the job."""
_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program as its supervisor gets it: Python source, or a command with the files it needs."""

    limits: Limits
    source: bytes = b""
    command: tuple[str, ...] = ()
    stdin: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)
    keep: str = ""
    """A file that the command leaves in its folder, to be sent back."""
    trusted: bool = False
    """The command is a tool of ours (a compiler), not the program itself: it may start processes at every level."""

    @property
    def room_bytes(self) -> int:
        """What may be on disk at a time, the job's own files included."""
        return self.limits.file_mb * 2**20 + sum(map(len, self.files.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a program ended: why (`exit`, `wall`, `cpu`, `memory`, `threads`, `output`), with which code, and what it left."""

    reason: str
    code: int
    wall_s: float
    stdout: bytes
    stderr: bytes
    kept: bytes


def pack_job(job: Job) -> bytes:
    """A job as bytes, with their number in front."""
    header = {
        "limits": asdict(job.limits),
        "command": job.command,
        "files": list(job.files),
        "keep": job.keep,
        "trusted": job.trusted,
    }
    body = _pack(header, [job.source, job.stdin, *job.files.values()])
    return _LENGTH.pack(len(body)) + body


def receive_job(channel: socket.socket) -> Job:
    """The job that the other side sends. Raises EOFError if it leaves."""
    (size,) = _LENGTH.unpack(_receive(channel, _LENGTH.size))
    header, (source, stdin, *contents) = _unpack(_receive(channel, size))
    return Job(
        limits=Limits(**header["limits"]),
        source=source,
        command=tuple(header["command"]),
        stdin=stdin,
        files=dict(zip(header["files"], contents, strict=True)),
        keep=header["keep"],
        trusted=header["trusted"],
    )


def pack_result(result: Result) -> bytes:
    """A result as bytes."""
    header = {"reason": result.reason, "code": result.code, "wall_s": result.wall_s}
    return _pack(header, [result.stdout, result.stderr, result.kept])


def pack_failure(reason: str) -> bytes:
    """Why a job could not even start, as bytes."""
    return _pack({"failure": reason}, [])


def unpack_result(data: bytes) -> Result | str:
    """What a supervisor sent: a result, or why there is none. Raises EOFError for less than a whole one."""
    header, parts = _unpack(data)
    if "failure" in header:
        return str(header["failure"])
    stdout, stderr, kept = parts
    return Result(**header, stdout=stdout, stderr=stderr, kept=kept)


def _pack(header: dict[str, Any], parts: list[bytes]) -> bytes:
    start = json.dumps({**header, "sizes": [len(part) for part in parts]}).encode()
    return b"".join([_LENGTH.pack(len(start)), start, *parts])


def _unpack(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    size = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
    start = _LENGTH.size + size
    if not 0 < size <= len(data) - _LENGTH.size:
        raise EOFError("the message is cut short")
    header = json.loads(data[_LENGTH.size : start])
    parts = []
    for length in header.pop("sizes"):
        parts.append(data[start : start + length])
        start += length
    if start != len(data):
        raise EOFError("the message is cut short")
    return header, parts


def _receive(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other side has left")
        data += piece
    return bytes(data)
