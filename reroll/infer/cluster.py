"""The engines as the controller sees them: one awaitable `generate`, however many workers there are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from reroll.errors import RerollError, WorkerDied, WorkerError
from reroll.infer.base import Finished
from reroll.infer.prefixes import PrefixIndex
from reroll.infer.worker import Abort, Command, EngineStatus, InferWorker, Report, Submit
from reroll.observe.metrics import Last, Mean, Stats, Sum
from reroll.runtime.base import Workers
from reroll.types import Completion, Request

CONCURRENCY = 4
"""Calls an InferWorker must serve at once: one waits for events, one sends, and control calls run beside them."""

_POLL_S = 1.0
"""How long a worker holds an exchange that has nothing to report."""

_MAX_IMBALANCE = 64
"""Siblings and turns stay on one worker, which has read them, until it has this many requests more than the least loaded."""

_MAX_REMEMBERED = 8192
_MAX_REMEMBERED_TOKENS = 1 << 23
"""Bounds on what the router knows of past requests."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lane:
    """What the router keeps about one worker."""

    rank: int
    outbox: list[Command] = field(default_factory=list)
    has_mail: asyncio.Event = field(default_factory=asyncio.Event)
    is_away: bool = False
    """Off its device: what it has waits, and others get what is new."""
    is_dead: bool = False
    """Its process is gone: others have what it had."""
    load: int = 0
    """Requests sent or queued whose answer is awaited."""
    has_load: asyncio.Event = field(default_factory=asyncio.Event)
    status: EngineStatus | None = None

    def post(self, command: Command) -> None:
        self.outbox.append(command)
        self.has_mail.set()


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a conversation takes place."""

    lane: _Lane
    num_opening: int
    """Tokens of the prompt that it began with: a request that begins with the same is part of it, or a sibling's."""


@dataclass(slots=True)
class _Ticket:
    """One awaited completion."""

    request: Request
    answer: asyncio.Future[Completion]
    lane: _Lane


