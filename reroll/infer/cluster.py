"""The router: one awaitable `generate` in the controller, for any number of engine workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from operator import attrgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reroll.errors import RerollError, WorkerDied, WorkerError
from reroll.infer.base import Finished
from reroll.infer.prefixes import PrefixIndex
from reroll.infer.worker import Abort, Command, EngineReport, EngineStatus, InferWorker, Submit
from reroll.infer.worker_state import Affinity, OnTokens, PendingRequest, WorkerState, work_between
from reroll.observe.metrics import Last, Stats
from reroll.runtime.base import Workers
from reroll.types import Completion, Request, TokenBlock
from reroll.weights.buckets import Bucket, Channel, GroupRank, ProcessLocation

T = TypeVar("T")
A = TypeVar("A")

CONCURRENCY = 4
"""Calls an InferWorker must serve at once: one waits for events, one sends, and control calls run beside them."""

MAX_RESTARTS = 5
"""How often a worker is restarted in a run, successfully or not, before it is left out for good."""

RESTART_PAUSE_S = 5.0
"""Before each restart: the cluster needs time to notice a lost node, or to get another."""

JOIN_PAUSE_S = 5.0
"""Between two attempts to add engines."""

_POLL_S = 1.0
"""How long a worker waits for events before it answers an exchange (long poll)."""

_MAX_IMBALANCE = 64
"""Siblings and later turns go to the worker that has cached their prefix, unless its load exceeds the lowest by more."""

_MAX_REMEMBERED = 8192
_MAX_REMEMBERED_TOKENS = 1 << 23
"""Bounds on the prefixes of past requests that the router remembers."""

_STANDING = attrgetter("is_dead", "needs_weights", "is_away", "load")

log = logging.getLogger(__name__)


def _ignore(ids: NDArray[np.uint32], logprobs: NDArray[np.float64], version: int) -> None:
    """The default of `generate`: tokens are only wanted with the completion."""


class InferCluster:
    """Routes requests to `workers` (spawned with `concurrency=CONCURRENCY`) by load. Siblings go to the same worker, and later
    turns of a conversation to the worker of the last turn.

    For each worker one task sends all commands queued since its last call, and one task waits for events: the number of calls
    depends on time, not on the number of requests.

    When a worker's process dies, other workers continue its requests from the last reported token; they draw the same tokens,
    unless the weights have changed since. The worker is restarted where there is room, and serves again after the next push.
    The cluster fails when its last worker dies. It also fails when a worker raises: another worker would raise the same.

    With `max_workers`, engines join during the run where the runtime finds room, and serve after the next push. A joined
    engine that dies is removed; another may join later.
    """

    def __init__(self, workers: Workers[InferWorker], *, max_workers: int = 0) -> None:
        """`max_workers`: the number of engines up to which others may join; 0: none join."""
        self._workers, self._max_workers = workers, max_workers
        self._joining: asyncio.Task[None] | None = None
        self._states = [WorkerState(rank) for rank in range(workers.size)]
        self._loads: list[tuple[int, int]] = []
        """A heap of loads and ranks: of each worker that is ready its load now, and some that it had."""
        self._pending: dict[str, PendingRequest] = {}
        self._affinities: PrefixIndex[Affinity] = PrefixIndex(max_entries=_MAX_REMEMBERED, max_tokens=_MAX_REMEMBERED_TOKENS)
        self._restarts: set[asyncio.Task[None]] = set()
        self._num_tries = [0] * workers.size  # Restarts of the initial workers.
        self._has_pushed_weights = False
        self._all_receivers: list[WorkerState] = []
        self._has_group = False
        self._failure: RerollError | None = None
        self._reported: dict[int, EngineStatus] = {}

    async def generate(self, request: Request, on_tokens: OnTokens = _ignore) -> Completion:
        """The completion of this request. Cancelling the call aborts the request.

        `on_tokens` is called with tokens as they are generated; the last ones may come with the completion only.
        Raises ValueError if the request can never run, WorkerError if an engine raised, WorkerDied if none is left.
        """
        if self._failure is not None:
            raise self._failure
        if request.id in self._pending:
            raise ValueError(f"request {request.id} is already in flight: ids must be unique")
        if not self._states[0].tasks:
            self._start_tasks()
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        pending = PendingRequest(request, answer, self._route(request.prompt_ids), on_tokens)
        self._pending[request.id] = pending
        self._dispatch(pending)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            pending.worker.post(Abort(request.id))
            raise
        finally:
            del self._pending[request.id]
            self._add_load(pending.worker, -1)

    async def load_weights(self, weights: Mapping[str, Tensor], *, version: int, adopt: bool = True) -> None:
        """From the return on, all new tokens come from these weights and carry `version`. Requests in flight continue.

        `adopt`: engines in this process may keep the tensors themselves, because nothing writes to them while they step.
        """
        self._affinities.clear()  # What is cached under the old weights is of no use to the new.
        workers = list(self._states)
        await self._outcomes(workers, self._workers.broadcast(InferWorker.load_weights, weights, version=version, adopt=adopt))
        self._mark_fresh(workers)

    async def locations(self) -> dict[int, ProcessLocation]:
        """The location of each living worker, by rank. The workers that answer take part in later pushes."""
        workers = [worker for worker in self._states if not worker.is_dead]
        located = await self._outcomes(workers, [self._workers.one(worker.rank, InferWorker.location) for worker in workers])
        self._all_receivers = [worker for worker in workers if worker.rank in located]
        return located

    async def open_receiver(self, channel: Channel, *, group_ranks: Mapping[int, GroupRank]) -> None:
        """Receive weights through this channel from now on. `group_ranks`: the workers' ranks in its process group, if any."""
        workers = self._receivers
        channels = [replace(channel, group_rank=group_ranks.get(worker.rank)) for worker in workers]
        self._has_group = bool(group_ranks)
        await self._outcomes(workers, self._scatter(workers, InferWorker.open_receiver, channels))

    async def take_weights(self, buckets: Mapping[int, Sequence[Bucket]]) -> None:
        """Give each living receiver the pieces of its bucket, by rank. Engines do not step from the first to the last bucket of
        a version.

        After the last one, all new tokens come from these weights and are tagged with their version. Requests in flight
        continue.
        """
        if all(pieces[0].index == 0 for pieces in buckets.values()):
            self._affinities.clear()  # What is cached under the old weights is of no use to the new.
        workers = self._receivers
        calls = self._scatter(workers, InferWorker.take_weights, [buckets[worker.rank] for worker in workers])
        tasks = [asyncio.ensure_future(call) for call in calls]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if self._has_group and any(task.exception() for task in done):
            # The other members and the sender wait for the one that failed: closing the group releases them.
            await self._outcomes(workers, [self._workers.one(worker.rank, InferWorker.close_receiver) for worker in workers])
        await self._outcomes(workers, tasks)
        if all(pieces[0].is_last for pieces in buckets.values()):
            self._mark_fresh(workers)

    async def pause(self, ranks: Sequence[int] | None = None) -> None:
        """Pause the engines (of these ranks): on return they do not touch their devices. New requests go to the others."""
        await self._move(ranks, InferWorker.pause, is_away=True)

    async def resume(self, ranks: Sequence[int] | None = None) -> None:
        await self._move(ranks, InferWorker.resume, is_away=False)

    async def sleep(self, ranks: Sequence[int] | None = None) -> None:
        """Pause, and free the caches."""
        self._affinities.clear()
        await self._move(ranks, InferWorker.sleep, is_away=True)

    async def wake(self, ranks: Sequence[int] | None = None) -> None:
        await self._move(ranks, InferWorker.wake, is_away=False)

    @property
    def states(self) -> Sequence[WorkerState]:
        """What is known of each engine now."""
        return self._states

    def stats(self) -> Stats:
        """Metrics of the engines since the last call, as of their last reports."""
        num_alive = sum(worker.is_serving for worker in self._states)
        stats = Stats({"engine/in_flight": Last(len(self._pending)), "engine/alive": Last(num_alive)})
        for worker in self._states:
            if worker.status is not None:
                stats += work_between(self._reported.get(worker.rank), worker.status)
                self._reported[worker.rank] = worker.status
        return stats

    async def close(self) -> None:
        """Stop the workers. Pending `generate` calls raise WorkerError. Safe to call twice."""
        self._fail(WorkerError("the engine was closed"))
        joining = [self._joining] if self._joining else []
        tasks = [*self._restarts, *joining, *(task for worker in self._states for task in worker.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._workers.stop()

    async def _move(self, ranks: Sequence[int] | None, method: Callable[[InferWorker], None], *, is_away: bool) -> None:
        ranks = range(len(self._states)) if ranks is None else ranks
        for rank in ranks:
            self._states[rank].is_away = is_away or self._states[rank].is_away
        for rank in ranks:
            async with self._states[rank].is_starting:  # A worker must have started before it can leave its device.
                pass
        workers = [self._states[rank] for rank in ranks]
        await self._outcomes(workers, [self._workers.one(worker.rank, method) for worker in workers])
        for worker in workers:
            worker.is_away = is_away
        self._note_loads()

    def _mark_fresh(self, workers: Sequence[WorkerState]) -> None:
        """Record that these workers have taken part in a complete push, and hold the policy's weights."""
        self._has_pushed_weights = True
        for worker in workers:
            worker.needs_weights = False
        self._note_loads()

    @property
    def _receivers(self) -> list[WorkerState]:
        """The living workers of this push. A worker that restarts during a push waits for the next."""
        return [worker for worker in self._all_receivers if not worker.is_dead]

    def _scatter(
        self, workers: Sequence[WorkerState], method: Callable[[InferWorker, A], T], shards: Sequence[A]
    ) -> Sequence[Awaitable[T]]:
        """Send each of these workers its shard. If they are all workers, the runtime sends what the shards share once."""
        if len(workers) == self._workers.size:
            return self._workers.scatter(method, shards)
        return [self._workers.one(worker.rank, method, shard) for worker, shard in zip(workers, shards, strict=True)]

    async def _outcomes(self, workers: Sequence[WorkerState], calls: Sequence[Awaitable[T]]) -> dict[int, T]:
        """Wait for a call on each of these workers; returns the results by rank. A death is no error while a worker lives."""
        answers: dict[int, T] = {}
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for worker, outcome in zip(workers, outcomes, strict=True):
            if isinstance(outcome, WorkerDied):
                self._on_death(worker, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers[worker.rank] = outcome
        if self._failure is not None:
            raise self._failure
        return answers

    def _add_load(self, worker: WorkerState, change: int) -> None:
        worker.load += change
        heappush(self._loads, (worker.load, worker.rank))
        if len(self._loads) > 64 * len(self._states):
            self._note_loads()

    def _note_loads(self) -> None:
        """Call when a worker has become ready."""
        self._loads = sorted((worker.load, worker.rank) for worker in self._states if worker.is_ready)

    def _least_loaded(self) -> WorkerState:
        while self._loads:
            load, rank = self._loads[0]
            if self._states[rank].load == load and self._states[rank].is_ready:
                return self._states[rank]
            heappop(self._loads)
        return min(self._states, key=_STANDING)

    def _dispatch(self, pending: PendingRequest) -> None:
        self._add_load(pending.worker, 1)
        pending.worker.has_load.set()
        request = pending.rest()
        pending.worker.post(Submit(request, pending.worker.pictures_for(request)))

    def _route(self, prompt_ids: tuple[int, ...]) -> WorkerState:
        """The worker for a request: that of its siblings or its last turn if not overloaded, else the least loaded.

        A prefix shared by many prompts, such as a system prompt, does not count: it would send every request to one worker.
        """
        least_loaded = self._least_loaded()
        num_common, known = self._affinities.find(prompt_ids) or (0, None)
        affinity = known
        if affinity is None or num_common < affinity.num_opening:
            affinity = Affinity(least_loaded, len(prompt_ids))
        is_gone = affinity.worker.is_dead or (affinity.worker.is_away and not least_loaded.is_away)
        if is_gone or affinity.worker.load - least_loaded.load > _MAX_IMBALANCE:
            affinity = replace(affinity, worker=least_loaded)
        if affinity is not known or num_common < len(prompt_ids):
            self._affinities.keep(prompt_ids, affinity)
        return affinity.worker

    def _start_tasks(self) -> None:
        self._note_loads()
        if self._max_workers > len(self._states) and self._joining is None:
            self._joining = asyncio.create_task(self._join_loop())
        for worker in self._states:
            if not worker.tasks:
                worker.tasks = [asyncio.create_task(self._send_loop(worker)), asyncio.create_task(self._receive_loop(worker))]

    async def _send_loop(self, worker: WorkerState) -> None:
        while True:
            await worker.has_queued.wait()
            worker.has_queued.clear()
            commands, worker.queued = worker.queued, []
            if not await self._exchange(worker, commands, wait_s=0.0):
                return

    async def _receive_loop(self, worker: WorkerState) -> None:
        while True:
            if not worker.load:
                worker.has_load.clear()
                await worker.has_load.wait()
            if not await self._exchange(worker, [], wait_s=_POLL_S):
                return

    async def _exchange(self, worker: WorkerState, commands: list[Command], *, wait_s: float) -> bool:
        """One call to a worker; False if it was the last one. An error fails all pending requests; a death fails none."""
        try:
            report = await self._workers.one(worker.rank, InferWorker.exchange, commands, wait_s=wait_s)
        except WorkerDied as error:
            self._on_death(worker, error)
            return False
        except RerollError as error:
            self._fail(error)
            return False
        self._deliver(worker, report)
        return True

    def _deliver(self, worker: WorkerState, report: EngineReport) -> None:
        worker.status = report.status
        for event in report.events:
            if isinstance(event, TokenBlock):
                self._deliver_tokens(worker, event)
                continue
            pending = self._pending.get(event.request_id)
            if pending is None or pending.answer.done():  # Cancelled in the meantime.
                continue
            if isinstance(event, Finished):
                pending.answer.set_result(event.completion)
            else:
                pending.answer.set_exception(ValueError(event.reason))

    def _deliver_tokens(self, worker: WorkerState, block: TokenBlock) -> None:
        end = 0
        for id, start, count, version in zip(block.request_ids, block.starts, block.counts, block.versions, strict=True):
            begin, end = end, end + count
            pending = self._pending.get(id)
            if pending is not None and pending.worker is worker:
                pending.add(start, block.token_ids[begin:end], block.logprobs[begin:end], version)

    def _on_death(self, worker: WorkerState, error: WorkerDied) -> None:
        """Stop routing to a dead worker, move its requests to the others, and start its restart."""
        if worker.is_dead:
            return
        worker.is_dead = True
        worker.pictures.clear()
        if not any(other.is_serving for other in self._states):
            self._fail(error)
            return
        moved = [pending for pending in self._pending.values() if pending.worker is worker and not pending.answer.done()]
        log.warning(
            "engine[%d] is gone (killed, out of memory, or its node lost): the others take over its %d requests with %d tokens",
            worker.rank,
            len(moved),
            sum(pending.partial.num_tokens for pending in moved),
        )
        for pending in moved:
            self._add_load(worker, -1)
            pending.worker = self._route(pending.request.prompt_ids)
            self._dispatch(pending)
        restart = asyncio.create_task(self._let_go(worker) if worker.has_joined else self._restart(worker))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    async def _restart(self, worker: WorkerState) -> None:
        """Restart a dead worker, and give it a new state."""
        while self._num_tries[worker.rank] < MAX_RESTARTS:
            await asyncio.sleep(RESTART_PAUSE_S)
            async with worker.is_starting:
                if worker.is_away:  # Another role uses its device now.
                    continue
                self._num_tries[worker.rank] += 1
                try:
                    await self._workers.restart(worker.rank)
                except RerollError as error:
                    log.warning("engine[%d] could not be started anew: %s", worker.rank, error)
                    continue
                self._rejoin(worker)
                return
        log.warning("engine[%d] is left out from now on: it was started anew %d times", worker.rank, MAX_RESTARTS)

    def _rejoin(self, gone: WorkerState) -> None:
        fresh = WorkerState(gone.rank, is_away=gone.is_away, needs_weights=self._has_pushed_weights)
        for task in gone.tasks:
            task.cancel()
        self._states[gone.rank] = fresh
        self._start_tasks()
        self._reported.pop(gone.rank, None)
        since = "with the next push of weights" if fresh.needs_weights else "at once"
        log.warning("engine[%d] was started anew: it serves again %s", gone.rank, since)

    async def _join_loop(self) -> None:
        """Add engines where there is room, until too many in a row could not be started."""
        num_in_vain = 0
        while num_in_vain < MAX_RESTARTS:
            await asyncio.sleep(JOIN_PAUSE_S)
            num_here = sum(not (worker.is_dead and worker.has_joined) for worker in self._states)
            try:
                outcomes = await self._workers.join(self._max_workers - num_here)
            except RerollError as error:
                log.warning("engines could not join: %s", error)
                num_in_vain += 1
                continue
            for outcome in outcomes:
                self._on_joined(outcome)
                num_in_vain = 0 if outcome is None else num_in_vain + 1
        log.warning("no more engines join: %d in a row could not be started", num_in_vain)

    def _on_joined(self, error: RerollError | None) -> None:
        """Record that the next rank has joined, or the error that kept it from joining."""
        worker = WorkerState(
            len(self._states), has_joined=True, is_dead=error is not None, needs_weights=self._has_pushed_weights
        )
        self._states.append(worker)
        if error is not None:
            log.warning("engine[%d] could not join: %s", worker.rank, error)
            return
        self._start_tasks()
        since = "with the next push of weights" if worker.needs_weights else "at once"
        log.warning("engine[%d] has joined: it serves %s", worker.rank, since)

    async def _let_go(self, worker: WorkerState) -> None:
        for task in worker.tasks:
            task.cancel()
        await self._workers.leave(worker.rank)

    def _fail(self, error: RerollError) -> None:
        self._failure = self._failure or error
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)
