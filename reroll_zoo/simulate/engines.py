"""Modelled engines behind the production router: continuous batching whose token rate depends on how many sequences run."""

from __future__ import annotations

import asyncio
import functools
import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from reroll.errors import RerollError, WorkerDied, WorkerError
from reroll.infer.base import Finished
from reroll.infer.worker import Abort, Command, EngineEvent, EngineReport, EngineStatus, InferWorker, Submit
from reroll.runtime.base import Workers
from reroll.types import Completion, FinishReason, Request, TokenBlock
from reroll_zoo.simulate.clock import VirtualLoop
from reroll_zoo.simulate.cores import Cores
from reroll_zoo.simulate.workload import Workload

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """What an engine can do."""

    decode_s: Callable[[int], float]
    """Seconds of a step in which so many sequences each get one token."""
    prefill_s: float = 0.0
    """Seconds for each token of context that is read."""
    max_running: int = 64
    report_every: int = 64
    """Steps between two reports of what is being written."""
    tokens_per_mark: int = 1
    """The controller carries one token for so many: long samples would fill memory, and only their number matters."""
    load_s: float = 0.0
    """Seconds in which new weights arrive and nothing is written."""
    move_s: float = 0.0
    """Seconds to leave a device or to come back to it."""
    restart_s: float = 30.0
    """Seconds until a lost engine is up again."""

    def num_marks(self, num_tokens: float) -> int:
        return int(num_tokens // self.tokens_per_mark)


@dataclass(slots=True, eq=False)
class _SimulatedSequence:
    request: Request
    num_tokens: int
    """That it will have."""
    num_before: int
    """Tokens that were written before it came here."""
    starts_at: float = 0.0
    """The engine's progress when it began to run."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    num_told: int = 0
    """Marks that the controller knows of."""
    is_over: bool = False

    def written(self, progress: float) -> float:
        return min(self.num_before + progress - self.starts_at, self.num_tokens)


def _own_time(method: Callable[Concatenate[ModelledEngine, P], T]) -> Callable[Concatenate[ModelledEngine, P], T]:
    """What this takes of a core is the model's: a real engine has a process for it."""

    @functools.wraps(method)
    def timed(engine: ModelledEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        began_s = time.thread_time()
        try:
            return method(engine, *args, **kwargs)
        finally:
            spent_s = time.thread_time() - began_s
            engine.cpu_s += spent_s
            engine.loop.exempt(spent_s)

    return timed


class ModelledEngine:
    """One engine. `progress` counts steps; between two events the number that runs, and so the time of a step, is constant."""

    def __init__(self, model: EngineModel, workload: Workload, cores: Cores | None) -> None:
        self._model, self._workload, self._cores = model, workload, cores
        self.loop = cast(VirtualLoop, asyncio.get_running_loop())
        self._waiting: deque[_SimulatedSequence] = deque()
        self._by_id: dict[str, _SimulatedSequence] = {}
        self._running: dict[str, _SimulatedSequence] = {}
        self._heap: list[tuple[float, int, _SimulatedSequence]] = []
        self._serial = 0
        self._progress = self._next_report = 0.0
        self._read_left_s = 0.0
        """Seconds of reading that come before the next token."""
        self._since_s = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._stops = 0
        self._events: list[EngineEvent] = []
        self._has_events = asyncio.Event()
        self._version = 0
        self._known_prompts: set[tuple[int, ...]] = set()
        self._known_samples: set[str] = set()
        """Of which a turn was read under the weights of now."""
        self.written: Counter[str] = Counter()
        """Tokens written here, by sample."""
        self.num_tokens = self.num_prefill_tokens = self.num_steps = 0.0
        self.busy_s = 0.0
        self.cpu_s = 0.0
        """Of this process, for the model itself."""
        self.is_dead = False
        if cores is not None:
            cores.listeners.append(self._changed)

    async def exchange(self, commands: list[Command], *, wait_s: float) -> EngineReport:
        if commands:
            self._obey(commands)
        if wait_s:  # An exchange that has nothing to report would only be asked for again.
            await self._has_events.wait()
        if self.is_dead:
            raise WorkerDied("the simulated engine was lost")
        return self._report()

    @_own_time
    def _obey(self, commands: list[Command]) -> None:
        self._advance()
        for command in commands:
            self._submit(command.request) if isinstance(command, Submit) else self._abort(command)
        self._schedule()

    @_own_time
    def _report(self) -> EngineReport:
        self._has_events.clear()
        events, self._events = tuple(self._events), []
        status = EngineStatus(
            num_tokens=int(self.num_tokens),
            num_prefill_tokens=int(self.num_prefill_tokens),
            num_reused_tokens=0,
            num_steps=int(self.num_steps),
            busy_s=self.busy_s,
            num_unfinished=len(self._by_id),
            max_running=self._model.max_running,
        )
        return EngineReport(events, status)

    async def load_weights(self, weights: object, *, version: int, adopt: bool = True) -> None:
        await self._still(self._model.load_s)
        self._advance()
        for sequence in self._running.values():
            self._note_version(sequence)
        self._version = version
        self._known_prompts.clear()
        self._known_samples.clear()
        self._release()

    async def pause(self) -> None:
        await self._still(self._model.move_s)
        self._tell()

    async def resume(self) -> None:
        if self._model.move_s:
            await asyncio.sleep(self._model.move_s)
        self._advance()
        self._release()

    def die(self) -> None:
        """The process is gone, with all that it did not tell."""
        self._advance()
        self.is_dead = True
        self._stops += 1
        if self._timer is not None:
            self._timer.cancel()
        if self._cores is not None:
            self._cores.set_busy(self, False)
            self._cores.listeners.remove(self._changed)
        self._has_events.set()

    def settle(self) -> None:
        """Count what was written until now."""
        self._advance()
        for sequence in self._running.values():
            self._count(sequence)
        self._schedule()

    async def _still(self, seconds: float) -> None:
        self._advance()
        self._stops += 1
        self._schedule()
        if seconds:
            await asyncio.sleep(seconds)

    def _release(self) -> None:
        self._stops -= 1
        self._schedule()

    def _changed(self) -> None:
        """Another has begun or ceased to use the cores."""
        self._advance()
        self._schedule()

    @property
    def _speed(self) -> float:
        return self._cores.speed if self._cores is not None else 1.0

    def _is_stepping(self) -> bool:
        return bool(self._running) and not self._stops

    def _advance(self) -> None:
        """Bring progress up to this moment."""
        now_s = self.loop.time()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if not self._is_stepping() or passed_s <= 0:
            return
        self.busy_s += passed_s
        work_s = passed_s * self._last_speed
        read_s = min(work_s, self._read_left_s)
        self._read_left_s -= read_s
        steps = (work_s - read_s) / self._step_s
        self._progress += steps
        self.num_steps += steps
        self.num_tokens += steps * len(self._running)

    def _schedule(self) -> None:
        """Let what waits run, and wake up for the next end or report."""
        if self.is_dead:
            return
        if not self._stops:
            self._admit()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        is_stepping = self._is_stepping()
        if self._cores is not None:
            self._cores.set_busy(self, is_stepping)
        if not is_stepping:
            return
        self._last_speed = self._speed
        self._step_s = max(self._model.decode_s(len(self._running)), 1e-12)
        while self._heap[0][2].is_over:
            heapq.heappop(self._heap)
        steps = max(0.0, min(self._heap[0][0], self._next_report) - self._progress)
        delay_s = (self._read_left_s + steps * self._step_s) / self._last_speed
        self._timer = self.loop.call_later(delay_s, self._on_timer)

    _last_speed = 1.0
    _step_s = 1.0

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._model.max_running:
            sequence = self._waiting.popleft()
            if sequence.is_over:
                continue
            if not self._running:
                self._next_report = self._progress + self._model.report_every
            sequence.starts_at = self._progress
            self._running[sequence.request.id] = sequence
            self._serial += 1
            end = self._progress + sequence.num_tokens - sequence.num_before
            heapq.heappush(self._heap, (end, self._serial, sequence))
            self._read(sequence)

    def _read(self, sequence: _SimulatedSequence) -> None:
        """Its context; what a sibling or the turn before has read under the same weights is not read again."""
        ids = sequence.request.prompt_ids
        sample, turn = _place_of(sequence.request.id)
        num_tokens = float(sequence.num_before)
        if ids not in self._known_prompts:
            is_going_on = turn > 0 and sample in self._known_samples
            num_tokens += self._workload.reply_tokens if is_going_on else self._workload.context_tokens(turn)
        self._known_prompts.add(ids)
        self._known_samples.add(sample)
        self.num_prefill_tokens += num_tokens
        self._read_left_s += num_tokens * self._model.prefill_s

    @_own_time
    def _on_timer(self) -> None:
        self._timer = None
        self._advance()
        ended = False
        while self._heap and (self._heap[0][2].is_over or self._heap[0][0] <= self._progress + 1e-6):
            _, _, sequence = heapq.heappop(self._heap)
            if not sequence.is_over:
                self._finish(sequence, FinishReason.STOP)
                ended = True
        if self._progress >= self._next_report - 1e-6:
            self._next_report = self._progress + self._model.report_every
            self._tell()
        if ended:
            self._has_events.set()
        self._schedule()

    def _submit(self, request: Request) -> None:
        num_before = len(request.written.token_ids) * self._model.tokens_per_mark
        num_tokens = self._workload.num_tokens(request.sampling.seed, number_of(request.prompt_ids))
        sequence = _SimulatedSequence(request, num_tokens, min(num_before, num_tokens - 1))
        sequence.versions = list(request.written.versions)
        sequence.num_told = len(request.written.token_ids)
        self._by_id[request.id] = sequence
        self._waiting.append(sequence)

    def _abort(self, command: Abort) -> None:
        sequence = self._by_id.get(command.request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)
            self._has_events.set()

    def _count(self, sequence: _SimulatedSequence) -> int:
        """How much it has now; what is new is counted."""
        num_tokens = round(sequence.written(self._progress)) if sequence.request.id in self._running else sequence.num_before
        self.written[_place_of(sequence.request.id)[0]] += num_tokens - sequence.num_before
        sequence.num_before, sequence.starts_at = num_tokens, self._progress
        return num_tokens

    def _note_version(self, sequence: _SimulatedSequence, num_marks: int | None = None) -> None:
        """What is written since the last note was written under the weights of now."""
        if num_marks is None:
            num_marks = self._model.num_marks(sequence.written(self._progress))
        num_new = num_marks - sum(num for _, num in sequence.versions)
        if num_new <= 0:
            return
        if sequence.versions and sequence.versions[-1][0] == self._version:
            sequence.versions[-1] = (self._version, sequence.versions[-1][1] + num_new)
        else:
            sequence.versions.append((self._version, num_new))

    def _finish(self, sequence: _SimulatedSequence, reason: FinishReason) -> None:
        num_tokens = self._count(sequence)
        sequence.is_over = True
        num_marks = self._model.num_marks(num_tokens)
        if reason is FinishReason.STOP:
            num_marks = max(1, num_marks, sequence.num_told)
            reason = FinishReason.LENGTH if num_tokens >= self._workload.max_tokens else reason
        self._note_version(sequence, num_marks)
        self._running.pop(sequence.request.id, None)
        del self._by_id[sequence.request.id]
        num_marks = sum(num for _, num in sequence.versions)
        completion = Completion(
            token_ids=(1,) * num_marks,
            logprobs=(-1.0,) * num_marks,
            finish_reason=reason,
            versions=tuple(sequence.versions),
        )
        self._events.append(Finished(sequence.request.id, completion))

    def _tell(self) -> None:
        """What is written of those that run and was not told."""
        rows: list[tuple[str, int, int, int]] = []
        for id, sequence in self._running.items():
            self._note_version(sequence)
            start = 0
            for version, num in sequence.versions:
                first = max(start, sequence.num_told)
                if start + num > first:
                    rows.append((id, first, start + num - first, version))
                start += num
            sequence.num_told = max(sequence.num_told, start)
        if not rows:
            return
        ids, starts, counts, versions = zip(*rows, strict=True)
        total = sum(counts)
        tokens, logprobs = np.ones(total, dtype=np.uint32), np.full(total, -1.0)
        self._events.append(
            TokenBlock(request_ids=ids, starts=starts, counts=counts, versions=versions, token_ids=tokens, logprobs=logprobs)
        )
        self._has_events.set()


def marked(number: int) -> int:
    """The first token of the prompt of this number; 0 and 1 are the stop token and any other."""
    return number + 2


def number_of(prompt_ids: Sequence[int]) -> int:
    """The reverse of `marked`."""
    return prompt_ids[0] - 2


def _place_of(request_id: str) -> tuple[str, int]:
    """`GROUP.INDEX` and TURN of `GROUP.INDEX.TURN#SERIAL`."""
    sample, _, turn = request_id.partition("#")[0].rpartition(".")
    return sample, int(turn)


class ModelledWorkers(Workers[InferWorker]):
    """Stands where a runtime's engine workers do: the router calls it as it calls them."""

    def __init__(self, size: int, model: EngineModel, workload: Workload, cores: Cores | None = None) -> None:
        super().__init__(size)
        self._model, self._workload, self._cores = model, workload, cores
        self.engines = [self._make() for _ in range(size)]
        self.gone: list[ModelledEngine] = []
        self.num_places = 0
        """For engines that may join."""

    def _make(self) -> ModelledEngine:
        return ModelledEngine(self._model, self._workload, self._cores)

    async def one(  # A modelled worker answers in this very loop.
        self, rank: int, method: Callable[Concatenate[InferWorker, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        engine = self.engines[rank]
        if engine.is_dead:
            raise WorkerDied(f"engine {rank} was lost")
        name = {"sleep": "pause", "wake": "resume"}.get(method.__name__, method.__name__)
        call: Callable[..., Any] = getattr(engine, name)
        return await call(*args, **kwargs)

    async def _restart(self, rank: int) -> None:
        await asyncio.sleep(self._model.restart_s)
        if not self.engines[rank].is_dead:
            raise WorkerError(f"engine {rank} is alive")
        self.gone.append(self.engines[rank])
        self.engines[rank] = self._make()

    async def join(self, at_most: int) -> list[RerollError | None]:
        num = min(at_most, self.num_places)
        self.num_places -= num
        await asyncio.sleep(self._model.restart_s if num else 0.0)
        self.engines += [self._make() for _ in range(num)]
        self._num_lives += [1] * num
        self.size += num
        return [None] * num

    async def leave(self, rank: int) -> None:
        self.num_places += 1

    async def stop(self, *, at_once: bool = False) -> None:
        return None

    @property
    def all_engines(self) -> list[ModelledEngine]:
        return [*self.engines, *self.gone]

    def written(self) -> Counter[str]:
        """Tokens written so far, by sample."""
        total: Counter[str] = Counter()
        for engine in self.all_engines:
            engine.settle() if not engine.is_dead else None
            total.update(engine.written)
        return total
