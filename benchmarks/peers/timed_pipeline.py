"""The RLVR pipeline for a benchmark: it says when it was ready and when its last step was over, and saves no model, which no
number here is about and a slow disk takes a minute for."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Self

from step_timeline import Stacks

from reroll.config.tree import RlvrConfig
from reroll.observe.metrics import Stats
from reroll.pipeline.base import RunContext
from reroll.pipeline.rlvr import RlvrPipeline
from reroll.training.cluster import TrainCluster

STACKS = Stacks()
"""Of the step that is profiled."""
MARKS: dict[str, float] = {}
"""When a phase of the process was over, by `time.time`, in their order."""


def mark(phase: str) -> None:
    """The phase is over."""
    MARKS[phase] = time.time()
    print(f"{phase} over", flush=True)


class TimedPipeline(RlvrPipeline):
    """`RlvrPipeline`, whose checkpoints hold no model."""

    @classmethod
    @asynccontextmanager
    async def open(cls, config: RlvrConfig, context: RunContext) -> AsyncIterator[Self]:
        mark("checks")
        async with super().open(config, context) as pipeline:
            mark("open")
            yield pipeline

    @property
    def models(self) -> dict[str, TrainCluster]:
        return {}

    async def step(self, step: int) -> Stats:
        with STACKS.looking() if step + 1 in self.config.run.profile_steps else nullcontext():
            return await super().step(step)

    async def finish(self) -> None:
        mark("steps")
        await super().finish()
