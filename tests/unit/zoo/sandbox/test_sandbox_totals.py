"""Programs that hide what they use from whoever adds it up: in memory that nobody maps, in children that are forgotten, in
files that no folder lists."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reroll.errors import SandboxError
from reroll_zoo.sandbox import warm
from reroll_zoo.sandbox.base import Limits, Program, Ran
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.sandbox.inside import cgroup, usage
from reroll_zoo.sandbox.local import LocalPool

if TYPE_CHECKING:
    from conftest import Box

QUICK = Limits(cpu_s=10, wall_s=60, memory_mb=256, processes=8, file_mb=4, output_kb=64)


def tries(source: str) -> str:
    lines = "".join(f"    {line}\n" for line in source.strip().splitlines())
    prelude = "import ctypes, mmap, os, socket, threading, time"
    return f"{prelude}\ntry:\n{lines}    print('did it')\nexcept OSError: print('stopped')\n"


# Memory.


def test_memory_without_a_file_is_not_shared(box: Box) -> None:
    """Its pages stay while one of them is mapped, and those that a process did not touch itself are nobody's."""
    assert box.run(tries("shared = mmap.mmap(-1, 2**20)")).stdout == "stopped\n"


def test_the_device_of_zeros_gives_no_shared_memory(box: Box) -> None:
    source = "shared = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 2**20)"
    assert box.run(tries(source)).stdout == "stopped\n"


def test_huge_pages_of_the_machine_are_not_to_be_had(box: Box) -> None:
    source = """
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_long
libc.mmap(None, ctypes.c_long(2**21), 3, 0x40022, -1, ctypes.c_long(0))
print(ctypes.get_errno())
"""
    assert box.run(tries(source)).stdout == "1\ndid it\n"


def test_standard_input_cannot_grow(box: Box) -> None:
    assert box.run(tries("os.ftruncate(0, 2**20)"), stdin="words").stdout == "stopped\n"


def test_memory_of_processes_counts_whose_first_thread_has_ended(box: Box) -> None:
    source = """
import ctypes, os, threading, time
def hoard():
    time.sleep(0.5)  # By then the first thread is gone.
    kept = b"x" * (100 * 2**20)
    time.sleep(600)
for _ in range(3):
    if os.fork() == 0:
        threading.Thread(target=hoard).start()
        ctypes.CDLL(None).pthread_exit(None)
time.sleep(600)
"""
    ran = box.run(source)
    assert ran.status == ("memory" if box.level == "namespaces" else "error")


# CPU time.

BURN = """
import os, signal, time
def burn(cpu_s):
    while time.process_time() < cpu_s: pass
"""
FORGOTTEN = f"""{BURN}
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(60):
    read, write = os.pipe()
    if os.fork() == 0:
        burn(0.05)
        os._exit(0)
    os.close(write)
    os.read(read, 1)
    os.close(read)
"""
ORPHANED = f"""{BURN}
for _ in range(60):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            burn(0.05)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    os.read(read, 1)
    os.close(read)
"""


def ran_with(pool: LocalPool, source: str) -> Ran:
    async def run() -> Ran:
        try:
            return await pool.run(Program(source=source, limits=replace(QUICK, cpu_s=0.5, wall_s=300)))
        finally:
            await pool.close()

    return asyncio.run(run())


def namespaces() -> LocalPool:
    try:
        return LocalPool(LocalSandboxConfig(level="namespaces"), num_processes=1)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("source", [FORGOTTEN, ORPHANED], ids=["forgotten", "orphaned"])
def test_a_group_counts_the_cpu_time_of_children_that_nobody_waits_for(source: str) -> None:
    pool = namespaces()
    if not pool.idle[0].group:
        asyncio.run(pool.close())
        pytest.skip("no control group may be made here")
    assert ran_with(pool, source).status == "timeout"


def test_without_a_group_the_cpu_time_of_orphans_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "make_group", lambda: "")
    assert ran_with(namespaces(), ORPHANED).status == "timeout"


def test_one_programs_cpu_time_is_not_charged_to_the_next(box: Box) -> None:
    """Each uses more than half of what it may."""
    for _ in range(2):
        assert box.run(f"{BURN}\nburn(0.4)\nprint('done')", limits=replace(QUICK, cpu_s=0.7)).stdout == "done\n"


def test_no_group_where_the_machine_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_own_folder", lambda: str(tmp_path / "missing"))
    assert cgroup.make_group() == ""
    group = cgroup.ControlGroup("")
    group.join()
    assert group.cpu_s() == 0
    group.leave()


# The disk.

