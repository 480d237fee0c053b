"""Programs that mean harm. Each could do little if it were let: bombs are bounded, and aim at what the test itself has made."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reroll_zoo.sandbox.base import Limits, Program
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.sandbox.make import open_sandbox

if TYPE_CHECKING:
    from conftest import Box

QUICK = Limits(cpu_s=10, wall_s=60, memory_mb=256, processes=8, file_mb=4, output_kb=64)
HANGS_S = 120
"""What takes longer than this hangs, however busy the machine is."""


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that no program may touch."""
    process = subprocess.Popen(["sleep", "600"], env={"PASSWORD": "1234"})
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that anyone may read and write."""
    file = tmp_path / "secret"
    file.write_text("1234")
    file.chmod(0o666)
    for folder in [tmp_path, *tmp_path.parents][:3]:
        folder.chmod(0o755)
    return file


def tries(source: str) -> str:
    """A program that says whether it was stopped."""
    lines = "".join(f"    {line}\n" for line in source.strip().splitlines())
    return f"import os\ntry:\n{lines}    print('did it')\nexcept OSError: print('stopped')\n"


def was_stopped(box: Box, source: str) -> bool:
    ran = box.run(tries(source))
    assert ran.stdout in ("did it\n", "stopped\n"), (ran, source)
    return ran.stdout == "stopped\n"


# Too much of something.


def test_a_fork_bomb_goes_off_in_its_own_corner(box: Box) -> None:
    source = """
import os, time
for i in range(200):
    try:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    except OSError:
        break
print(i)
"""
    ran = box.run(source)
    assert ran.status == "ok"
    assert int(ran.stdout) <= 8


def test_forks_that_fork_are_counted_together(box: Box) -> None:
    """The first process waits until all the others have said that they are there, and none ends before it."""
    source = """
import os, time
first = os.getpid()
read, write = os.pipe()
for _ in range(6):
    try: os.fork()
    except OSError: break
os.write(1, b"x")
os.close(write)
if os.getpid() == first: os.read(read, 1)
else: time.sleep(600)
"""
    ran = box.run(source)
    assert ran.status == "ok"
    assert 1 <= len(ran.stdout) <= 8


def test_memory_that_grows_bit_by_bit_is_limited(box: Box) -> None:
    ran = box.run("hoard = []\nfor _ in range(300): hoard.append(bytearray(10**7))\nprint('has 3 GB')")
    assert (ran.status, ran.stdout) == ("memory", "")


def test_processes_have_one_memory_limit_together(box: Box) -> None:
    source = """
import os, time
pids = [os.fork() for _ in range(2)]
hoard = b"x" * (150 * 2**20)
time.sleep(600)
print(len(hoard))
"""
    ran = box.run(source)
    assert ran.status == ("memory" if box.level == "namespaces" else "error")


@pytest.mark.parametrize("call", ["os.memfd_create('x')", "ctypes.CDLL(None, use_errno=True).shmget(0, 2**26, 0o1600)"])
def test_memory_that_no_limit_counts_is_not_to_be_had(box: Box, call: str) -> None:
    source = f"import ctypes, os\ntry: print({call})\nexcept PermissionError: print(-1)"
    assert box.run(source).stdout == "-1\n"


def test_a_big_file_is_not_to_be_had(box: Box) -> None:
    assert was_stopped(box, "open('big', 'wb').write(bytes(20 * 2**20))")


def test_many_files_do_not_fill_the_disk(box: Box) -> None:
    ran = box.run(tries("for i in range(100): open(f'big{i}', 'wb').write(bytes(2**20))"))
    assert ran.status == "output" or ran.stdout == "stopped\n"


def test_a_deep_and_locked_folder_is_swept_away(box: Box) -> None:
    box.run("import os\nfor _ in range(1050):\n    os.mkdir('d', 0o700); os.chdir('d')\n    open('f', 'w')\nos.chmod('.', 0)")
    box.run("import os\nos.mkdir('d')\nopen('d/f', 'w')\nos.chmod('d/f', 0)\nos.chmod('d', 0)\nos.chmod('.', 0)")


def test_a_shower_of_output_on_both_streams_ends_the_program(box: Box) -> None:
    ran = box.run("import os\nwhile True: os.write(1, b'x' * 4096); os.write(2, b'y' * 4096)")
    assert (ran.status, ran.exit_code) == ("output", -9)


def test_open_files_are_limited(box: Box) -> None:
    assert was_stopped(box, "hoard = [os.open('/dev/null', os.O_RDONLY) for _ in range(2000)]")


def test_a_program_cannot_raise_its_limits(box: Box) -> None:
    source = """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    try: resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)); print("raised", which)
    except (ValueError, OSError): pass
