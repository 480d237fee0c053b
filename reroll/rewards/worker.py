"""Where rewards run that may hang, crash or eat memory, and how the controller reaches them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

from reroll.config.reward_base import InProcess
from reroll.config.rewards import RewardWorkersConfig
from reroll.rewards.meter import RewardMeter
from reroll.rewards.pool import ProcessPool
from reroll.rewards.slots import FairSlots
from reroll.runtime.base import Placement, Runtime, WorkerInfo, Workers
from reroll.runtime.devices import num_usable_cores
from reroll.types import Prompt, Score, Trajectory


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
    """All workers as one. Every entry of the config has a process that no other can take, and shares the rest fairly."""

    def __init__(self, workers: Workers[RewardWorker], *, num_shared: int, meter: RewardMeter) -> None:
        self._workers = workers
        self._slots = FairSlots(num_shared=num_shared)
        self._meter = meter
        self._num_busy = [0] * workers.size

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
        rank = min(range(self._workers.size), key=self._num_busy.__getitem__)
        self._num_busy[rank] += 1

        def over(call: asyncio.Future[Score]) -> None:
            self._num_busy[rank] -= 1
            self._slots.give_back(entry)
            if not call.cancelled():
                call.exception()  # Seen here, or asyncio reports it as forgotten where nobody waits any more.

        call = asyncio.ensure_future(self._workers.one(rank, RewardWorker.score, name, prompt, trajectory))
        call.add_done_callback(over)
        # A process is busy until its call ends, whether or not anybody still waits for it.
        return await asyncio.shield(call)


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
