"""Programs that reach for what is outside by ways that need no open file: signals, sockets, shared memory, locks, watches.

Each aims at a process, a socket, a file or a segment that the test itself has made.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reroll_zoo.sandbox.inside import landlock

if TYPE_CHECKING:
    from conftest import Box

libc = ctypes.CDLL(None, use_errno=True)
IPC_CREATE, IPC_REMOVE, IPC_NO_WAIT = 0o1666, 0, 0o4000

PRELUDE = """
import array, ctypes, fcntl, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def check(result):
    if result in (-1, None, 2**64 - 1): raise OSError(ctypes.get_errno(), "refused")
    return result
"""


def was_stopped(box: Box, source: str) -> bool:
    lines = "".join(f"    {line}\n" for line in source.strip().splitlines())
    ran = box.run(f"{PRELUDE}try:\n{lines}    print('did it')\nexcept OSError: print('stopped')\n")
    assert ran.stdout in ("did it\n", "stopped\n"), (ran, source)
    return ran.stdout == "stopped\n"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that no program may touch."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.fixture
def our_file(tmp_path: Path) -> Path:
    """A file that anyone may read, in folders that anyone may enter."""
    file = tmp_path / "ours"
    file.write_text("1234")
    file.chmod(0o666)
    for folder in [tmp_path, *tmp_path.parents][:3]:
        folder.chmod(0o755)
    return file


# Signals.


@pytest.mark.parametrize(
    "aim",
    [
        "fcntl.fcntl(end, 8, PID)",
        "fcntl.fcntl(end, 15, struct.pack('ii', 1, PID))",
        "fcntl.ioctl(end, 0x8901, struct.pack('i', PID))",
        "fcntl.ioctl(end, 0x8902, struct.pack('i', PID))",
    ],
    ids=["F_SETOWN", "F_SETOWN_EX", "FIOSETOWN", "SIOCSPGRP"],
)
def test_no_descriptor_signals_a_process_of_ours(box: Box, bystander: subprocess.Popen[bytes], aim: str) -> None:
    source = f"""
PID = {bystander.pid}
end, other = (side.detach() for side in socket.socketpair())
{aim}
fcntl.fcntl(end, 10, 9)
fcntl.fcntl(end, fcntl.F_SETFL, os.O_NONBLOCK | 0o20000)
os.write(other, b"x")
"""
    assert was_stopped(box, source)


@pytest.mark.parametrize(
    "call",
    [
        "libc.syscall(129, PID, 0, 0)",  # rt_sigqueueinfo
        "libc.syscall(200, PID, 0)",  # tkill
        "libc.syscall(234, PID, PID, 0)",  # tgkill
        "libc.syscall(424, os.open(f'/proc/{PID}', os.O_RDONLY), 0, 0, 0)",  # pidfd_send_signal
        "libc.prctl(62, 1, PID, 1, 0)",  # a cookie for its scheduling
        "libc.syscall(274, PID, ctypes.byref(ctypes.c_long()), ctypes.byref(ctypes.c_long()))",  # get_robust_list
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_no_call_touches_a_process_of_ours(box: Box, bystander: subprocess.Popen[bytes], call: str) -> None:
    assert was_stopped(box, f"PID = {bystander.pid}\ncheck({call})")


def test_a_program_signals_itself_and_its_threads_as_ever(box: Box) -> None:
    source = """
import os, signal, threading, time
got = []
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM): signal.signal(number, lambda number, frame: got.append(number))
os.kill(os.getpid(), signal.SIGUSR1)
signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
signal.setitimer(signal.ITIMER_REAL, 0.01)
while len(got) < 3: time.sleep(0.01)
print(sorted(got) == sorted([signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]))
"""
    ran = box.run(source)
    assert (ran.stdout, ran.stderr) == ("True\n", "")


def test_landlock_by_itself_holds_signals_and_abstract_sockets_back(bystander: subprocess.Popen[bytes], tmp_path: Path) -> None:
    try:
        known = landlock.version()
    except OSError as error:
        pytest.skip(str(error))
    if known < 6:
        pytest.skip("Linux 6.12 has scopes")
    script = f"""
import os, socket
from reroll_zoo.sandbox.inside import landlock
ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
landlock.restrict(readable=[], scratch={str(tmp_path)!r})
for act in (lambda: os.kill({bystander.pid}, 0), lambda: ours.sendto(b"x", b"\\0" + NAME)):
    try: act(); print("did it")
    except PermissionError: print("stopped")