"""
    assert box.run(source).stdout == ""


# Staying alive.


@pytest.mark.parametrize(
    "armour",
    [
        "for number in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
def test_no_signal_trick_outlives_the_time_limit(box: Box, armour: str) -> None:
    before = set(box.pool.interpreters)
    ran = box.run(f"import os, signal, time\n{armour}\nwhile True: time.sleep(1)", limits=replace(QUICK, wall_s=0.5))
    assert ran.status == "timeout"
    assert box.pool.interpreters == before  # Its supervisor ended it: the interpreter was not given up.


def test_no_daemon_outlives_its_program(box: Box) -> None:
    mark = f"reroll-daemon-{os.getpid()}-{box.level}"
    source = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["{mark}", "600"])
    os._exit(0)
time.sleep(0.3)
print("gone")
"""
    ran = box.run(source)
    assert ran.stdout == ("gone\n" if box.level == "namespaces" else "")
    assert not _is_running(mark)


def _is_running(name: str) -> bool:
    """Whether a process of this machine has this name."""
    deadline_s = time.monotonic() + HANGS_S
    while time.monotonic() < deadline_s:
        files = Path("/proc").glob("[0-9]*/cmdline")
        if not any(name.encode() in _read(file) for file in files):
            return False
        time.sleep(0.05)
    return True


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_a_child_that_holds_the_output_open_does_not_hold_up_the_result(box: Box) -> None:
    ran = box.run(
        "import os, time\ntry: child = os.fork()\nexcept OSError: child = 1\nif child: print('over')\nelse: time.sleep(600)"
    )
    assert (ran.status, ran.stdout) == ("ok", "over\n")


# Harming others.


def test_a_program_cannot_signal_ours(box: Box, bystander: subprocess.Popen[bytes]) -> None:
    for pid in (bystander.pid, os.getpid()):
        assert was_stopped(box, f"os.kill({pid}, 0)")
        assert was_stopped(box, f"os.killpg({pid}, 0)")


def test_a_program_cannot_kill_what_keeps_it(box: Box) -> None:
    source = """
import os, signal, time
def shoot(pid, number):
    try: os.kill(pid, number)
    except OSError: pass
apart = os.getpid() < 10  # The first of a namespace: a shot at all cannot reach anyone else.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
    shoot(os.getppid(), number if apart or os.getppid() != 1 else 0)
    if apart: shoot(1, number)
shoot(-1, signal.SIGKILL if apart else 0)
print("still here")
"""
    ran = box.run(source)
    assert (ran.status, ran.stdout) == ("ok", "still here\n")


def test_a_program_that_kills_its_group_kills_only_itself(box: Box) -> None:
    ran = box.run("import os, signal; os.killpg(0, signal.SIGKILL)")
    assert ran.status == "error"
    assert ran.exit_code == (-9 if box.level == "namespaces" else 1)


@pytest.mark.parametrize(
    "call",
    [
        "ctypes.CDLL(None).ptrace(16, PID, 0, 0)",
        "ctypes.CDLL(None).process_vm_readv(PID, 0, 0, 0, 0, 0)",
        "ctypes.CDLL(None).unshare(0x10000000)",
        "ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, b'')",
        "ctypes.CDLL(None).chroot(b'/tmp')",
        "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)",
        "ctypes.CDLL(None).clone(0, 0, 0x10000000, 0)",
        "ctypes.CDLL(None).syscall(425, 1, 0)",
        "ctypes.CDLL(None).syscall(100000)",
        "ctypes.CDLL(None).setpriority(2, 0, 19)",
    ],
)
def test_the_calls_of_an_attacker_fail(box: Box, call: str, bystander: subprocess.Popen[bytes]) -> None:
    assert box.run(f"import ctypes\nPID = {bystander.pid}\nprint({call})").stdout == "-1\n"


def test_a_program_cannot_become_root(box: Box) -> None:
    source = "import os\ntry: os.setuid(0)\nexcept OSError: pass\nprint(open('/proc/self/status').read())"
    ran = box.run(source)
    if box.level == "landlock":
        assert "PermissionError" in ran.stderr
        return
    status = dict(line.split(":\t", 1) for line in ran.stdout.splitlines() if ":\t" in line)
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    if box.level == "namespaces":
        assert status["Uid"].split()[0] != "0"


# Looking and writing where it should not.


def test_a_program_sees_no_file_of_ours(box: Box, secret: Path) -> None:
    assert was_stopped(box, f"open({str(secret)!r}).read()") is (box.level != "rlimits")
    assert was_stopped(box, "open('/etc/passwd').read()") is (box.level != "rlimits")
    assert was_stopped(box, "os.listdir('/home')") is (box.level != "rlimits")


def test_a_program_writes_to_no_file_of_ours(box: Box, secret: Path) -> None:
    folder = secret.parent
    folder.chmod(0o777)
    for attempt in (
        f"open({str(secret)!r}, 'a').write('x')",
        f"os.unlink({str(secret)!r})",
        f"os.rename({str(secret)!r}, {str(folder / 'moved')!r})",
        f"os.truncate({str(secret)!r}, 0)",
        f"os.mkdir({str(folder / 'new')!r})",
        f"os.symlink('/', {str(folder / 'link')!r})",
        f"os.chmod({str(secret)!r}, 0o777)",
        "open('/usr/lib/reroll-was-here', 'w')",
        "open('/reroll-was-here', 'w')",
        "open('/etc/reroll-was-here', 'w')",
        "os.chmod('/usr', 0o755)",
    ):
        assert was_stopped(box, attempt), attempt
    assert secret.read_text() == "1234"
    assert [file.name for file in folder.iterdir()] == ["secret"]


