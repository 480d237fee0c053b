"""Where rewards run that may hang, crash or eat memory, and how the controller reaches them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence

from reroll.config.reward_base import InProcess
from reroll.config.rewards import RewardWorkersConfig
from reroll.errors import RewardError, WorkerDied
from reroll.rewards.meter import RewardMeter
from reroll.rewards.pool import ProcessPool
from reroll.rewards.slots import FairSlots
from reroll.runtime.base import Placement, Runtime, WorkerInfo, Workers
from reroll.runtime.devices import num_usable_cores
from reroll.types import Prompt, Score, Trajectory

log = logging.getLogger(__name__)


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

    def score(self, name: str, prompt: Prompt, trajectory: Trajectory) -> Score:
        """A finite score; RewardError with the reason for anything else, a hang or a crash included."""
        return self._pool.score(name, prompt, trajectory)

    def problems(self) -> dict[str, str]:
        """Rewards that cannot be made, by name, and why."""
        return self._pool.problems()

    def close(self) -> None:
        self._pool.close()


class RewardWorkers:
    """All workers as one. Every entry of the config has a process that no other can take, and shares the rest fairly.

    A worker that is gone, with its node perhaps, fails what it was judging and is started anew where there is room.
    """

    def __init__(self, workers: Workers[RewardWorker], *, num_shared: int, meter: RewardMeter) -> None:
        self._workers = workers
        self._slots = FairSlots(num_shared=num_shared)
        self._meter = meter
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
        """As RewardWorker's, after waiting for a turn."""
        entry, start_s = _entry(name), time.perf_counter()
        await self._slots.take(entry)
        self._meter.waited(prompt.domain, time.perf_counter() - start_s)

        def over(call: asyncio.Future[Score]) -> None:
            self._slots.give_back(entry)
            if not call.cancelled():
                call.exception()  # Seen here, or asyncio reports it as forgotten where nobody waits any more.

        call = asyncio.ensure_future(self._judge(name, prompt, trajectory))
        call.add_done_callback(over)
        # A process is busy until its call ends, whether or not anybody still waits for it.
        return await asyncio.shield(call)

    async def _judge(self, name: str, prompt: Prompt, trajectory: Trajectory) -> Score:
        while len(self._revivals) == self._workers.size:
            await asyncio.wait(self._revivals.values(), return_when=asyncio.FIRST_COMPLETED)
        ranks = (rank for rank in range(self._workers.size) if rank not in self._revivals)
        rank = min(ranks, key=self._num_busy.__getitem__)
        self._num_busy[rank] += 1
        try:
            return await self._workers.one(rank, RewardWorker.score, name, prompt, trajectory)
        except WorkerDied:
            self._revive(rank)
            reason = "the worker that judged it is gone: killed, out of memory, or its node was lost"
            raise RewardError(reason) from None
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
            self._revivals[rank] = asyncio.create_task(self._workers.revive(rank))
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