"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("")
        name = listener.getsockname()[1:]
        done = subprocess.run([sys.executable, "-c", f"NAME = {name!r}\n{script}"], capture_output=True, text=True, check=True)
    assert done.stdout == "stopped\nstopped\n"


# Sockets.


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[list[socket.socket]]:
    """A socket of ours with an abstract name, and one with a path, that anyone may write to and nobody does."""
    tmp_path.chmod(0o777)
    for folder in list(tmp_path.parents)[:2]:
        folder.chmod(0o755)
    sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    try:
        sockets[0].bind("")
        sockets[1].bind(str(tmp_path / "ours"))
        (tmp_path / "ours").chmod(0o777)
        yield sockets
        for listener in sockets:
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.recv(100)
    finally:
        for listener in sockets:
            listener.close()


@pytest.mark.parametrize("kind", ["SOCK_DGRAM", "SOCK_RAW", "SOCK_STREAM", "SOCK_SEQPACKET"])
@pytest.mark.parametrize(
    "say",
    ["sendto(b'x', TO)", "sendmsg([b'x'], [], 0, TO)", "connect(TO); end.send(b'x')"],
    ids=["sendto", "sendmsg", "connect"],
)
def test_no_pair_of_sockets_reaches_a_socket_of_ours(box: Box, listeners: list[socket.socket], kind: str, say: str) -> None:
    for listener in listeners:
        attempt = f"TO = {listener.getsockname()!r}\nend, other = socket.socketpair(socket.AF_UNIX, socket.{kind})\nend.{say}"
        address_is_overlooked = kind == "SOCK_SEQPACKET" and say.startswith("send")
        assert was_stopped(box, attempt) is not address_is_overlooked


