"""The engines as the controller sees them: one awaitable `generate`, however many workers there are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from reroll.errors import RerollError, WorkerError
from reroll.infer.base import Finished
from reroll.infer.worker import Abort, Command, EngineStatus, InferWorker, Report, Submit
from reroll.observe.metrics import Last, Mean, Stats, Sum
from reroll.runtime.base import Workers
from reroll.types import Completion, Request

CONCURRENCY = 4
"""Calls an InferWorker must serve at once: one waits for events, one sends, and control calls run beside them."""

_POLL_S = 1.0
"""How long a worker holds an exchange that has nothing to report."""

_MAX_IMBALANCE = 64
"""Siblings stay on one worker, sharing their prefill, until it has this many requests more than the least loaded."""


@dataclass(slots=True)
class _Lane:
    """What the router keeps about one worker."""

    rank: int
    outbox: list[Command] = field(default_factory=list)
    has_mail: asyncio.Event = field(default_factory=asyncio.Event)
    load: int = 0
    """Requests sent or queued whose answer is awaited."""
    has_load: asyncio.Event = field(default_factory=asyncio.Event)
    status: EngineStatus | None = None

    def post(self, command: Command) -> None:
        self.outbox.append(command)
        self.has_mail.set()


@dataclass(slots=True)
class _Ticket:
    """One awaited completion."""

    answer: asyncio.Future[Completion]
    lane: _Lane


class InferCluster:
    """Routes requests to `workers` (spawned with `concurrency=CONCURRENCY`) by load, siblings together.

    Each worker has one sender, which carries all commands queued since its last call, and one receiver, which waits
    for events: the number of calls follows time, not requests. A worker that fails fails the cluster.
    """

    def __init__(self, workers: Workers[InferWorker]) -> None:
        self._workers = workers
        self._lanes = [_Lane(rank) for rank in range(workers.size)]
        self._tickets: dict[str, _Ticket] = {}
        self._homes: dict[tuple[int, ...], tuple[_Lane, int]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: RerollError | None = None
        self._reported: dict[int, EngineStatus] = {}

    async def generate(self, request: Request) -> Completion:
        """The completion of this request. Cancelling the call aborts the request.

        Raises ValueError if the request can never run, WorkerDied or WorkerError if its engine is gone.
        """
        if self._failure is not None:
            raise self._failure
        if request.id in self._tickets:
            raise ValueError(f"request {request.id} is already in flight: ids must be unique")
        self._start_tasks()
        lane = self._settle(request.prompt_ids)
        ticket = _Ticket(asyncio.get_running_loop().create_future(), lane)
        self._tickets[request.id] = ticket
        lane.load += 1
        lane.has_load.set()
        lane.post(Submit(request))
        try:
            return await ticket.answer
        except asyncio.CancelledError:
            lane.post(Abort(request.id))
            raise
        finally:
            del self._tickets[request.id]
            lane.load -= 1
            self._leave(request.prompt_ids)

    async def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """On return, every token is written under these weights and tagged with `version`. Requests in flight go on."""
        await self._workers.all(InferWorker.load_weights, weights, version=version)

    async def pause(self) -> None:
        """On return, no engine touches its device. Requests wait."""
        await self._workers.all(InferWorker.pause)

    async def resume(self) -> None:
        await self._workers.all(InferWorker.resume)

    async def sleep(self) -> None:
        """Pause, and free the caches."""
        await self._workers.all(InferWorker.sleep)

    async def wake(self) -> None:
        await self._workers.all(InferWorker.wake)

    def stats(self) -> Stats:
        """What the engines did since the last call, as of their last reports."""
        stats = Stats({"engine/in_flight": Last(len(self._tickets))})
        for lane in self._lanes:
            if lane.status is not None:
                stats += _difference(self._reported.get(lane.rank), lane.status)
                self._reported[lane.rank] = lane.status
        return stats

    async def close(self) -> None:
        """Stop the workers; whoever still waits for a completion gets WorkerError. Safe to call twice."""
        self._fail(WorkerError("the engine was closed"))
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._workers.stop()

    def _settle(self, prompt_ids: tuple[int, ...]) -> _Lane:
        """The worker for a request: its siblings' if that is not overloaded, else the least loaded."""
        idlest = min(self._lanes, key=lambda lane: lane.load)
        home, num_siblings = self._homes.get(prompt_ids, (idlest, 0))
        if home.load - idlest.load > _MAX_IMBALANCE:
            home = idlest
        self._homes[prompt_ids] = (home, num_siblings + 1)
        return home

    def _leave(self, prompt_ids: tuple[int, ...]) -> None:
        home, num_siblings = self._homes.pop(prompt_ids)
        if num_siblings > 1:
            self._homes[prompt_ids] = (home, num_siblings - 1)

    def _start_tasks(self) -> None:
        if not self._tasks:
            for lane in self._lanes:
                self._tasks += [asyncio.create_task(self._send(lane)), asyncio.create_task(self._receive(lane))]

    async def _send(self, lane: _Lane) -> None:
        while True:
            await lane.has_mail.wait()
            lane.has_mail.clear()
            commands, lane.outbox = lane.outbox, []
            if not await self._exchange(lane, commands, wait_s=0.0):
                return

    async def _receive(self, lane: _Lane) -> None:
        while True:
            if not lane.load:
                lane.has_load.clear()
                await lane.has_load.wait()
            if not await self._exchange(lane, [], wait_s=_POLL_S):
                return

    async def _exchange(self, lane: _Lane, commands: list[Command], *, wait_s: float) -> bool:
        """One call to a worker; False if it failed, which fails everyone who waits."""
        try:
            report = await self._workers.one(lane.rank, InferWorker.exchange, commands, wait_s=wait_s)
        except RerollError as error:
            self._fail(error)
            return False
        self._deliver(lane, report)
        return True

    def _deliver(self, lane: _Lane, report: Report) -> None:
        lane.status = report.status
        for event in report.events:
            ticket = self._tickets.get(event.request_id)
            if ticket is None or ticket.answer.done():  # Cancelled in the meantime.
                continue
            if isinstance(event, Finished):
                ticket.answer.set_result(event.completion)
            else:
                ticket.answer.set_exception(ValueError(event.reason))

    def _fail(self, error: RerollError) -> None:
        self._failure = self._failure or error
        for ticket in self._tickets.values():
            if not ticket.answer.done():
                ticket.answer.set_exception(error)


def _difference(before: EngineStatus | None, now: EngineStatus) -> Stats:
    tokens, prefill, steps, busy_s = now.num_tokens, now.num_prefill_tokens, now.num_steps, now.busy_s
    if before is not None:
        tokens, prefill = tokens - before.num_tokens, prefill - before.num_prefill_tokens
        steps, busy_s = steps - before.num_steps, busy_s - before.busy_s
    return Stats(
        {
            "engine/tokens": Sum(tokens),
            "engine/prefill_tokens": Sum(prefill),
            "engine/busy_s": Sum(busy_s),
            "engine/tokens_per_s": Sum(tokens / busy_s if busy_s else 0.0),
            "engine/occupancy": Mean(tokens / now.max_running, steps),
        }
    )
