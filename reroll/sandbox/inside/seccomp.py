"""A seccomp filter (classic BPF) of our own assembly: the system calls that a program may not make."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable, Sequence

from reroll.sandbox.inside import calls, kernel

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
_TIOCSTI = 0x5412
_OPEN_TO_WRITE = 0o1 | 0o2 | 0o100 | 0o1000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC."""

# seccomp_data: the call's number at 0, the architecture at 4, the low half of argument i at 16 + 8 i (little-endian).
_AT_NUMBER, _AT_ARCH, _AT_ARGUMENT = 0, 4, (16, 24, 32)
_LOAD, _RETURN = 0x20, 0x06
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
        *_deny_argument(calls.CLONE[column], 0, _IF_ANY_BIT, _NAMESPACES),
        *_deny_argument(calls.PRCTL[column], 0, _IF_EQUAL, kernel.PR_SET_PDEATHSIG),
        *_deny_argument(calls.IOCTL[column], 1, _IF_EQUAL, _TIOCSTI),
        *_require_argument(calls.SOCKETPAIR[column], 0, _IF_EQUAL, [_AF_UNIX]),
        *_require_argument(calls.PRLIMIT[column], 0, _IF_EQUAL, [0, pid]),
    ]
    if alone:
        code += _deny([*calls.FORKS.values(), *calls.SIGNALS.values()], column)
        code += _require_argument(calls.CLONE[column], 0, _IF_ANY_BIT, [kernel.CLONE_THREAD])
        code += _require_argument(calls.KILL[column], 0, _IF_EQUAL, [pid])
        code += _require_argument(calls.TGKILL[column], 0, _IF_EQUAL, [pid])
    if keep_attributes or read_only:
        code += _deny(calls.ATTRIBUTES.values(), column)
    if read_only:
        code += _deny(calls.WRITES.values(), column)
        code += _deny_argument(calls.OPEN[column], 1, _IF_ANY_BIT, _OPEN_TO_WRITE)
        code += _deny_argument(calls.OPENAT[column], 2, _IF_ANY_BIT, _OPEN_TO_WRITE)
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


def _deny_argument(number: int | None, index: int, test: int, operand: int) -> list[Instruction]:
    """Deny one call if its argument passes the test; go on with the call's number loaded."""
    if number is None:
        return []
    body = [(_LOAD, 0, 0, _AT_ARGUMENT[index]), *_answer_if(test, operand, errno.EPERM), (_LOAD, 0, 0, _AT_NUMBER)]
    return [(_IF_EQUAL, 0, len(body), number), *body]


def _require_argument(number: int, index: int, test: int, operands: Sequence[int]) -> list[Instruction]:
    """Deny one call unless its argument passes the test with one of the operands; go on with the call's number loaded."""
    tests = [(test, len(operands) - position, 0, operand) for position, operand in enumerate(operands)]
    refusal = (_RETURN, 0, 0, _FAIL_WITH | errno.EPERM)
    body = [(_LOAD, 0, 0, _AT_ARGUMENT[index]), *tests, refusal, (_LOAD, 0, 0, _AT_NUMBER)]
    return [(_IF_EQUAL, 0, len(body), number), *body]
