"""Where rewards run that may hang, crash or eat memory, as the controller sees it: processes, and whose turn it is."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reroll.config.reward_base import InProcessRewardConfig
from reroll.config.rewards import RewardWorkersConfig
from reroll.errors import RerollError, RewardError, RewardLost, WorkerDied, WorkerTimeout
from reroll.rewards.base import raised
from reroll.rewards.memory import MustRestart
from reroll.rewards.meter import RewardMeter
from reroll.rewards.slots import FairSlots
from reroll.rewards.worker import Case, RewardWorker, Verdicts
from reroll.runtime.base import Placement, Runtime, Workers
from reroll.runtime.devices import num_usable_cores
from reroll.runtime.processes import ProcessRuntime
from reroll.types import Prompt, Score, Trajectory

log = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 120.0
"""How long a process may take to import the rewards; user modules may import heavy libraries."""
TOGETHER_S = 0.01
"""Samples that wait for the same reward are judged in one call if they take no longer than this together: for quick rewards
the calls take longer than the judging."""
MAX_LOSSES = 3
"""How often a sample that was not judged, because its judge was lost, is given to another."""
_NEWEST = 0.1
"""Weight of the newest call in what a sample is thought to take."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A case and who waits for its verdict."""

    case: Case
    verdict: asyncio.Future[Score]
    since_s: float
    num_losses: int = 0
    """How often its judge was lost."""
    is_alone: bool = False
    """Judged in a call of its own: a call that it was part of has ended its process."""

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
    """All processes as one. Every entry of the config has one that no other can take, and shares the rest fairly.

    Where more samples wait than there are processes, a call takes several, if they are quick to judge. If a call hangs or its
    process dies, and it was about one sample, that sample is to blame; if about several, each is judged again in a call of its
    own. A process that died before it read the call harms nobody: another judges, a few times at most. Whatever became of a
    process, the next one is in its place when the turn is over, elsewhere if its node is lost.
    """

    def __init__(
        self,
        workers: Workers[RewardWorker],
        rewards: Mapping[str, InProcessRewardConfig],
        *,
        num_shared: int,
        meter: RewardMeter,
        own_runtime: Runtime | None = None,
    ) -> None:
        """Has every process import the rewards. `own_runtime` is closed with it."""
        self._workers = workers
        self._rewards = dict(rewards)
        self._num_slots = num_shared + 1
        self._slots = FairSlots(num_shared=num_shared)
        self._meter = meter
        self._own_runtime = own_runtime
        self._is_closed = False
        self._waiting: defaultdict[str, deque[_Waiting]] = defaultdict(deque)
        """By reward."""
        self._usual_s: dict[str, float] = {}
        """What one sample takes, by reward."""
        self._calls: set[asyncio.Task[None]] = set()
        self._free = list(range(workers.size))
        """Ranks that have no turn, at least as many as there are turns to be had; the one that was used last comes last."""
        self._loads: dict[int, asyncio.Task[dict[str, str]]] = {}
        """By rank, what `_load` gives."""
        for rank in self._free:
            self._start_loading(rank)

    @classmethod
    async def start(
        cls,
        runtime: Runtime,
        rewards: Mapping[str, InProcessRewardConfig],
        config: RewardWorkersConfig,
        *,
        search_path: Sequence[str],
        meter: RewardMeter,
    ) -> RewardWorkers:
        """Start the processes: of this machine, or of Ray if the run's runtime is that. They import the rewards meanwhile."""
        num_shared = (config.num_processes or num_usable_cores()) * config.num_workers - 1
        size = num_shared + len({_entry(name) for name in rewards})
        own_runtime = ProcessRuntime() if runtime.shares_memory else None
        workers = await (own_runtime or runtime).spawn(
            RewardWorker,
            Placement("reward", ("cpu",) * size, runs_user_code=True, num_places=config.num_workers),
            rewards,
            search_path=search_path,
        )
        return cls(workers, rewards, num_shared=num_shared, meter=meter, own_runtime=own_runtime)

    async def problems(self) -> dict[str, str]:
        """Rewards that cannot be made, by name, and why."""
        try:
            return await self._loads[0]
        except RewardLost as lost:
            return dict.fromkeys(self._rewards, str(lost))

    async def score(self, name: str, prompt: Prompt, trajectory: Trajectory) -> Score:
        """A finite score, after waiting for a turn; RewardError with the reason for anything else."""
        if self._is_closed:
            raise _closing()
        verdict: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting[name].append(_Waiting((prompt, trajectory), verdict, time.perf_counter()))
        self._call(name)
        return await verdict

    async def close(self) -> None:
        """End all processes, busy or not; whoever waits is told. Safe to call twice."""
        self._is_closed = True
        for queue in self._waiting.values():
            while queue:
                queue.popleft().tell(_closing())
        tasks: list[asyncio.Task[object]] = [*self._calls, *self._loads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._workers.stop(at_once=True)
        if self._own_runtime is not None:
            await self._own_runtime.close()

    def _call(self, name: str) -> None:
        """One more turn. A process is busy until its call ends, whether or not anybody still waits for it."""
        call = asyncio.create_task(self._serve(name))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _serve(self, name: str) -> None:
        """Judge some of those who wait, when it is their turn. The turn lasts until the process is fit for the next one."""
        entry = _entry(name)
        await self._slots.take(entry)
        rank = next((rank for rank in reversed(self._free) if self._loads[rank].done()), self._free[-1])
        self._free.remove(rank)
        try:
            await self._until_loaded(rank)
            if taken := self._next(name):  # Else they went with others, or do not wait any more.
                await self._judge(rank, name, taken)
                await self._until_loaded(rank)
        finally:
            self._free.append(rank)
            self._slots.give_back(entry)

    def _next(self, name: str) -> list[_Waiting]:
        """Whose turn it is: the first, and with it as many as are quickly judged, but leave the other processes their share."""
        queue = self._waiting[name]
        share = math.ceil(len(queue) / self._num_slots)
        num_quick = int(TOGETHER_S / max(self._usual_s.get(name, TOGETHER_S), 1e-9))
        taken: list[_Waiting] = []
        while queue and len(taken) < max(1, min(share, num_quick)):
            if taken and (taken[-1].is_alone or queue[0].is_alone):
                break
            waiting = queue.popleft()
            if waiting.is_wanted():
                taken.append(waiting)
        return taken

    async def _judge(self, rank: int, name: str, taken: Sequence[_Waiting]) -> None:
        """Have a process judge the samples, tell the verdicts, and replace it if need be. Those that it left wait again."""
        started_s = time.perf_counter()
        for waiting in taken:
            self._meter.waited(waiting.domain, started_s - waiting.since_s)
        verdicts: list[Score | RewardError] = []
        try:
            verdicts, seconds = await self._ask(rank, name, [waiting.case for waiting in taken])
            if isinstance(verdicts[-1], MustRestart):
                self._start_loading(rank, anew=True)
        except _JudgingLost as lost:
            self._on_lost(name, taken, lost)
            self._start_loading(rank, anew=not lost.is_replaced)
        except asyncio.CancelledError:
            for waiting in taken:
                waiting.tell(_closing())
            raise
        # The way to a process and back counts for nothing: it takes longest when many samples end at once.
        usual_s = seconds / len(verdicts) if verdicts else time.perf_counter() - started_s
        self._usual_s[name] = (1 - _NEWEST) * self._usual_s.get(name, usual_s) + _NEWEST * usual_s
        for waiting, verdict in zip(taken, verdicts, strict=False):
            waiting.tell(self._unjudged(name, str(verdict)) if isinstance(verdict, MustRestart) else verdict)
        if verdicts:
            self._wait_again(name, taken[len(verdicts) :])

    async def _ask(self, rank: int, name: str, cases: Sequence[Case]) -> Verdicts:
        """Verdicts on the first cases, one at least. Raises _JudgingLost if there are none."""
        timeout_s = self._rewards[name].timeout_s
        try:
            await self._loads[rank]
            return await self._workers.one_within(timeout_s, rank, RewardWorker.score, name, cases, together_s=TOGETHER_S)
        except RewardLost as lost:
            raise _JudgingLost(str(lost), is_cause=False) from None
        except WorkerTimeout:
            raise _JudgingLost(f"the reward took longer than {timeout_s:g} s judging: killed", is_replaced=True) from None
        except WorkerDied as died:
            is_cause = None if died.had_read and died.was_killed else died.had_read
            raise _JudgingLost(f"the reward's process {died.how} while judging", is_cause=is_cause) from None
        except Exception as error:  # It cannot be sent, perhaps.
            raise _JudgingLost(str(raised(error))) from error

    def _on_lost(self, name: str, taken: Sequence[_Waiting], lost: _JudgingLost) -> None:
        """Tell whoever is to blame; the others wait again."""
        if lost.is_cause is not False and len(taken) > 1:
            for waiting in taken:
                waiting.is_alone = True
            self._wait_again(name, taken)
            return
        max_losses = {True: 0, None: 1, False: MAX_LOSSES}[lost.is_cause]
        for waiting in reversed(taken):
            if waiting.num_losses < max_losses:
                waiting.num_losses += 1
                self._meter.lost(waiting.domain)
                self._wait_again(name, [waiting])
            else:
                waiting.tell(RewardLost(lost.why) if lost.is_cause is False else self._unjudged(name, lost.why))

    def _wait_again(self, name: str, those: Sequence[_Waiting]) -> None:
        """Before all others."""
        for waiting in reversed(those):
            self._waiting[name].appendleft(waiting)
            self._call(name)

    def _unjudged(self, name: str, why: str) -> Score | RewardError:
        """The verdict on an answer that could not be judged."""
        verdict = self._rewards[name].score_on_timeout
        return RewardError(why) if verdict is None else Score(value=verdict, info={"unjudged": 1.0})

    def _start_loading(self, rank: int, *, anew: bool = False) -> None:
        self._loads[rank] = loading = asyncio.create_task(self._load(rank, anew=anew))
        loading.add_done_callback(lambda _: loading.cancelled() or loading.exception())  # There may be nobody to be told.

    async def _until_loaded(self, rank: int) -> None:
        if not self._loads[rank].done():
            await asyncio.wait([self._loads[rank]])

    async def _load(self, rank: int, *, anew: bool) -> dict[str, str]:
        """Have a process import the rewards: this one, or another in its place. Gives those that cannot be made, and why.

        Raises RewardLost if that cannot be done. The next sample that the process is given is then lost too, and it is tried
        again.
        """
        try:
            if anew:
                await self._workers.restart(rank)
            return await self._workers.one_within(IMPORT_TIMEOUT_S, rank, RewardWorker.load)
        except WorkerTimeout:
            why = f"the reward took longer than {IMPORT_TIMEOUT_S:g} s importing the rewards: killed"
        except WorkerDied as died:
            why = f"the reward's process {died.how} while importing the rewards"
        except RerollError as error:
            why = f"the reward's process could not be started: {error}"
        log.warning("reward[%d]: %s", rank, why)
        raise RewardLost(why)


class _JudgingLost(Exception):
    """A process gave no verdict, and must be replaced."""

    def __init__(self, why: str, *, is_cause: bool | None = True, is_replaced: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.is_cause = is_cause
        """Whether what it was given to judge, or one of several, is the cause; None: nobody can tell."""
        self.is_replaced = is_replaced
        """Whether another process is there already."""


class Remote:
    """A reward that runs in the workers."""

    def __init__(self, name: str, workers: RewardWorkers) -> None:
        self._name = name
        self._workers = workers

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        return await self._workers.score(self._name, prompt, trajectory)


def _closing() -> RewardError:
    return RewardError("the run is closing: rewards take no more calls")


def _entry(name: str) -> str:
    """The entry of `rewards` that a name path begins with."""
    return name.partition(".")[0]
