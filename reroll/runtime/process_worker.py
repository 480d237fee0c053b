"""The process of one worker: `python -m reroll.runtime.process_worker FD NAME [--user-code]`. Its controller: `processes.py`.

It speaks over a socket of its own, which no process that the worker starts gets hold of, and leaves, with all that it
started, when the controller closes its end. What the worker prints goes to the controller's standard error.
"""

from __future__ import annotations

import gc
import io
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reroll.runtime.base import WorkerInfo
from reroll.runtime.cpu import core_watch, keep_freed_memory
from reroll.runtime.failures import Raised, guarded
from reroll.runtime.frames import CannotTravel, Frame, FrameReader, Garbled, Kind, pack, send
from reroll.runtime.subprocesses import end_with_all_it_started, follow_parent, outlive_sigterm
from reroll.runtime.watchdog import end_if_it_hangs, print_stacks, print_stacks_when_asked


def main() -> None:
    """Of a fresh interpreter."""
    serve_at(int(sys.argv[1]), runs_user_code="--user-code" in sys.argv)


def serve_at(descriptor: int, *, runs_user_code: bool) -> None:
    """Be a worker's process: serve at this socket until the controller is gone."""
    os.set_inheritable(descriptor, False)  # A program that the worker starts does not get it.
    follow_parent()
    outlive_sigterm()
    print_stacks_when_asked()
    if not runs_user_code:  # Which may have a limit of memory, and computes little.
        keep_freed_memory()
        core_watch()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # A kill must not swallow what was printed.
    WorkerProcess(socket.socket(fileno=descriptor)).serve()


class WorkerProcess:
    """Reads calls on a thread of its own, so that the end of the controller is seen while the worker computes.

    The worker is built, and its calls are run, on the main thread; if it serves several at once, on others too.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._waiting: dict[int, Frame] = {}
        """Calls that have not begun, by number."""
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._info = WorkerInfo("worker", 0, 1, "cpu")
        self._concurrency = 1
        self._worker: Any = None
        os.register_at_fork(after_in_child=self._let_go)
        threading.Thread(target=self._read, name="calls", daemon=True).start()

    def serve(self) -> None:
        """Run calls in the order in which they came. Never returns."""
        while True:
            number = self._numbers.get()
            frame = self._waiting.pop(number, None)
            if frame is not None:  # Else nobody waits for it any more.
                self._answer(number, self._outcome(frame))
            del frame  # An idle thread must not keep the last call's tensors alive.

    def _read(self) -> None:
        reader = FrameReader(self._link)
        try:
            while not reader.is_at_end:
                for frame in reader.read():
                    self._take(frame)
        except (OSError, Garbled) as error:
            print(f"worker {self._info.role}[{self._info.rank}] lost its controller: {error}", file=sys.stderr)
        finally:
            end_with_all_it_started()

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.SETUP:
                search_path, self._info, self._concurrency, watchdog_s = frame.value()
                sys.path[:] = [*search_path, *(path for path in sys.path if path not in search_path)]
                end_if_it_hangs(watchdog_s)
            case Kind.STACKS:
                print_stacks()
            case Kind.FORGET:
                self._waiting.pop(frame.number, None)
            case _:
                self._waiting[frame.number] = frame
                self._numbers.put(frame.number)

    def _outcome(self, frame: Frame) -> Any:
        match frame.kind:
            case Kind.BUILD:
                return self._guarded(lambda: self._build(frame))
            case Kind.CLOSE:
                return self._guarded(getattr(self._worker, "close", lambda: None))
        return self._guarded(lambda: self._call(frame))

    def _build(self, frame: Frame) -> None:
        worker_class, args, kwargs = _value(frame)
        self._worker = worker_class(self._info, *args, **kwargs)
        gc.freeze()  # As `gc_frozen` does for the controller: what is there now stays.
        for index in range(1, self._concurrency):
            threading.Thread(target=self.serve, name=f"calls {index}", daemon=True).start()

    def _call(self, frame: Frame) -> Any:
        method_name, args, kwargs = _value(frame)
        return getattr(self._worker, method_name)(*args, **kwargs)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        return guarded(call, role=self._info.role, rank=self._info.rank)

    def _answer(self, number: int, outcome: Any) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # A fork of the worker's that came back here: the original answers.
        payload = self._guarded(lambda: pack(outcome, what="an answer"))
        if isinstance(payload, Raised):
            payload = pack(payload, what="an error")
        with self._sending, suppress(OSError):  # Nobody listens any more: the reading thread knows too.
            send(self._link, Kind.ANSWER, number, payload)

    def _let_go(self) -> None:
        """In a process that the worker forks: the socket is not its own."""
        if (descriptor := self._link.detach()) >= 0:  # A fork of a fork has let go of it already.
            os.close(descriptor)


def _value(frame: Frame) -> Any:
    try:
        return frame.value()
    except Exception as error:  # Whatever the pickles of user code raise.
        raise CannotTravel(
            f"what was sent cannot be read in the worker's process ({type(error).__name__}: {error}): modules that it names "
            "must be found there too, installed or beside the config"
        ) from error


if __name__ == "__main__":
    main()