OPEN_AND_DELETED = """
kept = []
for _ in range(20):
    kept.append(os.open('big', os.O_RDWR | os.O_CREAT))
    os.unlink('big')
    os.write(kept[-1], bytes(2**20))
"""
NEVER_NAMED = """
kept = []
for _ in range(20):
    kept.append(os.open('.', os.O_RDWR | os.O_TMPFILE))
    os.write(kept[-1], bytes(2**20))
"""
MAPPED_AND_CLOSED = """
libc = ctypes.CDLL(None)
for _ in range(20):
    file = os.open('big', os.O_RDWR | os.O_CREAT)
    os.write(file, bytes(2**20))
    libc.mmap(None, ctypes.c_long(4096), 1, 2, file, ctypes.c_long(0))
    os.close(file)
    os.unlink('big')
"""
IN_FLIGHT = """
end, other = socket.socketpair()
for _ in range(20):
    file = os.open('big', os.O_RDWR | os.O_CREAT)
    os.unlink('big')
    os.write(file, bytes(2**20))
    socket.send_fds(end, [b'x'], [file])
    os.close(file)
"""
BEHIND_A_BUSTLE = """
def bustle():
    while True:
        open('a', 'w').close()
        os.unlink('a')
threading.Thread(target=bustle, daemon=True).start()
for number in range(20): open(f'big{number}', 'wb').write(bytes(2**20))
"""
AFTER_THE_FIRST_THREAD = f"""
def hoard():
{"".join(f"    {line}" for line in OPEN_AND_DELETED.strip().splitlines(keepends=True))}
    time.sleep(600)
threading.Thread(target=hoard).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize(
    "hide",
    [OPEN_AND_DELETED, NEVER_NAMED, MAPPED_AND_CLOSED, IN_FLIGHT, BEHIND_A_BUSTLE, AFTER_THE_FIRST_THREAD],
    ids=["open and deleted", "never named", "mapped and closed", "in flight", "behind a bustle", "after the first thread"],
)
def test_files_that_no_folder_lists_count(box: Box, hide: str) -> None:
    if box.level != "landlock" and hide is AFTER_THE_FIRST_THREAD:
        pytest.skip("the thread itself is stopped, and the program goes on without it")
    ran = box.run(tries(f"{hide}\ntime.sleep(600)"))
    assert ran.status == "output" or ran.stdout == "stopped\n", ran


def test_deleted_files_within_the_limit_are_nobodys_business(box: Box) -> None:
    if box.level == "rlimits":
        pytest.skip("no files here")
    source = """
import mmap, os, tempfile, time
with tempfile.TemporaryFile() as first, tempfile.NamedTemporaryFile() as second:
    for file in (first, second): file.write(bytes(2**20)); file.flush()
    mapped = mmap.mmap(first.fileno(), 2**20)
    os.unlink(second.name)
    time.sleep(0.5)
    open(second.name, "w").close()
print("done")
"""
    ran = box.run(source)
    assert (ran.status, ran.stdout, ran.stderr) == ("ok", "done\n", "")


def test_a_file_that_vanishes_hides_none_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vanishes").write_bytes(bytes(2**20))
    (tmp_path / "stays").write_bytes(bytes(2**20))
    look = os.lstat

    def vanish_and_look(path: str) -> os.stat_result:
        (tmp_path / "vanishes").unlink(missing_ok=True)
        return look(path)

    monkeypatch.setattr(usage.os, "lstat", vanish_and_look)
    assert usage.folder_bytes(str(tmp_path)) >= 2**20


def test_more_files_than_anyone_looks_at_count_as_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_FILES", 9)
    for number in range(9):
        (tmp_path / str(number)).touch()
    assert usage.folder_bytes(str(tmp_path)) == usage.ENDLESS


# What the machine has for all of its processes, or a user for all of his.

SHARED = {
    "contexts of asynchronous reading": """
context = ctypes.c_ulong()
if ctypes.CDLL(None).syscall({"x86_64": 206, "aarch64": 0}[os.uname().machine], 60_000, ctypes.byref(context)): raise OSError
""",
    "long pipes": "fcntl.fcntl(os.pipe()[1], 1031, 2**20)",
    "timers": """
timer, libc = ctypes.c_void_p(), ctypes.CDLL(None)
for _ in range(1000):
    if libc.timer_create(1, None, ctypes.byref(timer)): raise OSError
""",
}


@pytest.mark.parametrize("what", SHARED)
def test_no_program_uses_up_what_there_is_for_all(box: Box, what: str) -> None:
    assert box.run(f"import fcntl\n{tries(SHARED[what])}").stdout == "stopped\n"


THREADS = """
import threading, time
threading.stack_size(32 * 1024)
for _ in range(NUM):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
time.sleep(600)
"""


def test_more_threads_than_a_program_may_have_end_it(box: Box) -> None:
    ran = box.run(THREADS.replace("NUM", "1000"))
    assert ran.status == "error"
    said = "can't start new thread" if box.level == "namespaces" else "more than 8 processes and threads"
    assert said in ran.stderr


# Names that a process gives itself.


@pytest.mark.parametrize(
    "call_it",
    ["ctypes.CDLL(None).prctl(15, NAME, 0, 0, 0)", "kept = mmap.mmap(os.open(NAME, os.O_RDWR | os.O_CREAT), 0)"],
    ids=["itself", "a file that it maps"],
)
def test_a_name_of_any_bytes_blinds_no_supervisor(box: Box, call_it: str) -> None:
    if "O_CREAT" in call_it and box.level == "rlimits":
        pytest.skip("no files at this level")
    source = f"""
NAME = b"\\xff\\xfe) Z 1"
if {"O_CREAT" in call_it}: open(NAME, "wb").write(bytes(4096))
{call_it}
while time.process_time() < 60: pass
"""
    ran = box.run(f"import ctypes, mmap, os, time\n{source}", limits=replace(QUICK, cpu_s=1))
    assert ran.status == "timeout"
