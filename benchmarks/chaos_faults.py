"""What `chaos.py` does to runs: processes killed and stopped, a judge that answers nonsense."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from reroll_zoo.supervisor import SPARE

KILL, STOP, LONG_STOP, HANG, JUDGE = "kill", "stop", "long stop", "hang", "judge"
"""A process is killed, stopped for a while or for longer, or stopped for good."""
DISK, FULL, SLOW = "disk", "full", "slow"
"""A disk is filled, or slow for a while."""
LINK, NODE = "link", "node"
STOP_S = {STOP: (0.2, 3.0), LONG_STOP: (10.0, 40.0)}
"""How long a stopped process stays so. One of a model that stays so for longer than the watchdog waits counts as lost."""
JUDGE_S = 2.0
"""How long the judge misbehaves."""


class Judge:
    """A judge behind an endpoint, whose verdict on an answer is always the same; now and then it fails or talks nonsense."""

    def __init__(self, host: str = "127.0.0.1", *, takes_s: float = 0.0) -> None:
        """Listens on this machine, or on the node that the calling thread is on. `takes_s`: for each answer."""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                judge._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.trouble: Literal["", "fails", "garbage"] = ""
        self._garbled: set[int] = set()
        self._takes_s = takes_s
        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        question = zlib.crc32(json.dumps(body["messages"]).encode())
        is_garbled = self.trouble == "garbage" and question not in self._garbled
        self._garbled.add(question)  # What no reply to an answer can be made sense of is the answer's own fault: one only.
        said = "🤯 as a judge I" if is_garbled else f"Score: {question % 11}"
        message = {"role": "assistant", "content": said}
        reply = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}}
        time.sleep(self._takes_s)
        data = b"no" if self.trouble == "fails" else json.dumps(reply).encode()
        with suppress(OSError):  # Whoever asked may be gone.
            handler.send_response(500 if self.trouble == "fails" else 200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)

    def misbehave(self, rng: random.Random) -> str:
        self.trouble = rng.choice(("fails", "garbage"))
        threading.Timer(JUDGE_S, self._behave).start()
        return self.trouble

    def _behave(self) -> None:
        self.trouble = ""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def below(pid: int) -> Iterator[int]:
    """All that a process has started, and what they have."""
    try:
        children = [
            int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
        ]
    except OSError:
        return
    for child in children:
        yield child
        yield from below(child)


def role_of(pid: int, waiting: int) -> str:
    """`controller`, `spare` (the next controller), `policy`, `engine`, `reward`, `env`; of Ray's actors `actor`, if it has a
    model, else `code`; empty for others.

    `waiting` is the process that waits for the controller.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return ""
    if parent == waiting and "train" in words:
        return "spare" if name == SPARE else "controller"
    if words[0].startswith("ray::_Actor"):
        return "actor" if _has_model(pid) else "code"
    names = [word.partition("[")[0] for word in words if word.endswith("]")]
    return names[0] if "reroll.runtime.process_worker" in words and names else ""


def _has_model(pid: int) -> bool:
    """What runs a user's code, as rewards and environments do, has no torch."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def workers_of(waiting: int) -> dict[str, list[int]]:
    """The processes of a run by role."""
    found: dict[str, list[int]] = {}
    for pid in below(waiting):
        if role := role_of(pid, waiting):
            found.setdefault(role, []).append(pid)
    return found


def strike(pid: int, kind: str, rng: random.Random) -> None:
    """Kill a process, or stop it: for a while, or for good."""
    if kind == KILL:
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)
    if kind in STOP_S:
        time.sleep(rng.uniform(*STOP_S[kind]))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
