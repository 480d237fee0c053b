"""The engines as the controller sees them: one awaitable `generate`, however many workers there are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from reroll.errors import RerollError, WorkerDied, WorkerError
from reroll.infer.base import Finished
from reroll.infer.lane import Home, Lane, Ticket, work_between
from reroll.infer.prefixes import PrefixIndex
from reroll.infer.worker import Abort, Command, EngineStatus, InferWorker, Report, Submit
from reroll.observe.metrics import Last, Stats
from reroll.runtime.base import Workers
from reroll.types import Completion, Request
from reroll.weights.parcel import Channel, Parcel, Place, Seat

T = TypeVar("T")
A = TypeVar("A")

CONCURRENCY = 4
"""Calls an InferWorker must serve at once: one waits for events, one sends, and control calls run beside them."""

MAX_REVIVALS = 5
"""How often one worker is started anew in a run, in vain or not, before it is left out for good."""

REVIVAL_PAUSE_S = 5.0
"""Before each try: the cluster needs a moment to know that a node is lost, or to get another."""

_POLL_S = 1.0
"""How long a worker holds an exchange that has nothing to report."""

_MAX_IMBALANCE = 64
"""Siblings and turns stay on one worker, which has read them, until it has this many requests more than the least loaded."""

_MAX_REMEMBERED = 8192
_MAX_REMEMBERED_TOKENS = 1 << 23
"""Bounds on what the router knows of past requests."""

log = logging.getLogger(__name__)


class InferCluster:
    """Routes requests to `workers` (spawned with `concurrency=CONCURRENCY`) by load; siblings together, and a
    conversation where its last turn was.

    Each worker has one sender, which carries all commands queued since its last call, and one receiver, which waits
    for events: the number of calls follows time, not requests.

    When a worker's process dies, its requests start again on the living. Seeds make them draw what they would have drawn,
    unless the weights have changed since. The worker is started anew where there is room, and serves again from the next
    push on. When the last one dies the cluster fails. A worker that raises fails it too: the next one would raise as well.
    """

    def __init__(self, workers: Workers[InferWorker]) -> None:
        self._workers = workers
        self._lanes = [Lane(rank) for rank in range(workers.size)]
        self._tickets: dict[str, Ticket] = {}
        self._homes: PrefixIndex[Home] = PrefixIndex(max_entries=_MAX_REMEMBERED, max_tokens=_MAX_REMEMBERED_TOKENS)
        self._revivals: set[asyncio.Task[None]] = set()
        self._num_tries = [0] * workers.size
        self._has_pushed_weights = False
        self._all_receivers: list[Lane] = []
        self._has_group = False
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
        ticket = Ticket(request, asyncio.get_running_loop().create_future(), self._settle(request.prompt_ids))
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

    async def load_weights(self, weights: Mapping[str, Tensor], *, version: int, adopt: bool = True) -> None:
        """On return, every token is written under these weights and tagged with `version`. Requests in flight go on.

        `adopt`: engines of this process may keep the tensors themselves, because nobody writes to them while they step.
        """
        self._homes.clear()  # What the old weights read is of no use to the new.
        lanes = list(self._lanes)
        await self._outcomes(lanes, self._workers.each(InferWorker.load_weights, weights, version=version, adopt=adopt))
        self._welcome(lanes)

    async def places(self) -> dict[int, Place]:
        """Where each living worker is, by rank. Those who tell are the receivers of the weights that come next."""
        lanes = [lane for lane in self._lanes if not lane.is_dead]
        told = await self._outcomes(lanes, [self._workers.one(lane.rank, InferWorker.place) for lane in lanes])
        self._all_receivers = [lane for lane in lanes if lane.rank in told]
        return told

    async def open_inbox(self, channel: Channel, *, seats: Mapping[int, Seat]) -> None:
        """Receive weights through this channel from now on; `seats` are the workers' in its group, if it has one."""
        lanes = self._receivers
        channels = [replace(channel, seat=seats.get(lane.rank)) for lane in lanes]
        self._has_group = bool(seats)
        await self._outcomes(lanes, self._dealt(lanes, InferWorker.open_inbox, channels))

    async def take_weights(self, parcels: Mapping[int, Parcel]) -> None:
        """Give each receiver that lives its parcel, by rank. It writes nothing from the first parcel of a version to the last.

        After that, every token is written under these weights and tagged with their version. Requests in flight go on.
        """
        if all(parcel.index == 0 for parcel in parcels.values()):
            self._homes.clear()  # What the old weights read is of no use to the new.
        lanes = self._receivers
        calls = self._dealt(lanes, InferWorker.take_weights, [parcels[lane.rank] for lane in lanes])
        tasks = [asyncio.ensure_future(call) for call in calls]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if self._has_group and any(task.exception() for task in done):
            # The other members, and the sender, wait for the one that failed: they are freed.
            await self._outcomes(lanes, [self._workers.one(lane.rank, InferWorker.close_inbox) for lane in lanes])
        await self._outcomes(lanes, tasks)
        if all(parcel.is_last for parcel in parcels.values()):
            self._welcome(lanes)

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
        num_alive = sum(lane.is_serving for lane in self._lanes)
        stats = Stats({"engine/in_flight": Last(len(self._tickets)), "engine/alive": Last(num_alive)})
        for lane in self._lanes:
            if lane.status is not None:
                stats += work_between(self._reported.get(lane.rank), lane.status)
                self._reported[lane.rank] = lane.status
        return stats

    async def close(self) -> None:
        """Stop the workers; whoever still waits for a completion gets WorkerError. Safe to call twice."""
        self._fail(WorkerError("the engine was closed"))
        tasks = [*self._revivals, *(task for lane in self._lanes for task in lane.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._workers.stop()

    async def _move(self, ranks: Sequence[int] | None, method: Callable[[InferWorker], None], *, is_away: bool) -> None:
        ranks = range(len(self._lanes)) if ranks is None else ranks
        for rank in ranks:
            self._lanes[rank].is_away = is_away or self._lanes[rank].is_away
        for rank in ranks:
            async with self._lanes[rank].is_starting:  # What starts on a device cannot be sent away from it before it has.
                pass
        lanes = [self._lanes[rank] for rank in ranks]
        await self._outcomes(lanes, [self._workers.one(lane.rank, method) for lane in lanes])
        for lane in lanes:
            lane.is_away = is_away

    def _welcome(self, lanes: Sequence[Lane]) -> None:
        """These lanes were part of a whole push: whoever lives has the policy's weights."""
        self._has_pushed_weights = True
        for lane in lanes:
            lane.needs_weights = False

    @property
    def _receivers(self) -> list[Lane]:
        """Who gets weights now. One that starts anew in the middle of a push waits for the next."""
        return [lane for lane in self._all_receivers if not lane.is_dead]

    def _dealt(self, lanes: Sequence[Lane], method: Callable[[InferWorker, A], T], shards: Sequence[A]) -> list[Awaitable[T]]:
        """A shard to each of these workers. To all of them it is dealt: then what they share is sent once."""
        if len(lanes) == self._workers.size:
            return self._workers.deal(method, shards)
        return [self._workers.one(lane.rank, method, shard) for lane, shard in zip(lanes, shards, strict=True)]

    async def _outcomes(self, lanes: Sequence[Lane], calls: Sequence[Awaitable[T]]) -> dict[int, T]:
        """Wait for a call on each of these workers; the answers by rank. The dead are no error while one lives."""
        answers: dict[int, T] = {}
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for lane, outcome in zip(lanes, outcomes, strict=True):
            if isinstance(outcome, WorkerDied):
                self._lose(lane, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers[lane.rank] = outcome
        if self._failure is not None:
            raise self._failure
        return answers

    def _send_off(self, ticket: Ticket) -> None:
        ticket.lane.load += 1
        ticket.lane.has_load.set()
        ticket.lane.post(Submit(ticket.request))

    def _settle(self, prompt_ids: tuple[int, ...]) -> Lane:
        """The worker for a request: its siblings' or its last turn's if that is not overloaded, else the least loaded.

        A beginning shared with others, such as a system prompt, binds nobody: it would draw all to one worker.
        """
        idlest = min(self._lanes, key=lambda lane: (not lane.is_serving, lane.is_away, lane.load))
        num_common, home = self._homes.find(prompt_ids) or (0, None)
        if home is None or num_common < home.num_opening:
            home = Home(idlest, len(prompt_ids))
        is_gone = home.lane.is_dead or (home.lane.is_away and not idlest.is_away)
        if is_gone or home.lane.load - idlest.load > _MAX_IMBALANCE:
            home = replace(home, lane=idlest)
        self._homes.keep(prompt_ids, home)
        return home.lane

    def _start_tasks(self) -> None:
        for lane in self._lanes:
            if not lane.tasks:
                lane.tasks = [asyncio.create_task(self._send(lane)), asyncio.create_task(self._receive(lane))]

    async def _send(self, lane: Lane) -> None:
        while True:
            await lane.has_mail.wait()
            lane.has_mail.clear()
            commands, lane.outbox = lane.outbox, []
            if not await self._exchange(lane, commands, wait_s=0.0):
                return

    async def _receive(self, lane: Lane) -> None:
        while True:
            if not lane.load:
                lane.has_load.clear()
                await lane.has_load.wait()
            if not await self._exchange(lane, [], wait_s=_POLL_S):
                return

    async def _exchange(self, lane: Lane, commands: list[Command], *, wait_s: float) -> bool:
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

    def _deliver(self, lane: Lane, report: Report) -> None:
        lane.status = report.status
        for event in report.events:
            ticket = self._tickets.get(event.request_id)
            if ticket is None or ticket.answer.done():  # Cancelled in the meantime.
                continue
            if isinstance(event, Finished):
                ticket.answer.set_result(event.completion)
            else:
                ticket.answer.set_exception(ValueError(event.reason))

    def _lose(self, lane: Lane, error: WorkerDied) -> None:
        """Leave a dead worker out, and have others do what it was doing."""
        if lane.is_dead:
            return
        lane.is_dead = True
        if not any(other.is_serving for other in self._lanes):
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
        revival = asyncio.create_task(self._regain(lane))
        self._revivals.add(revival)
        revival.add_done_callback(self._revivals.discard)

    async def _regain(self, lane: Lane) -> None:
        """Start a dead worker anew, and put a lane to it in the place of the old one."""
        while self._num_tries[lane.rank] < MAX_REVIVALS:
            await asyncio.sleep(REVIVAL_PAUSE_S)
            async with lane.is_starting:
                if lane.is_away:  # Its device is another role's now.
                    continue
                self._num_tries[lane.rank] += 1
                try:
                    await self._workers.revive(lane.rank)
                except RerollError as error:
                    log.warning("engine[%d] could not be started anew: %s", lane.rank, error)
                    continue
                self._reopen(lane)
                return
        log.warning("engine[%d] is left out from now on: it was started anew %d times", lane.rank, MAX_REVIVALS)

    def _reopen(self, gone: Lane) -> None:
        fresh = Lane(gone.rank, is_away=gone.is_away, needs_weights=self._has_pushed_weights)
        for task in gone.tasks:
            task.cancel()
        self._lanes[gone.rank] = fresh
        self._reported.pop(gone.rank, None)
        since = "with the next push of weights" if fresh.needs_weights else "at once"
        log.warning("engine[%d] was started anew: it serves again %s", gone.rank, since)

    def _fail(self, error: RerollError) -> None:
        self._failure = self._failure or error
        for ticket in self._tickets.values():
            if not ticket.answer.done():
                ticket.answer.set_exception(error)
