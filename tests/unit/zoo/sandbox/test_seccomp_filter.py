"""The filter's decisions on both machines, as an interpreter of its few instructions finds them."""

from __future__ import annotations

import errno
import struct

import pytest

from reroll_zoo.sandbox.inside import calls, kernel
from reroll_zoo.sandbox.inside.seccomp import assemble

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}
ALLOW, KILL, PID = 0x7FFF0000, 0x80000000, 4711
# On each machine: read, write, execve, mmap, futex, exit_group.
ORDINARY = {"x86_64": (0, 1, 59, 9, 202, 231), "aarch64": (63, 64, 221, 222, 98, 94)}

machines = pytest.mark.parametrize("machine", ARCH)


def decide(code: bytes, machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the kernel would answer: run the program over the data of one call."""
    data = struct.pack("<IIQ6Q", number, arch or ARCH[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    at, value = 0, 0
    while True:
        kind, if_true, if_false, operand = struct.unpack_from("HBBI", code, 8 * at)
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif kind == 0x54:
            value &= operand
        elif kind == 0x06:
            return int(operand)
        else:
            test = {0x15: value == operand, 0x25: value > operand, 0x35: value >= operand, 0x45: value & operand != 0}
            at += if_true if test[kind] else if_false


def denied(answer: int) -> bool:
    return answer == 0x00050000 | errno.EPERM


def missing(answer: int) -> bool:
    return answer == 0x00050000 | errno.ENOSYS


@machines
def test_ordinary_calls_pass_at_every_level(machine: str) -> None:
    for code in (assemble(machine=machine, pid=PID), assemble(machine=machine, pid=PID, alone=True, read_only=True)):
        assert [decide(code, machine, number) for number in ORDINARY[machine]] == [ALLOW] * 6


@machines
def test_everything_on_the_list_is_denied(machine: str) -> None:
    code = assemble(machine=machine, pid=PID)
    numbers = [numbers[COLUMN[machine]] for numbers in calls.DENIED.values()]
    assert all(denied(decide(code, machine, number)) for number in numbers if number is not None)


@machines
def test_a_foreign_machine_is_killed_and_newer_or_opaque_calls_do_not_exist(machine: str) -> None:
    code = assemble(machine=machine, pid=PID)
    assert decide(code, machine, 0, arch=0x40000003) == KILL
    for number in (calls.LAST_KNOWN + 1, 0x40000000, 0xFFFFFFFF, calls.CLONE3[0], calls.OPENAT2[0]):
        assert missing(decide(code, machine, number)), number


@machines
def test_arguments_decide_where_a_call_has_good_uses(machine: str) -> None:
    column = COLUMN[machine]
    code = assemble(machine=machine, pid=PID)
    thread = 0x3D0F00
    assert decide(code, machine, calls.CLONE[column], thread) == ALLOW
    assert decide(code, machine, calls.CLONE[column], 17) == ALLOW
    assert denied(decide(code, machine, calls.CLONE[column], 17 | kernel.CLONE_NEWUSER))
    assert decide(code, machine, calls.SOCKETPAIR[column], 1, 1) == ALLOW
    assert denied(decide(code, machine, calls.SOCKETPAIR[column], 30, 1))
    assert [decide(code, machine, calls.PRLIMIT[column], pid) for pid in (0, PID)] == [ALLOW] * 2
    assert denied(decide(code, machine, calls.PRLIMIT[column], 1))
    assert decide(code, machine, calls.PRCTL[column], 15) == ALLOW
    for option in (kernel.PR_SET_PDEATHSIG, kernel.PR_SCHED_CORE):
        assert denied(decide(code, machine, calls.PRCTL[column], option))


@machines
def test_descriptors_send_no_signals_and_no_commands(machine: str) -> None:
    column = COLUMN[machine]
    code = assemble(machine=machine, pid=PID)
    get_flags, set_flags, set_lock = 3, 4, 6
    assert [decide(code, machine, calls.FCNTL[column], 5, command) for command in (get_flags, set_flags, set_lock)] == [
        ALLOW
    ] * 3
    set_owner, set_signal, set_owner_ex, set_lease, notify = 8, 10, 15, 1024, 1026
    for command in (set_owner, set_signal, set_owner_ex, set_lease, notify):
        assert denied(decide(code, machine, calls.FCNTL[column], 5, command))
    assert denied(decide(assemble(machine=machine, pid=PID, read_only=True), machine, calls.FCNTL[column], 5, set_lock))
    window_size, is_terminal, type_a_key, set_owner, set_group, set_file_flags = (
        0x5413,
        0x5401,
        0x5412,
        0x8901,
        0x8902,
        0x40086602,
    )
    assert [decide(code, machine, calls.IOCTL[column], 1, command) for command in (window_size, is_terminal)] == [ALLOW] * 2
    for command in (type_a_key, set_owner, set_group, set_file_flags):
        assert denied(decide(code, machine, calls.IOCTL[column], 1, command))


@machines
def test_pairs_of_sockets_stay_pairs(machine: str) -> None:
    column = COLUMN[machine]
    code = assemble(machine=machine, pid=PID)
    unix, stream, datagram, raw, packets = 1, 1, 2, 3, 5
    flags = (0, 0o4000, 0o2000000, 0o2004000)
    for kind in (stream, packets):
        assert all(decide(code, machine, calls.SOCKETPAIR[column], unix, kind | flag) == ALLOW for flag in flags)
    for kind in (datagram, raw):
        assert all(denied(decide(code, machine, calls.SOCKETPAIR[column], unix, kind | flag)) for flag in flags)


@machines
def test_memory_is_shared_through_files_alone(machine: str) -> None:
    column = COLUMN[machine]
    code = assemble(machine=machine, pid=PID)
    shared, private, validated, anonymous, huge = 1, 2, 3, 0x20, 0x40000
    for flags in (shared, private, private | anonymous, private | 0x10):
        assert decide(code, machine, calls.MMAP[column], 0, 4096, 3, flags) == ALLOW
    for flags in (shared | anonymous, validated | anonymous, private | anonymous | huge):
        assert denied(decide(code, machine, calls.MMAP[column], 0, 4096, 3, flags))


@machines
def test_alone_a_program_may_start_threads_and_signal_itself(machine: str) -> None:
    column = COLUMN[machine]
    code = assemble(machine=machine, pid=PID, alone=True)
    assert decide(code, machine, calls.CLONE[column], 0x3D0F00) == ALLOW
    assert denied(decide(code, machine, calls.CLONE[column], 17))
    assert denied(decide(code, machine, calls.CLONE[column], 0x4000 | 0x100 | 17))
    assert denied(decide(code, machine, calls.CLONE[column], 0x3D0F00 & ~kernel.CLONE_FILES))
    assert denied(decide(code, machine, calls.PRCTL[column], kernel.PR_SET_DUMPABLE))
    for numbers in (calls.KILL, calls.TGKILL):
        assert decide(code, machine, numbers[column], PID) == ALLOW
        assert all(denied(decide(code, machine, numbers[column], pid)) for pid in (0, 1, PID + 1, 0xFFFFFFFF))
    if machine == "x86_64":
        assert all(denied(decide(code, machine, number)) for number in (57, 58))


@machines
def test_read_only_opens_nothing_to_write(machine: str) -> None:
    column = COLUMN[machine]
    code = assemble(machine=machine, pid=PID, read_only=True)
    openat = calls.OPENAT[column]
    assert decide(code, machine, openat, 0, 0, 0o2000000) == ALLOW
    assert all(denied(decide(code, machine, openat, 0, 0, flags)) for flags in (1, 2, 0o100, 0o1000, 0o2000102))
    if (opens := calls.OPEN[column]) is not None:
        assert decide(code, machine, opens, 0, 0) == ALLOW
        assert denied(decide(code, machine, opens, 0, 1))
    both = {**calls.WRITES, **calls.ATTRIBUTES}
    numbers = [numbers[column] for numbers in both.values() if numbers[column] is not None]
    assert all(denied(decide(code, machine, number)) for number in numbers if number is not None)
    attributes = assemble(machine=machine, pid=PID, keep_attributes=True)
    assert denied(decide(attributes, machine, calls.ATTRIBUTES["fchmodat"][column] or 0))
    assert decide(attributes, machine, calls.WRITES["mkdirat"][column] or 0) == ALLOW


def test_no_number_stands_twice() -> None:
    tables = (calls.DENIED, calls.FORKS, calls.SIGNALS, calls.WRITES, calls.ATTRIBUTES)
    for column in (0, 1):
        numbers = [entry[column] for table in tables for entry in table.values() if entry[column] is not None]
        numbers += [calls.OPENAT[column], calls.CLONE[column], calls.KILL[column], calls.TGKILL[column], calls.PRCTL[column]]
        numbers += [
            calls.IOCTL[column],
            calls.FCNTL[column],
            calls.MMAP[column],
            calls.SOCKETPAIR[column],
            calls.PRLIMIT[column],
        ]
        assert len(numbers) == len(set(numbers))
