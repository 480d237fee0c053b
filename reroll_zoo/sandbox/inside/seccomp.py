"""A seccomp filter (classic BPF) of our own assembly: the system calls that a program may not make."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable, Sequence

from reroll_zoo.sandbox.inside import calls, kernel

_COLUMN = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000

_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWTIME
)
_AF_UNIX = 1
_SOCK_KIND, _SOCK_STREAM, _SOCK_SEQPACKET = 0xF, 1, 5
"""Pairs of these stay pairs. One of datagrams would take an address with every message."""
_IOCTLS = (0x5401, 0x802C542A, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)
"""TCGETS, TCGETS2, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FICLONE: what C libraries and Python use. Among
the others are some that signal a process, type on a terminal, or change a file that is open to be read."""
_FCNTL_SIGNALS = (8, 10, 15, 1024, 1026)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY: signals at a distance, or a hold on another's file."""
_FCNTL_PIPE_SIZE = 1031
"""F_SETPIPE_SZ: what lies in pipes is the kernel's memory, of which each user has so much for all of his processes."""
_FCNTL_LOCKS = (6, 7, 37, 38)
"""F_SETLK, F_SETLKW and the same for open files."""
_PRCTLS = (kernel.PR_SET_PDEATHSIG, kernel.PR_SCHED_CORE)
"""To outlive the supervisor, to have a say in how another process is scheduled."""
_SHARED_ANONYMOUS = 0x01 | 0x20
"""MAP_SHARED and MAP_ANONYMOUS: pages that stay while one of them is mapped anywhere, and count where they are mapped alone."""
_MAP_HUGETLB = 0x4_0000
_OPEN_TO_WRITE = 0o1 | 0o2 | 0o100 | 0o1000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC."""
_ALL_BITS = 0xFFFF_FFFF

# seccomp_data: the call's number at 0, the architecture at 4, the low half of argument i at 16 + 8 i (little-endian).
_AT_NUMBER, _AT_ARCH, _AT_ARGUMENT = 0, 4, (16, 24, 32, 40)
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_ABOVE, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x25, 0x35, 0x45
_ALLOW, _FAIL_WITH, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_MODE_FILTER = 2

Instruction = tuple[int, int, int, int]


def assemble(*, machine: str, pid: int, alone: bool = False, keep_attributes: bool = False, read_only: bool = False) -> bytes:
    """The filter as the kernel reads it, for the process `pid`.

    With `alone` it may start no process and signal only itself; with `keep_attributes` it may change no file's rights,
    owner or times; with `read_only` it may neither make nor change a file.
    """
    column = _COLUMN[machine]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _AT_ARCH),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        *_answer_if(_IF_AT_LEAST, _X32_BIT, errno.ENOSYS),
        *_answer_if(_IF_ABOVE, calls.LAST_KNOWN, errno.ENOSYS),
        # The flags of these lie in memory, where no filter can look. The C library falls back on clone and openat.
        *_answer_if(_IF_EQUAL, calls.CLONE3[column], errno.ENOSYS),
        *_answer_if(_IF_EQUAL, calls.OPENAT2[column], errno.ENOSYS),
        *_deny(calls.DENIED.values(), column),
        *_deny_argument(calls.CLONE[column], 0, _IF_ANY_BIT, [_NAMESPACES]),
        *_deny_argument(calls.PRCTL[column], 0, _IF_EQUAL, _PRCTLS),
        *_deny_argument(calls.FCNTL[column], 1, _IF_EQUAL, [*_FCNTL_SIGNALS, _FCNTL_PIPE_SIZE]),
        *_deny_argument(calls.MMAP[column], 3, _IF_EQUAL, [_SHARED_ANONYMOUS], mask=_SHARED_ANONYMOUS),
        *_deny_argument(calls.MMAP[column], 3, _IF_ANY_BIT, [_MAP_HUGETLB]),
        *_require_argument(calls.IOCTL[column], 1, _IF_EQUAL, _IOCTLS),
        *_require_argument(calls.SOCKETPAIR[column], 0, _IF_EQUAL, [_AF_UNIX]),
        *_require_argument(calls.SOCKETPAIR[column], 1, _IF_EQUAL, [_SOCK_STREAM, _SOCK_SEQPACKET], mask=_SOCK_KIND),
        *_require_argument(calls.PRLIMIT[column], 0, _IF_EQUAL, [0, pid]),
    ]
    if alone:
        code += _deny([*calls.FORKS.values(), *calls.SIGNALS.values()], column)
        code += _require_argument(calls.CLONE[column], 0, _IF_ANY_BIT, [kernel.CLONE_THREAD])
        code += _require_argument(calls.CLONE[column], 0, _IF_ANY_BIT, [kernel.CLONE_FILES])  # All descriptors in one table.
        # Nobody is there to hide from but the supervisor, who looks for what it keeps on disk.
        code += _deny_argument(calls.PRCTL[column], 0, _IF_EQUAL, [kernel.PR_SET_DUMPABLE])
        code += _require_argument(calls.KILL[column], 0, _IF_EQUAL, [pid])
        code += _require_argument(calls.TGKILL[column], 0, _IF_EQUAL, [pid])
    if keep_attributes or read_only:
        code += _deny(calls.ATTRIBUTES.values(), column)
    if read_only:
        code += _deny(calls.WRITES.values(), column)
        code += _deny_argument(calls.OPEN[column], 1, _IF_ANY_BIT, [_OPEN_TO_WRITE])
        code += _deny_argument(calls.OPENAT[column], 2, _IF_ANY_BIT, [_OPEN_TO_WRITE])
        code += _deny_argument(calls.FCNTL[column], 1, _IF_EQUAL, _FCNTL_LOCKS)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def install(code: bytes) -> None:
    """Bind this process and its children to the filter, for good."""
    kernel.call("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    instructions = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    kernel.call("prctl", kernel.PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0)


def _answer_if(test: int, operand: int, number: int) -> list[Instruction]:
    """Fail the call with `number` if the value loaded passes the test."""
    return [(test, 0, 1, operand), (_RETURN, 0, 0, _FAIL_WITH | number)]


def _deny(denied: Iterable[tuple[int | None, int | None]], column: int) -> list[Instruction]:
    numbers = [numbers[column] for numbers in denied]
    return [step for number in numbers if number is not None for step in _answer_if(_IF_EQUAL, number, errno.EPERM)]


def _deny_argument(
    number: int | None, index: int, test: int, operands: Sequence[int], *, mask: int = _ALL_BITS
) -> list[Instruction]:
    """Deny one call if its argument passes the test with one of the operands; go on with the call's number loaded."""
    if number is None:
        return []
    tests = [step for operand in operands for step in _answer_if(test, operand, errno.EPERM)]
    return _for_call(number, [*_load_argument(index, mask), *tests])


def _require_argument(
    number: int, index: int, test: int, operands: Sequence[int], *, mask: int = _ALL_BITS
) -> list[Instruction]:
    """Deny one call unless its argument passes the test with one of the operands; go on with the call's number loaded."""
    tests = [(test, len(operands) - position, 0, operand) for position, operand in enumerate(operands)]
    refusal = (_RETURN, 0, 0, _FAIL_WITH | errno.EPERM)
    return _for_call(number, [*_load_argument(index, mask), *tests, refusal])


def _load_argument(index: int, mask: int) -> list[Instruction]:
    """The low half of an argument, of which the kernel looks at the bits of the mask."""
    load = [(_LOAD, 0, 0, _AT_ARGUMENT[index])]
    return load if mask == _ALL_BITS else [*load, (_AND, 0, 0, mask)]


def _for_call(number: int, body: list[Instruction]) -> list[Instruction]:
    """Steps for one call alone, after which its number is loaded again."""
    return [(_IF_EQUAL, 0, len(body) + 1, number), *body, (_LOAD, 0, 0, _AT_NUMBER)]
