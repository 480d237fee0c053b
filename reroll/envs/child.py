"""The process that hosts environments: `python -m reroll.envs.child FD`. It may hang or die; its cluster starts another.

First it is told where to look for modules and which environments there are, imports them, and answers what went wrong
with each. Then it takes lists of commands and gives lists of answers, over a socket of its own: what user code prints
goes nowhere.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from reroll.envs.crew import Answer, EnvCrew
from reroll.runtime.children import follow_parent, framed, read_frames


def main() -> None:
    """Serve until the cluster closes its end of the socket."""
    follow_parent()
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)  # A program that user code starts must not keep the socket open.
    messages = read_frames(link.makefile("rb"))
    search_path, nodes, max_message_chars = next(messages)
    sys.path[:] = [*search_path, *(path for path in sys.path if path not in search_path)]
    sender = _Sender(link)
    crew = EnvCrew(nodes, sender.report, max_message_chars=max_message_chars)
    sender.send(crew.import_ahead())
    for commands in messages:
        for command in commands:
            crew.do(command)
    crew.close()
    os._exit(0)  # Threads that user code left must not hold up the end.


class _Sender:
    """Sends answers as they come; those that come while one is being sent go together in the next message."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._answers: deque[Answer] = deque()

    def send(self, message: Any) -> None:
        with suppress(OSError):  # Nobody listens any more: the end of the commands will be read soon.
            self._link.sendall(framed(message))

    def report(self, answer: Answer) -> None:
        """Called from many threads. Whoever holds the lock sends for all, and looks again after it let go."""
        self._answers.append(answer)
        while self._answers and self._lock.acquire(blocking=False):
            try:
                batch = []
                while self._answers:
                    batch.append(self._answers.popleft())
                if batch:
                    self.send(batch)
            finally:
                self._lock.release()


if __name__ == "__main__":
    main()
