"""Workers as processes of this machine, one each: an interpreter, a crash and a kill of their own, and nothing to install.

A worker's process (`process_worker.py`) is at the other end of a socket. It is a fresh interpreter; or, if it has no GPU,
what `starts.py` finds, such as a fork of a process that has imported what it needs. Calls are numbered
frames (`frames.py`); the controller reads and writes them in its event loop. The process leads a session of its own, so that
Ctrl-C reaches only the controller, and all that it starts is marked, so that whoever ends it ends that too. When the
controller is gone, its end of the socket closes, and the worker leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate

from reroll.config.host import num_visible_gpus
from reroll.config.parts import ProcessesRuntimeConfig
from reroll.errors import RerollError, WorkerDied, WorkerError
from reroll.runtime.base import A, Calls, P, Placement, Runtime, T, W, WorkerInfo, Workers
from reroll.runtime.cpu import OMP, core_watch, keep_freed_memory, torch_threads
from reroll.runtime.failures import Raised, gather_all
from reroll.runtime.frames import CannotTravel, Frame, FrameReader, Garbled, Kind, Payload, header, pack, send_some
from reroll.runtime.starts import Order, RunningProcess, start_otherwise
from reroll.runtime.subprocesses import (
    exit_reason,
    kill_group,
    kill_marked,
    marked,
    search_path,
    sheltered_from_sigterm,
    with_one_thread,
)
from reroll.runtime.watchdog import NUM_LOOKS, Waits, is_stopped

STOP_TIMEOUT_S = 5.0
"""How long a worker may take to close before its process is killed."""
LEAVE_TIMEOUT_S = 2.0
"""How long a process may live on that has closed its socket: it is on its way out, and its exit code tells why."""
GPUS = "CUDA_VISIBLE_DEVICES"

_NOTHING = Payload([pickle.dumps(None)])

log = logging.getLogger(__name__)


def make_processes(config: ProcessesRuntimeConfig) -> ProcessRuntime:
    """The runtime of a config."""
    return ProcessRuntime(watchdog_s=config.watchdog_s)


class ProcessRuntime(Runtime):
    """Runs each worker in a process of its own on this machine. Roles that name the same GPU get the same GPU."""

    def __init__(self, *, watchdog_s: float | None = None) -> None:
        super().__init__()
        self._waits = Waits(watchdog_s)
        keep_freed_memory()
        core_watch()

    @property
    def shares_memory(self) -> bool:
        return False

    @property
    def num_gpus(self) -> int:
        return num_visible_gpus()

    async def spawn(
        self, worker_class: Callable[Concatenate[WorkerInfo, P], W], placement: Placement, *args: P.args, **kwargs: P.kwargs
    ) -> Workers[W]:
        environments = [_environment(placement, devices) for devices in placement.devices_of_workers]
        module = _module_of(worker_class)
        recipe = pack((worker_class, args, kwargs), what=f"what role {placement.role} is made of")

        def start(rank: int) -> _Process:
            devices = placement.devices_of_workers[rank]
            info = WorkerInfo(placement.role, rank, len(environments), "cpu" if devices == ("cpu",) else "cuda:0")
            return _Process(info, placement, recipe, environments[rank], module=module, waits=self._waits)

        workers: ProcessWorkers[W] = ProcessWorkers(start, size=len(environments))
        return await self._once_built(workers, workers.start())


def _module_of(worker_class: Callable[..., Any]) -> str:
    """The module of ours that this class, or the nearest that it is made from, comes from. Empty if there is none."""
    classes = worker_class.__mro__ if isinstance(worker_class, type) else ()
    return next((kind.__module__ for kind in classes if kind.__module__.startswith("reroll.")), "")


class ProcessWorkers(Workers[W]):
    """Workers in processes."""

    def __init__(self, start_one: Callable[[int], _Process], *, size: int) -> None:
        """`start_one` makes the process of a rank."""
        super().__init__(size)
        self._start_one = start_one
        self._processes: list[_Process] = []

    async def start(self) -> None:
        """Start every process, and wait until all workers are built."""
        for rank in range(self.size):
            self._processes.append(self._start_one(rank))
        await gather_all([process.built for process in self._processes])

    def broadcast(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> Calls[T]:
        payload = _packed(method, args, kwargs)
        return Calls(process.call(payload, method.__qualname__) for process in self._processes)

    def scatter(self, method: Callable[[W, A], T], shards: Sequence[A]) -> Calls[T]:
        self._expect_one_each(shards)
        payloads: dict[int, Payload] = {}
        for shard in shards:
            if id(shard) not in payloads:
                payloads[id(shard)] = _packed(method, (shard,), {})
        name = method.__qualname__
        return Calls(process.call(payloads[id(shard)], name) for process, shard in zip(self._processes, shards, strict=True))

    async def one(self, rank: int, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._processes[rank].call(_packed(method, args, kwargs), method.__qualname__)
        return result

    async def _restart(self, rank: int) -> None:
        gone = self._processes[rank]
        await gone.end("was ended, to be started anew")
        if gone.is_stopped:  # All were stopped in the meantime.
            return
        self._processes[rank] = process = self._start_one(rank)
        try:
            await process.built
        except BaseException:
            await process.end("could not be started anew")
            raise

    async def stop(self, *, at_once: bool = False) -> None:
        await asyncio.gather(*(process.stop(at_once=at_once) for process in self._processes))


class _Process:
    """One worker's process as the controller sees it. Belongs to the event loop that it was made in.

    Calls may be made before the worker is built: they wait in the process, in order.
    """

    def __init__(
        self,
        info: WorkerInfo,
        placement: Placement,
        recipe: Payload,
        environment: Mapping[str, str],
        *,
        module: str,
        waits: Waits,
    ) -> None:
        """`module` is what a process that it is forked from imports first."""
        self.name = f"{info.role}[{info.rank}]"
        self._waits = waits
        self._is_watched = waits.limit_s is not None and not placement.runs_user_code  # Which has time limits of its own.
        self.is_stopped = False
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._unsent: deque[tuple[memoryview, Payload | None]] = deque()
        self._end: str | None = None
        """What became of it, once it is to end."""
        self._has_read_all = True
        """As far as it can be seen, of what it was sent."""
        self._forgotten: set[int] = set()
        """Calls that nobody waits for any more and that may be answered all the same."""
        self._ended = asyncio.Event()
        self._mark = uuid.uuid4().hex
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        self._reader = FrameReader(self._link)
        with theirs:
            self._child = self._started(theirs, environment, module, placement)
        self._loop.add_reader(self._link, self._read)
        threading.Thread(target=self._wait, name=f"end of {self.name}", daemon=True).start()
        watchdog_s = waits.limit_s if self._is_watched else None
        self._write(Kind.SETUP, 0, pack((search_path(), info, placement.concurrency, watchdog_s), what="a worker's place"))
        self.built = self._post(Kind.BUILD, recipe, "its start")
        """Resolves when the worker is there; raises what kept it from being built."""
        if self._is_watched:
            waits.stacks[self.name] = self._print_stacks
            self._look_whether_it_is_stopped()

    @property
    def _is_built(self) -> bool:
        return self.built.done() and not self.built.cancelled() and self.built.exception() is None

    def call(self, payload: Payload, what: str) -> asyncio.Future[Any]:
        """Send a call now; its result is awaited. `what`: the method's name."""
        if self.is_stopped:
            raise WorkerError(f"worker {self.name} was stopped: it takes no more calls")
        if not self._calls and not self._reader.is_at_end:
            self._read()  # What it has said of itself is no doing of this call.
        return self._post(Kind.CALL, payload, what)

    async def stop(self, *, at_once: bool) -> None:
        """Close the worker after the calls that wait now, unless at once, then end its process. Safe to call twice."""
        if self.is_stopped:
            return
        self.is_stopped = True
        if not self._is_built:  # There is nothing to close.
            await self.end("was stopped before its worker was built")
            return
        if not at_once:
            await self._close()
        await self.end("was stopped")

    async def _close(self) -> None:
        try:
            await asyncio.wait_for(self._post(Kind.CLOSE, _NOTHING, "its end"), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("worker %s is busy and did not close within %g s: killed", self.name, STOP_TIMEOUT_S)
        except WorkerDied:
            log.info("worker %s had ended before it was stopped", self.name)
        except RerollError as error:
            log.warning("worker %s failed to close: %s", self.name, error)

    async def end(self, why: str) -> None:
        """Kill it and everything that it started; whoever waits for it is told why. Harmless if it has ended."""
        self._kill(why)
        await self._ended.wait()

    def _started(
        self, theirs: socket.socket, environment: Mapping[str, str], module: str, placement: Placement
    ) -> RunningProcess:
        # -P keeps the working directory off the path until the worker's own imports are done: it may hold a `types.py`.
        command = [sys.executable, "-P", "-m", "reroll.runtime.process_worker", str(theirs.fileno()), self.name]
        is_user = placement.runs_user_code
        try:
            order = Order(self.name, module, marked(self._mark, environment), self._mark, os.getcwd(), is_user)
            forked = start_otherwise(order, theirs) if is_user or not environment[GPUS] else None
            return forked or Started([*command, *["--user-code"] * is_user], theirs, order.environment, is_silent=is_user)
        except OSError as error:
            self._link.close()
            raise RerollError(f"no process could be started for worker {self.name}: {error}") from error

    def _post(self, kind: Kind, payload: Payload, what: str) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._end is not None:
            future.set_exception(self._died(had_read=False))
            future.exception()
            return future
        number = next(self._numbers)
        self._calls[number] = future
        wait = self._waits.begin(self.name, what)
        future.add_done_callback(lambda _: self._is_over(number, wait))
        self._write(kind, number, payload)
        return future

    def _is_over(self, number: int, wait: int) -> None:
        future = self._calls.pop(number)
        self._waits.end(wait)
        if future.cancelled() and self._end is None:
            self._forgotten.add(number)
            self._write(Kind.FORGET, number, _NOTHING)
        elif not future.cancelled():
            future.exception()  # Whoever waited may be gone: an error that nobody reads is no bug.

    def _write(self, kind: Kind, number: int, payload: Payload) -> None:
        start = header(kind, number, payload)
        if payload.inline is None:
            self._unsent.append((memoryview(start), payload))
        else:
            self._unsent.append((memoryview(start + payload.inline), None))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        """Send what the socket takes; the rest when it takes more."""
        try:
            while self._unsent:
                data, payload = self._unsent[0]
                num_sent = send_some(self._link, data, payload.descriptor if payload is not None else None)
                if num_sent < len(data):
                    self._unsent[0] = (data[num_sent:], None)
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._link, self._flush)
            return
        except OSError:
            self._has_read_all = False
            self._unsent.clear()  # Nobody reads any more: the end of the process is near, and tells whoever waits.
        self._loop.remove_writer(self._link)

    def _read(self) -> bool:
        """Take what has come. Whether there may be more."""
        try:
            for frame in self._reader.read():
                self._deliver(frame)
        except BlockingIOError:
            return False
        except Garbled as error:
            self._kill(f"sent what is no message ({error}) and was killed")
            self._reader.is_at_end = True
        except OSError as error:
            if isinstance(error, ConnectionResetError):  # The kernel's word for bytes that the other side left unread.
                self._has_read_all = False
            self._reader.is_at_end = True
        if self._reader.is_at_end:
            self._loop.remove_reader(self._link)
            self._loop.call_later(LEAVE_TIMEOUT_S, self._kill, "closed its connection and was killed")
        return not self._reader.is_at_end

    def _deliver(self, frame: Frame) -> None:
        future = self._calls.get(frame.number)
        if future is None or future.done():
            if frame.number not in self._forgotten and not (future is not None and future.cancelled()):
                raise Garbled(f"an answer to call {frame.number}, which waits for none")
            self._forgotten.discard(frame.number)
            return
        try:
            outcome = frame.value()
        except Exception as error:  # Whatever the pickles of user code raise.
            problem = f"an answer of worker {self.name} cannot be read here: {type(error).__name__}: {error}"
            future.set_exception(CannotTravel(f"{problem}. Give back what can be pickled and read by this process"))
            return
        if isinstance(outcome, Raised):
            future.set_exception(outcome.as_error())
        else:
            future.set_result(outcome)

    def _kill(self, why: str) -> None:
        """The thread that waits for its end does the rest."""
        if self._end is None:
            self._end = why
        self._child.kill()

    def _wait(self) -> None:
        """In a thread: wait for the end of the process, and end what it has left behind."""
        self._child.wait()
        kill_marked(self._mark)
        with suppress(RuntimeError):  # The loop is closed: nobody waits.
            self._loop.call_soon_threadsafe(self._gone)

    def _look_whether_it_is_stopped(self, num_times: int = 0) -> None:
        """Again and again: one that a signal has stopped, while somebody waits for it, is ended when the limit is over."""
        assert self._waits.limit_s is not None
        if self._end is not None:
            return
        num_times = num_times + 1 if self._calls and self._child.pid and is_stopped(self._child.pid) else 0
        if num_times < NUM_LOOKS:
            self._loop.call_later(self._waits.limit_s / NUM_LOOKS, self._look_whether_it_is_stopped, num_times)
            return
        self._waits.tell(self.name)
        self._kill(f"was stopped by a signal, and did not go on within {self._waits.limit_s:g} s")

    def _print_stacks(self) -> None:
        if self._end is None:
            self._write(Kind.STACKS, 0, _NOTHING)

    def _gone(self) -> None:
        """It has ended: hear its last words, then tell whoever waits."""
        while not self._reader.is_at_end and self._read():
            pass
        self._waits.stacks.pop(self.name, None)
        code = self._child.returncode
        assert code is not None, "whose end is told has ended"
        if self._end is None and self._is_watched and self._waits.has_hung(self.name, code):
            self._waits.tell(self.name)
            self._end = f"hung in {self._waits.of(self.name)}, printed its stacks and ended itself"
        if self._end is None:
            self._end = f"died{exit_reason(code)}"
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(self._died(had_read=self._has_read_all))
        self._loop.remove_reader(self._link)
        self._loop.remove_writer(self._link)
        self._unsent.clear()
        self._reader.close()
        self._link.close()
        self._ended.set()

    def _died(self, *, had_read: bool) -> WorkerDied:
        assert self._end is not None
        remedy = "Free memory or ask for less of it if it was killed, then go on from the last checkpoint with --resume."
        return WorkerDied(f"worker {self.name} is gone: its process {self._end}. {remedy}", how=self._end, had_read=had_read)


