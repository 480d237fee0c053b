"""A head that is gone, or stopped, ends the run: by itself, or from beside it where it is inside Ray."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from reroll_zoo.ray.head_watch import answers


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Takes connections, as the system does for a process that is stopped, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_head_that_is_stopped_does_not_answer(listener: socket.socket) -> None:
    assert not answers(address_of(listener), timeout_s=0.2)


def test_a_head_that_is_gone_does_not_answer(listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    assert not answers(address, timeout_s=60)


@pytest.mark.parametrize("said", [b"\0\0\0\4", b""], ids=["speaks", "hangs-up"])
def test_a_head_that_says_anything_or_hangs_up_is_alive(listener: socket.socket, said: bytes) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(said)

    serving = threading.Thread(target=serve)
    serving.start()
    assert answers(address_of(listener), timeout_s=60)
    serving.join()


RUN = """
import asyncio, sys, time
from reroll_zoo.ray import head_watch
from reroll_zoo.ray.head_watch import HeadLost, HeadWatch

head_watch.PROBE_EVERY_S, head_watch.PROBE_TIMEOUT_S, head_watch.LEAVE_S = 0.05, 0.1, float(sys.argv[3])

async def main(address, how):
    watch = HeadWatch(address, on_exit=lambda: print("all that it started is ended"), lost_after_s=0.3)
    if how == "inside Ray":
        time.sleep(600)
    try:
        await watch.unless_lost(asyncio.sleep(600))
    except HeadLost as error:
        print(error)
    try:
        await watch.unless_lost(asyncio.sleep(600))
    except HeadLost:
        watch.close()

asyncio.run(main(*sys.argv[1:3]))
"""


def run(address: str, how: str, *, leave_s: float) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", RUN, address, how, str(leave_s)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_calls_of_a_run_whose_head_is_lost_raise_and_the_process_ends_without_rays_farewell(listener: socket.socket) -> None:
    done = run(address_of(listener), "outside", leave_s=100.0)
    assert done.returncode == 1
    said, ended = done.stdout.splitlines()
    assert "has not answered for 0.3 s" in said
    assert "--resume" in said
    assert ended == "all that it started is ended"


def test_a_run_that_is_stuck_inside_ray_is_ended_from_beside_it_and_told_why(listener: socket.socket) -> None:
    done = run(address_of(listener), "inside Ray", leave_s=0.2)
    assert done.returncode == 1
    assert "has not answered for 0.3 s" in done.stderr
    assert done.stdout == "all that it started is ended\n"