def test_a_program_takes_no_name_for_a_socket(box: Box, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for folder in list(tmp_path.parents)[:2]:
        folder.chmod(0o755)
    for name in (str(tmp_path / "theirs"), f"\0reroll-test-{os.getpid()}"):
        assert was_stopped(box, f"end, other = socket.socketpair()\nend.bind({name!r})")
    assert list(tmp_path.iterdir()) == []


def test_pairs_of_sockets_carry_what_asyncio_sends(box: Box) -> None:
    source = """
import asyncio, socket
async def main():
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    reader, _ = await asyncio.open_connection(sock=theirs)
    writer.write(bytes(2**20))
    writer.writelines([b"a", b"b"])
    writer.write_eof()
    return len(await reader.read())
print(asyncio.run(main()))
"""
    ran = box.run(source)
    assert (ran.stdout, ran.stderr) == (f"{2**20 + 2}\n", "")


def test_a_process_of_a_program_may_hide_from_its_others_but_not_from_the_supervisor(box: Box) -> None:
    hide = "check(libc.prctl(4, 0, 0, 0, 0))"
    if box.level != "namespaces":
        assert was_stopped(box, hide)
        return
    assert was_stopped(box, f"{hide}\nif os.fork(): os.wait(); os._exit(0)\nopen(f'/proc/{{os.getppid()}}/mem', 'rb')")


def test_multiprocessing_and_subprocess_work_where_there_are_processes(box: Box) -> None:
    if box.level != "namespaces":
        pytest.skip("a program is one process here")
    source = """
import asyncio, multiprocessing, subprocess, sys
from multiprocessing import shared_memory
def square(x): return x * x
def fill(queue, number, cells):
    number.value += 1
    cells[0] = 7
    queue.put("filled")
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool: print(pool.map(square, range(4)))
    queue, number, cells = context.Queue(), context.Value("i", 4), context.Array("i", 3)
    child = context.Process(target=fill, args=(queue, number, cells))
    child.start()
    print(queue.get(), child.join(), number.value, cells[0])
    memory = shared_memory.SharedMemory(create=True, size=4096)
    print(memory.size)
    memory.close(); memory.unlink()
    print(subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout.strip())
    async def talk():
        process = await asyncio.create_subprocess_shell("cat; exit 3", stdin=-1, stdout=-1)
        return (await process.communicate(b"words"))[0], process.returncode
    print(asyncio.run(talk()))
"""
    ran = box.run(source)
    assert (ran.stdout, ran.status) == ("[0, 1, 4, 9]\nfilled None 5 7\n4096\nhi\n(b'words', 3)\n", "ok"), ran.stderr


# Memory and messages by number or name.


def test_no_shared_memory_of_ours_is_to_be_had_by_its_number(box: Box) -> None:
    segment = libc.shmget(0, 4096, IPC_CREATE)
    assert segment >= 0
    try:
        assert was_stopped(box, f"at = check(libc.shmat({segment}, None, 0))\nctypes.memset(at, 1, 1)")
        assert was_stopped(box, f"check(libc.shmctl({segment}, 0, None))")
        libc.shmat.restype = ctypes.c_void_p
        ours = libc.shmat(segment, None, 0)
        assert ctypes.string_at(ours, 1) == b"\0"
        libc.shmdt(ctypes.c_void_p(ours))
    finally:
        assert libc.shmctl(segment, IPC_REMOVE, None) == 0


def test_no_message_of_ours_is_to_be_had_by_its_queues_number(box: Box) -> None:
    queue = libc.msgget(0, IPC_CREATE)
    assert queue >= 0
    message = ctypes.create_string_buffer((1).to_bytes(8, sys.byteorder) + b"ours")
    try:
        assert libc.msgsnd(queue, message, 4, IPC_NO_WAIT) == 0
        assert was_stopped(box, f"check(libc.msgrcv({queue}, ctypes.create_string_buffer(64), 4, 0, {IPC_NO_WAIT}))")
        assert was_stopped(box, f"check(libc.msgctl({queue}, 0, None))")
        assert libc.msgrcv(queue, message, 4, 0, IPC_NO_WAIT) == 4
    finally:
        libc.msgctl(queue, IPC_REMOVE, None)


def test_no_semaphore_of_ours_is_to_be_moved_by_its_number(box: Box) -> None:
    semaphore = libc.semget(0, 1, IPC_CREATE)
    assert semaphore >= 0
    try:
        assert was_stopped(box, f"check(libc.semop({semaphore}, struct.pack('Hhh', 0, 1, 0), 1))")
        assert was_stopped(box, f"check(libc.semctl({semaphore}, 0, 0))")
        assert libc.semctl(semaphore, 0, 12) == 0  # GETVAL
    finally:
        libc.semctl(semaphore, 0, IPC_REMOVE)


def test_no_message_queue_of_ours_is_removed_by_its_name(box: Box) -> None:
    name = f"/reroll-test-{os.getpid()}-{box.level}".encode()
    queue = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o666, None)
    if queue < 0:
        pytest.skip("no message queues here")
    try:
        assert was_stopped(box, f"check(libc.mq_unlink({name!r}))")
    finally:
        os.close(queue)
        assert libc.mq_unlink(name) == 0


# Files that are open to be read.


def test_no_folder_of_ours_is_watched(box: Box, our_file: Path) -> None:
    watch = (
        f"watch = check(libc.inotify_init1(0))\ncheck(libc.inotify_add_watch(watch, {str(our_file.parent).encode()!r}, 0x100))"
    )
    assert was_stopped(box, watch)


@pytest.mark.parametrize(
    "hold",
    [
        "fcntl.ioctl(file, 0x40086602, struct.pack('l', 0x40))",  # FS_IOC_SETFLAGS: not to be dumped
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "fcntl.lockf(file, fcntl.LOCK_SH)",
        "fcntl.fcntl(file, 1024, fcntl.F_RDLCK)",  # F_SETLEASE
    ],
)
def test_a_file_that_may_be_read_is_neither_changed_nor_held(box: Box, our_file: Path, hold: str) -> None:
    assert was_stopped(box, f"file = os.open({str(our_file)!r}, os.O_RDONLY)\n{hold}")
    with open(our_file, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_files_of_its_own_are_locked_as_ever(box: Box) -> None:
    if box.level == "rlimits":
        pytest.skip("no files of its own here")
    source = """
import fcntl, sqlite3
with open("own", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_EX)
with sqlite3.connect("data") as data:
    data.execute("create table words (word)")
    data.execute("insert into words values ('kept')")
print(data.execute("select * from words").fetchall())
"""
    ran = box.run(source)
    assert (ran.stdout, ran.stderr) == ("[('kept',)]\n", "")