class Started:
    """A process of a fresh interpreter, and its session. Safe to use from several threads."""

    def __init__(self, command: list[str], link: socket.socket, environment: Mapping[str, str], *, is_silent: bool) -> None:
        self._reaping = threading.Lock()
        with sheltered_from_sigterm():
            self._process = subprocess.Popen(
                command,
                pass_fds=[link.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if is_silent else 2,  # What workers print is no output of the run's.
                stderr=subprocess.DEVNULL if is_silent else None,
                start_new_session=True,
                env=environment,
            )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        """It and its session. Harmless if it has ended."""
        with self._reaping:
            if self._process.returncode is None:
                kill_group(self.pid)

    def wait(self) -> int:
        """Until it has ended; its session is ended then. Returns the exit code, or minus the signal."""
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:  # Until it is reaped nobody else gets its number.
            kill_group(self.pid)
            return self._process.wait()


def _packed(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Payload:
    return pack((method.__name__, args, kwargs), what=f"an argument of {method.__qualname__}")


def _environment(placement: Placement, devices: Sequence[str]) -> dict[str, str]:
    """What a worker's process is told: its GPUs, which it sees as its own from 0, and its share of the cores."""
    if placement.runs_user_code:
        return with_one_thread()  # It sees what the controller sees: a reward of the user's may hold a model of its own.
    visible = os.environ.get(GPUS)
    names = [str(index) for index in range(num_visible_gpus())] if visible is None else visible.split(",")[: num_visible_gpus()]
    gpus = [device for device in devices if device != "cpu"]
    if missing := [gpu for gpu in gpus if int(gpu) >= len(names)]:
        raise RerollError(
            f"role {placement.role} names GPU {', '.join(missing)}, but this process sees {len(names) or 'none'}: name others, "
            f"or show it more ({GPUS})"
        )
    threads = torch_threads(os.environ.get(OMP), num_workers=len(placement.devices_of_workers))
    return {**os.environ, **threads, GPUS: ",".join(names[int(gpu)] for gpu in gpus)}
