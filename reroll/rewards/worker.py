"""The worker that runs rewards which may hang, crash or eat memory, one in each process. Its controller: `workers.py`."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from reroll.config.reward_base import InProcessRewardConfig
from reroll.errors import RewardError, short_error
from reroll.rewards.base import as_score, raised
from reroll.rewards.memory import MemoryLimit, MustRestart
from reroll.runtime.base import WorkerInfo
from reroll.types import Prompt, Score, Trajectory

Case = tuple[Prompt, Trajectory]
"""What is to be judged."""
Verdicts = tuple[list[Score | RewardError], float]
"""On the first cases, and the seconds that it took to judge them."""


class RewardWorker:
    """Judges by every reward, one case after the other. Whoever calls it sees to it that it does not take for ever."""

    def __init__(self, info: WorkerInfo, rewards: Mapping[str, InProcessRewardConfig], *, search_path: Sequence[str]) -> None:
        """`rewards` by name. `search_path`: where modules of the user's are found."""
        self._configs = rewards
        self._search_path = search_path
        self._judges: dict[str, Callable[[Prompt, Trajectory], Any]] = {}
        self._limits: dict[str, MemoryLimit] = {}
        self._problems: dict[str, str] = {}
        self._runner = asyncio.Runner()

    def load(self) -> dict[str, str]:
        """Import what judges, before the first case. Gives the rewards that cannot be made, by name, and why."""
        sys.path[:0] = [path for path in self._search_path if path not in sys.path]
        for name, config in self._configs.items():
            try:
                self._judges[name] = config.make()
            except (Exception, SystemExit) as error:
                self._problems[name] = short_error(error)
        self._limits = {name: MemoryLimit(self._configs[name].memory_mb) for name in self._judges}
        return self._problems

    def score(self, name: str, cases: Sequence[Case], *, together_s: float) -> Verdicts:
        """For each case a finite score, or the reason why there is none. Judges the first, and others until `together_s` have
        passed: those that are left may find another worker free. After `MustRestart` this one is to be replaced."""
        started_s = time.perf_counter()
        verdicts: list[Score | RewardError] = []
        for prompt, trajectory in cases:
            verdicts.append(self._verdict(name, prompt, trajectory))
            if isinstance(verdicts[-1], MustRestart) or time.perf_counter() > started_s + together_s:
                break
        return verdicts, time.perf_counter() - started_s

    def close(self) -> None:
        self._runner.close()

    def _verdict(self, name: str, prompt: Prompt, trajectory: Trajectory) -> Score | RewardError:
        if name not in self._judges:
            return RewardError(self._problems[name])
        try:
            with self._limits[name]:
                verdict = self._judges[name](prompt, trajectory)
                if inspect.isawaitable(verdict):
                    verdict = self._runner.run(_wait_for(verdict))
                return as_score(verdict)
        except RewardError as error:
            return RewardError(str(error))  # Not one of user code's own making, which the controller could not read.
        except MemoryError:
            return MustRestart("the reward wanted more memory than its memory_mb allows: raise it, or null for no limit")
        except BaseException as error:  # A case must not fail those that it is judged with.
            return raised(error)


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
