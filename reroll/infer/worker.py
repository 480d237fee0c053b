"""The worker that owns an engine: one thread steps it, other threads leave commands in a queue that it reads between steps."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from reroll.config.parts import EngineConfig, LoraConfig
from reroll.config.registry import load_entry
from reroll.errors import WorkerError
from reroll.infer.base import Engine, Finished
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import DTYPES, Precision, load_model, load_tokenizer
from reroll.models.routing import can_be_noted
from reroll.runtime.base import WorkerInfo
from reroll.runtime.cpu import release_helper_threads
from reroll.runtime.watchdog import at_work, beat
from reroll.tokens.pictures import receive_pictures
from reroll.types import Request, TokenBlock
from reroll.weights.buckets import Bucket, Channel, ProcessLocation, WeightReceiver, location_of

T = TypeVar("T")

REPORT_EVERY = 64
"""Steps, so also tokens of a request, between two reports of what is being written."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Start this request."""

    request: Request
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """Those in its prompt that this worker was not sent before."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End this request now."""

    request_id: str


Command = Submit | Abort


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that can never run, and why. The engine is fine."""

    request_id: str
    reason: str


EngineEvent = Finished | Failed | TokenBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Totals since the worker started."""

    num_tokens: int
    num_prefill_tokens: int
    num_reused_tokens: int
    num_steps: int
    busy_s: float
    """Time spent in steps."""
    num_unfinished: int
    max_running: int
    num_gave_way: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What happened since the last exchange, in order."""

    events: tuple[EngineEvent, ...]
    status: EngineStatus


class InferWorker:
    """Owns an engine and the daemon thread that steps it. Methods may be called from several threads at once."""

    def __init__(
        self,
        info: WorkerInfo,
        *,
        model: str,
        precision: Precision,
        max_running: int,
        report_every: int = REPORT_EVERY,
        lora: LoraConfig | None = None,
        cache_gib: float | None = None,
        draft: Literal["off", "auto", "always"] = "off",
        external: EngineConfig | None = None,
        reads_again: bool = False,
        exact: bool = False,
        train_vision: bool = False,
        notes_routes: bool | None = False,
    ) -> None:
        """After every `report_every` steps it tells what was written for requests that have not ended. `cache_gib`: what the
        embedded engine may hold in its cache; `draft`: as in its config. `notes_routes`: whether it
        tells to which experts tokens went; None: if it can. `external`: that engine, with these settings; None is
        the embedded one."""
        self._device = torch.device(info.device)
        engine: Engine
        if external is not None:
            opened: Any = external.implementation()
            engine = opened.open(model, external, precision=precision, device=info.device, lora=lora)
        else:
            drafter, pace = (None, None) if draft == "off" else load_entry("reroll.drafts", "drafter")(always=draft == "always")
            policy = load_model(
                model, dtype=DTYPES[precision], device=info.device, lora=lora, exact=exact, train_vision=train_vision
            )
            engine = EmbeddedEngine(
                policy,
                load_tokenizer(model),
                max_running=max_running,
                cache_bytes=None if cache_gib is None else int(cache_gib * 2**30),
                reads_again=reads_again,
                drafter=drafter,
                pace=pace,
                notes_routes=can_be_noted(policy) if notes_routes is None else notes_routes,
                quantize=load_entry("reroll.precisions", precision),
            )
        self._start(engine, max_running=max_running, report_every=report_every)

    def _start(self, engine: Engine, *, max_running: int, report_every: int = REPORT_EVERY) -> None:
        self._engine = engine
        self._max_running = max_running
        self._report_every = report_every
        self._num_untold_steps = 0
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._events: list[EngineEvent] = []
        self._paused = False
        self._receiver: WeightReceiver | None = None
        self._has_partial_weights = False
        """Weights of two versions are mixed: no step before a whole push."""
        self._waiting_weights: dict[str, Tensor] = {}
        self._closed = False
        self._failure: str | None = None
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def exchange(self, commands: Sequence[Command], *, wait_s: float) -> EngineReport:
        """Deliver commands, then wait up to `wait_s` for events. Each event is handed out once."""
        with self._changed:
            self._commands.extend(commands)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._events or self._failure or self._closed, wait_s)
            self._raise_if_down()
            events, self._events = tuple(self._events), []
            return EngineReport(events, self._status())

    def load_weights(self, weights: Mapping[str, Tensor], *, version: int, adopt: bool = True) -> None:
        """Between two steps, use these weights; requests in flight go on under them.

        `adopt`: the engine may keep the tensors themselves, because nobody writes to them while it steps.
        """
        self._call(lambda: self._load(weights, version=version, adopt=adopt))

    def location(self) -> ProcessLocation:
        """Where this process is: whose memory it can see."""
        return location_of(self._device)

    def open_receiver(self, channel: Channel) -> None:
        """From now on weights are received through this channel. What an earlier one left unfinished is void."""
        self.close_receiver()
        self._receiver = WeightReceiver(channel, device=self._device)

    def close_receiver(self) -> None:
        """Leave the channel, if there is one; who waits in it, in this process or another, fails."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def take_weights(self, pieces: Sequence[Bucket]) -> None:
        """Take the next bucket, of which several senders may have a piece each. From the first of a version to the last the
        engine holds a mix, and does not step.

        Raises PushBroken, and stays as it is, if it is not the next one.
        """
        self._call(lambda: self._take(pieces))

    def pause(self) -> None:
        """Stop stepping; returns when the step under way is over. Requests wait."""
        self._call(lambda: self._set_paused(True))

    def resume(self) -> None:
        self._call(lambda: self._set_paused(False))

    def sleep(self) -> None:
        """Pause and free the cache; requests in flight are kept and go on after `wake`."""
        self.pause()
        self._call(self._engine.sleep)

    def wake(self) -> None:
        self._call(self._engine.wake)
        self.resume()

    def stats(self) -> EngineStatus:
        return self._call(self._status)

    def close(self) -> None:
        """Stop the thread after the step under way, and close the engine. Safe to call twice."""
        with self._changed:
            was_closed, self._closed = self._closed, True
            self._changed.notify_all()
        self._thread.join()
        if not was_closed:
            self._engine.close()

    def _call(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine's thread between two steps, and wait for it. Its exception is the caller's."""
        future: Future[T] = Future()
        with self._changed:
            self._raise_if_down()
            self._calls.append((work, future))
            self._changed.notify_all()
        return future.result()

    def _raise_if_down(self) -> None:
        if self._failure:
            raise WorkerError(f"the engine stopped on an error:\n{self._failure}")
        if self._closed:
            raise WorkerError("the engine is closed")

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _load(self, weights: Mapping[str, Tensor], *, version: int, adopt: bool = True) -> None:
        if self._engine.adopts_weights and not adopt:
            weights = self._engine.load_part(weights)
        self._engine.load_weights(weights, version=version)
        self._has_partial_weights = False

    def _take(self, pieces: Sequence[Bucket]) -> None:
        receiver, bucket = self._open_receiver, pieces[0]
        if bucket.index == 0:
            self._has_partial_weights, self._waiting_weights = True, {}
        self._waiting_weights |= self._engine.load_part(receiver.open(*pieces))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # The sender may fill the same memory again.
        if bucket.is_last:
            weights, self._waiting_weights = self._waiting_weights, {}
            self._load(weights, version=bucket.version)
            receiver.confirm()

    @property
    def _open_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise ValueError("there is no channel to receive weights through: call open_receiver first")
        return self._receiver

    def _status(self) -> EngineStatus:
        counts = self._engine.counts
        return EngineStatus(
            num_tokens=counts.num_tokens,
            num_prefill_tokens=counts.num_prefill_tokens,
            num_reused_tokens=counts.num_reused_tokens,
            num_steps=counts.num_steps,
            busy_s=self._busy_s,
            num_unfinished=self._engine.num_unfinished,
            max_running=self._max_running,
            num_gave_way=counts.num_gave_way,
            num_drafted=counts.num_drafted,
            num_accepted=counts.num_accepted,
        )

    def _run(self) -> None:
        """The engine's thread. Whatever goes wrong here reaches every caller, now and later."""
        try:
            if self._device.type == "cuda":  # Which is each thread's own, and kernels are launched on it.
                torch.cuda.set_device(self._device)
            while self._iterate():
                pass
        except BaseException:
            with self._changed:
                self._failure = traceback.format_exc()
        with self._changed:
            self._changed.notify_all()
            calls, self._calls = self._calls, []
        for _, future in calls:
            future.set_exception(WorkerError(f"the engine stopped:\n{self._failure or 'it was closed'}"))

    def _iterate(self) -> bool:
        """Take in what arrived, then step once. False when closed."""
        if not self._can_step():
            release_helper_threads()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._commands or self._calls or self._can_step())
            if self._closed:
                return False
            commands, self._commands = self._commands, []
            calls, self._calls = self._calls, []
        events: list[EngineEvent] = [failed for command in commands if (failed := self._apply(command))]
        with at_work():
            for work, future in calls:
                _fulfil(work, future)
                beat()
            if self._can_step():
                started = time.perf_counter()
                events += self._engine.step()
                self._busy_s += time.perf_counter() - started
                self._num_untold_steps += 1
        if self._num_untold_steps and (self._paused or self._num_untold_steps >= self._report_every):
            self._num_untold_steps = 0
            if (block := self._engine.new_tokens()) is not None:
                events.append(block)
        if events:
            with self._changed:
                self._events += events
                self._changed.notify_all()
        return True

    def _can_step(self) -> bool:
        return not self._paused and not self._has_partial_weights and self._engine.num_unfinished > 0

    def _apply(self, command: Command) -> Failed | None:
        match command:
            case Abort(request_id):
                self._engine.abort(request_id)
            case Submit(request, pictures):
                receive_pictures(pictures)
                try:
                    self._engine.submit(request)
                except ValueError as error:
                    return Failed(request.id, str(error))
        return None


def _fulfil(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