def test_a_link_out_of_the_folder_leads_nowhere(box: Box, secret: Path) -> None:
    assert was_stopped(box, f"os.symlink({str(secret)!r}, 'link')\nopen('link', 'a').write('x')")
    assert secret.read_text() == "1234"


def test_a_program_sees_none_of_our_environment(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_PASSWORD", "1234")
    assert "OUR_PASSWORD" not in box.run("import os; print(os.environ)").stdout
    probe = (
        "import glob\nfor f in glob.glob('/proc/*/environ'):\n    try: print(open(f, 'rb').read())\n    except OSError: pass"
    )
    if box.level != "rlimits":
        assert "OUR_PASSWORD" not in box.run(probe).stdout


def test_a_program_sees_no_process_of_ours(box: Box, bystander: subprocess.Popen[bytes]) -> None:
    held = box.level != "rlimits"
    assert was_stopped(box, f"open('/proc/{bystander.pid}/cmdline').read()") is held
    assert was_stopped(box, "open(f'/proc/{os.getppid()}/mem', 'r+b')")
    if box.level == "namespaces":
        assert box.run("import os; print(sorted(p for p in os.listdir('/proc') if p.isdigit()))").stdout == "['1', '2']\n"


def test_no_socket_leads_out(box: Box, tmp_path_factory: pytest.TempPathFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as internet, socket.socket(socket.AF_UNIX) as local:
        path = f"/tmp/reroll-test-{os.getpid()}-{box.level}.sock"
        local.bind(path)
        local.listen()
        os.chmod(path, 0o777)
        try:
            port = internet.getsockname()[1]
            assert was_stopped(box, f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)")
            assert was_stopped(box, f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({path!r})")
            assert was_stopped(box, "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)")
            assert was_stopped(box, "import socket\nsocket.getaddrinfo('example.org', 80)")
        finally:
            os.unlink(path)


def test_files_of_one_program_are_gone_for_the_next(box: Box) -> None:
    box.run(
        "import os\nfor folder in ('.', '/tmp', '/dev/shm'):\n    try: open(folder + '/left', 'w')\n    except OSError: pass"
    )
    ran = box.run("import os; print([f for f in ('left', '/tmp/left', '/dev/shm/left') if os.path.exists(f)])")
    assert ran.stdout == "[]\n"
    assert not Path("/tmp/left").exists()


# Forging the result.


def test_a_program_has_no_descriptor_but_its_three(box: Box) -> None:
    source = """
import os
found = []
for number in range(3, 4096):
    try:
        os.write(number, b'{"reason": "exit", "code": 0}')
        found.append(number)
    except OSError as error:
        if error.errno != 9: found.append(number)
print(found)
"""
    ran = box.run(source + "os._exit(5)")
    assert (ran.status, ran.exit_code) == ("error", 5)
    assert box.run(source).stdout == "[]\n"


def test_a_program_cannot_reach_the_descriptors_of_its_supervisor(box: Box) -> None:
    source = """
import os
for folder in (f"/proc/{os.getppid()}/fd", "/proc/1/fd"):
    for number in range(64):
        try: print(os.open(f"{folder}/{number}", os.O_RDONLY))
        except OSError: pass
"""
    assert box.run(source).stdout == ""


def test_a_program_that_closes_everything_is_still_judged(box: Box) -> None:
    ran = box.run("import os\nprint('words', flush=True)\nos.closerange(0, 4096)\nos._exit(3)")
    assert (ran.status, ran.stdout, ran.exit_code) == ("error", "words\n", 3)


def test_stdin_is_the_programs_own_copy(box: Box) -> None:
    source = "import os\nos.lseek(0, 0, 2)\ntry: os.write(0, b'more')\nexcept OSError: pass\nos.lseek(0, 3, 0)\nprint(input())"
    assert box.run(source, stdin="one\ntwo\n").status == "ok"


async def test_programs_in_parallel_places_cannot_meet() -> None:
    """Each leaves a file and looks for those of others."""
    source = "import os, time\nopen(input(), 'w')\ntime.sleep(0.3)\nprint(len(os.listdir('.')), len(os.listdir('/tmp')))"

    sandbox = open_sandbox(LocalSandboxConfig(), num_processes=2)
    try:
        if sandbox.level != "namespaces":
            pytest.skip("files in memory need namespaces")
        rans = await asyncio.gather(*(sandbox.run(Program(source=source, stdin=f"file{i}")) for i in range(4)))
    finally:
        await sandbox.close()
    assert [ran.stdout for ran in rans] == ["1 1\n"] * 4