class InferCluster:
    """Routes requests to `workers` (spawned with `concurrency=CONCURRENCY`) by load; siblings together, and a
    conversation where its last turn was.

    Each worker has one sender, which carries all commands queued since its last call, and one receiver, which waits
    for events: the number of calls follows time, not requests.

    A worker whose process dies is left out from then on, and its requests start again on the living. Seeds make them draw
    what they would have drawn, unless the weights have changed since. A worker that raises fails the cluster: the next one
    would raise too.
    """

    def __init__(self, workers: Workers[InferWorker]) -> None:
        self._workers = workers
        self._lanes = [_Lane(rank) for rank in range(workers.size)]
        self._tickets: dict[str, _Ticket] = {}
        self._homes: PrefixIndex[_Home] = PrefixIndex(max_entries=_MAX_REMEMBERED, max_tokens=_MAX_REMEMBERED_TOKENS)
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: RerollError | None = None
        self._reported: dict[int, EngineStatus] = {}

    async def generate(self, request: Request) -> Completion:
        """The completion of this request. Cancelling the call aborts the request.

        Raises ValueError if the request can never run, WorkerError if an engine raised, WorkerDied if none is left.
        """
        if self._failure is not None:
            raise self._failure
        if request.id in self._tickets:
            raise ValueError(f"request {request.id} is already in flight: ids must be unique")
        self._start_tasks()
        ticket = _Ticket(request, asyncio.get_running_loop().create_future(), self._settle(request.prompt_ids))
        self._tickets[request.id] = ticket
        self._send_off(ticket)
        try:
            return await ticket.answer
        except asyncio.CancelledError:
            ticket.lane.post(Abort(request.id))
            raise
        finally:
            del self._tickets[request.id]
            ticket.lane.load -= 1

    async def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """On return, every token is written under these weights and tagged with `version`. Requests in flight go on."""
        self._homes.clear()  # What the old weights read is of no use to the new.
        await self._outcomes(self._lanes, self._workers.each(InferWorker.load_weights, weights, version=version))

    async def pause(self, ranks: Sequence[int] | None = None) -> None:
        """On return, no engine (of these ranks) touches its device. Its requests wait; new ones go to the others."""
        await self._move(ranks, InferWorker.pause, is_away=True)

    async def resume(self, ranks: Sequence[int] | None = None) -> None:
        await self._move(ranks, InferWorker.resume, is_away=False)

    async def sleep(self, ranks: Sequence[int] | None = None) -> None:
        """Pause, and free the caches."""
        self._homes.clear()
        await self._move(ranks, InferWorker.sleep, is_away=True)

    async def wake(self, ranks: Sequence[int] | None = None) -> None:
        await self._move(ranks, InferWorker.wake, is_away=False)

    def stats(self) -> Stats:
        """What the engines did since the last call, as of their last reports."""
        num_alive = sum(not lane.is_dead for lane in self._lanes)
        stats = Stats({"engine/in_flight": Last(len(self._tickets)), "engine/alive": Last(num_alive)})
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

    async def _move(self, ranks: Sequence[int] | None, method: Callable[[InferWorker], None], *, is_away: bool) -> None:
        lanes = self._lanes if ranks is None else [self._lanes[rank] for rank in ranks]
        for lane in lanes:
            lane.is_away = is_away or lane.is_away
        await self._outcomes(lanes, [self._workers.one(lane.rank, method) for lane in lanes])
        for lane in lanes:
            lane.is_away = is_away

    async def _outcomes(self, lanes: Sequence[_Lane], calls: Sequence[Awaitable[object]]) -> None:
        """Wait for a call on each of these workers. The dead are no error while one lives."""
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for lane, outcome in zip(lanes, outcomes, strict=True):
            if isinstance(outcome, WorkerDied):
                self._lose(lane, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        if self._failure is not None:
            raise self._failure

    def _send_off(self, ticket: _Ticket) -> None:
        ticket.lane.load += 1
        ticket.lane.has_load.set()
        ticket.lane.post(Submit(ticket.request))

    def _settle(self, prompt_ids: tuple[int, ...]) -> _Lane:
        """The worker for a request: its siblings' or its last turn's if that is not overloaded, else the least loaded.

        A beginning shared with others, such as a system prompt, binds nobody: it would draw all to one worker.
        """
        idlest = min(self._lanes, key=lambda lane: (lane.is_dead, lane.is_away, lane.load))
        num_common, home = self._homes.find(prompt_ids) or (0, None)
        if home is None or num_common < home.num_opening:
            home = _Home(idlest, len(prompt_ids))
        is_gone = home.lane.is_dead or (home.lane.is_away and not idlest.is_away)
        if is_gone or home.lane.load - idlest.load > _MAX_IMBALANCE:
            home = replace(home, lane=idlest)
        self._homes.keep(prompt_ids, home)
        return home.lane

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
        """One call to a worker; False if that was the last. An error fails everyone who waits, a death no one."""
        try:
            report = await self._workers.one(lane.rank, InferWorker.exchange, commands, wait_s=wait_s)
        except WorkerDied as error:
            self._lose(lane, error)
            return False
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

    def _lose(self, lane: _Lane, error: WorkerDied) -> None:
        """Leave a dead worker out, and have others do what it was doing."""
        if lane.is_dead:
            return
        lane.is_dead = True
        if all(other.is_dead for other in self._lanes):
            self._fail(error)
            return
        moved = [ticket for ticket in self._tickets.values() if ticket.lane is lane and not ticket.answer.done()]
        log.warning(
            "engine[%d] is gone (killed, out of memory, or its node lost): the others take over its %d requests",
            lane.rank,
            len(moved),
        )
        for ticket in moved:
            lane.load -= 1
            ticket.lane = self._settle(ticket.request.prompt_ids)
            self._send_off(ticket)

    def _fail(self, error: RerollError) -> None:
        self._failure = self._failure or error
        for ticket in self._tickets.values():
            if not ticket.answer.done():
                ticket.answer.set_exception(error)


def _difference(before: EngineStatus | None, now: EngineStatus) -> Stats:
    tokens, prefill, reused = now.num_tokens, now.num_prefill_tokens, now.num_reused_tokens
    steps, busy_s = now.num_steps, now.busy_s
    if before is not None:
        tokens, prefill = tokens - before.num_tokens, prefill - before.num_prefill_tokens
        reused, steps, busy_s = reused - before.num_reused_tokens, steps - before.num_steps, busy_s - before.busy_s
    return Stats(
        {
            "engine/tokens": Sum(tokens),
            "engine/prefill_tokens": Sum(prefill),
            "engine/reused_tokens": Sum(reused),
            "engine/busy_s": Sum(busy_s),
            "engine/tokens_per_s": Sum(tokens / busy_s if busy_s else 0.0),
            "engine/occupancy": Mean(tokens / now.max_running, steps),
        }
    )
