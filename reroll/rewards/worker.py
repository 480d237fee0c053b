"""Where rewards run that may hang, crash or eat memory, and how the controller reaches them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reroll.config.reward_base import InProcess
from reroll.config.rewards import RewardWorkersConfig
from reroll.errors import RewardError, RewardLost, WorkerDied
from reroll.rewards.base import raised
from reroll.rewards.meter import RewardMeter
from reroll.rewards.pool import Case, ProcessPool
from reroll.rewards.slots import FairSlots
from reroll.runtime.base import Placement, Runtime, WorkerInfo, Workers
from reroll.runtime.devices import num_usable_cores
from reroll.types import Prompt, Score, Trajectory

log = logging.getLogger(__name__)

TOGETHER_S = 0.01
"""Samples that wait for the same reward are judged in one call if they take no longer than this together: for quick rewards
the calls take longer than the judging."""
MAX_LOSSES = 3
"""How often a sample that was not judged, because its judge was lost, is given to another."""
_NEWEST = 0.1
"""Weight of the newest call in what a sample is thought to take."""


class RewardWorker:
    """A pool of processes. Serves as many calls at once as it may have processes."""

    def __init__(
        self,
        info: WorkerInfo,
        rewards: Mapping[str, InProcess],
        *,
        num_processes: int,
        max_processes: int,
        search_path: Sequence[str],
    ) -> None:
        self._pool = ProcessPool(rewards, num_processes=num_processes, max_processes=max_processes, search_path=search_path)

    def score(self, name: str, cases: Sequence[Case]) -> list[Score | RewardError]:
        """For each case a finite score, or the reason for anything else, a hang or a crash included.

        At least the first is judged. Once that has taken long, the others are left: another may be free to judge them.
        """
        return self._pool.score(name, cases, together_s=TOGETHER_S)

    def problems(self) -> dict[str, str]:
        """Rewards that cannot be made, by name, and why."""
        return self._pool.problems()

    def close(self) -> None:
        self._pool.close()


@dataclass(slots=True, eq=False)
class _Waiting:
    """A case and who waits for its verdict."""

    case: Case
    verdict: asyncio.Future[Score]
    since_s: float
    num_losses: int = 0
    """How often its judge was lost."""

    @property
    def domain(self) -> str:
        prompt, _ = self.case
        return prompt.domain

    def is_wanted(self) -> bool:
        return not self.verdict.done()

    def tell(self, verdict: Score | RewardError) -> None:
        if self.verdict.done():  # Nobody waits any more.
            return
        if isinstance(verdict, Score):
            self.verdict.set_result(verdict)
        else:
            self.verdict.set_exception(verdict)


class RewardWorkers:
    """All workers as one. Every entry of the config has a process that no other can take, and shares the rest fairly.

    Where more samples wait than there are processes, a call takes several, if they are quick to judge. A worker that is
    gone, with its node perhaps, is started anew where there is room; what it was judging is judged again, a few times at
    most: it may be what brings workers down.
    """

    def __init__(self, workers: Workers[RewardWorker], *, num_shared: int, meter: RewardMeter) -> None:
        self._workers = workers
        self._num_slots = num_shared + 1
        self._slots = FairSlots(num_shared=num_shared)
        self._meter = meter
        self._waiting: defaultdict[str, deque[_Waiting]] = defaultdict(deque)
        """By reward."""
        self._usual_s: dict[str, float] = {}
        """What one sample takes, by reward."""
        self._calls: set[asyncio.Task[None]] = set()
        self._num_busy = [0] * workers.size
        self._revivals: dict[int, asyncio.Task[None]] = {}

    @classmethod
    async def start(
        cls,
        runtime: Runtime,
        rewards: Mapping[str, InProcess],
        config: RewardWorkersConfig,
        *,
        search_path: Sequence[str],
        meter: RewardMeter,
    ) -> RewardWorkers:
        """Spawn the workers; their processes import what they need in the meantime."""
        num_processes = config.num_processes or num_usable_cores()
        num_shared = num_processes * config.num_workers - 1
        num_entries = len({_entry(name) for name in rewards})
        max_processes = math.ceil((num_shared + num_entries) / config.num_workers)
        workers = await runtime.spawn(
            RewardWorker,
            Placement("reward", ("cpu",) * config.num_workers, concurrency=max_processes),
            rewards,
            num_processes=num_processes,
            max_processes=max_processes,
            search_path=search_path,
        )
        return cls(workers, num_shared=num_shared, meter=meter)

    async def problems(self) -> dict[str, str]:
        """Rewards that cannot be made, by name, and why."""
        return await self._workers.one(0, RewardWorker.problems)

    async def score(self, name: str, prompt: Prompt, trajectory: Trajectory) -> Score:
        """A finite score, after waiting for a turn; RewardError with the reason for anything else."""
        verdict: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting[name].append(_Waiting((prompt, trajectory), verdict, time.perf_counter()))
        self._call(name)
        return await verdict

    def _call(self, name: str) -> None:
        """One more turn. A process is busy until its call ends, whether or not anybody still waits for it."""
        call = asyncio.create_task(self._serve(name))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _serve(self, name: str) -> None:
        """Judge some of those who wait, when it is their turn."""
        entry = _entry(name)
        await self._slots.take(entry)
        try:
            taken = self._next(name)
            if not taken:
                return  # They went with others, or do not wait any more.
            started_s = time.perf_counter()
            for waiting in taken:
                self._meter.waited(waiting.domain, started_s - waiting.since_s)
            verdicts = await self._judge(name, [waiting.case for waiting in taken])
            seconds = (time.perf_counter() - started_s) / len(verdicts)
            self._usual_s[name] = (1 - _NEWEST) * self._usual_s.get(name, seconds) + _NEWEST * seconds
            left = taken[len(verdicts) :]
            for waiting, verdict in zip(taken, verdicts, strict=False):
                if isinstance(verdict, RewardLost) and waiting.num_losses < MAX_LOSSES:
                    waiting.num_losses += 1
                    self._meter.lost(waiting.domain)
                    left.append(waiting)
                else:
                    waiting.tell(verdict)
            for waiting in reversed(left):
                self._waiting[name].appendleft(waiting)
                self._call(name)
        finally:
            self._slots.give_back(entry)

    def _next(self, name: str) -> list[_Waiting]:
        """Whose turn it is: the first, and with it as many as are quickly judged, but leave the other processes their share."""
        queue = self._waiting[name]
        share = math.ceil(len(queue) / self._num_slots)
        num_quick = int(TOGETHER_S / self._usual_s.get(name, TOGETHER_S))
        taken: list[_Waiting] = []
        while queue and len(taken) < max(1, min(share, num_quick)):
            waiting = queue.popleft()
            if waiting.is_wanted():
                taken.append(waiting)
        return taken

    async def _judge(self, name: str, cases: Sequence[Case]) -> Sequence[Score | RewardError]:
        while len(self._revivals) == self._workers.size:
            await asyncio.wait(self._revivals.values(), return_when=asyncio.FIRST_COMPLETED)
        ranks = (rank for rank in range(self._workers.size) if rank not in self._revivals)
        rank = min(ranks, key=self._num_busy.__getitem__)
        self._num_busy[rank] += 1
        try:
            return await self._workers.one(rank, RewardWorker.score, name, cases)
        except WorkerDied:
            self._revive(rank)
            reason = "the worker that judged it is gone: killed, out of memory, or its node was lost"
            return [RewardLost(reason) for _ in cases]
        except Exception as error:
            return [raised(error)] * len(cases)
        finally:
            self._num_busy[rank] -= 1

    def _revive(self, rank: int) -> None:
        """Start a worker anew, in the background. If that fails, so does the next sample it is given, and it is tried again."""

        def over(revival: asyncio.Task[None]) -> None:
            del self._revivals[rank]
            if not revival.cancelled() and (error := revival.exception()):
                log.warning("reward[%d] could not be started anew: %s", rank, error)

        if rank not in self._revivals:
            log.warning("reward[%d] is gone (killed, out of memory, or its node lost): it is started anew", rank)
            self._revivals[rank] = asyncio.create_task(self._workers.restart(rank))
            self._revivals[rank].add_done_callback(over)


class Remote:
    """A reward that runs in the workers."""

    def __init__(self, name: str, workers: RewardWorkers) -> None:
        self._name = name
        self._workers = workers

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        return await self._workers.score(self._name, prompt, trajectory)


def _entry(name: str) -> str:
    """The entry of `rewards` that a name path begins with."""
    return name.partition(".")[0]
