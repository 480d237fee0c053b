"""A run's checkpoints: taken between two steps, written while the next ones run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from reroll.config.parts import CheckpointConfig
from reroll.observe.files import write_json
from reroll.observe.manifest import Sums
from reroll.observe.run_folder import RunFolder
from reroll.pipeline.resume import STATE_FILE, STATE_VERSION
from reroll.runtime.failures import gather_all
from reroll.training.cluster import TrainCluster

T = TypeVar("T")

log = logging.getLogger(__name__)


class Checkpoints:
    """Takes them, and sees to it that at most one is being written.

    In the background, `take` returns when the state is copied. What keeps the copy from being written is raised by
    `raise_if_failed`, `finish` and the next `take`. Leaving the block waits for a write, unless the program is to quit.
    """

    def __init__(self, folder: RunFolder, config: CheckpointConfig) -> None:
        self._folder, self._config = folder, config
        self._writing: asyncio.Task[None] | None = None
        self.last_step = -1
        """The number of finished steps at the last one that was taken, or that the run went on from."""

    async def take(
        self, num_steps: int, models: Mapping[str, TrainCluster], state: Mapping[str, Any], *, keep_all: bool = False
    ) -> dict[str, float]:
        """A checkpoint of models, by the name of their folder in it, and of the pipeline. With `keep_all` no older one goes.

        Returns how long the run stood still for it: until the last one was written, and while this one was taken.
        """
        waited_s = await self.finish()
        started_s = time.perf_counter()
        async with AsyncExitStack() as stack:
            sums: Sums = {}
            folder = self._folder.checkpoint(num_steps, keep=None if keep_all else self._config.keep, sums=sums)
            unfinished = await stack.enter_async_context(_on_a_thread(folder))
            write_json(unfinished / STATE_FILE, {"version": STATE_VERSION, **state})
            staged: dict[str, TrainCluster] = {}

            async def wait_for_writers(_: object, error: BaseException | None, __: object) -> None:
                if error is None or isinstance(error, Exception):  # Else the program is to quit.
                    await _written(staged, sums)

            stack.push_async_exit(wait_for_writers)
            for name, model in models.items():
                if self._config.background:
                    await model.stage(unfinished / name)
                    staged[name] = model
                else:
                    sums |= _inside(name, await model.save(unfinished / name))
            self._writing = asyncio.create_task(stack.pop_all().aclose())
        self.last_step = num_steps
        if not self._config.background:
            await self.finish()
        return {"time/checkpoint_wait_s": waited_s, "time/checkpoint_s": time.perf_counter() - started_s}

    async def raise_if_failed(self) -> None:
        """Raise what kept the last one from being written, if that is known by now."""
        if self._writing is not None and self._writing.done():
            await self.finish()

    async def finish(self) -> float:
        """Wait until the last one taken has its name; returns for how long. Raises what kept it from being written."""
        started_s = time.perf_counter()
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing
        return time.perf_counter() - started_s

    async def __aenter__(self) -> Checkpoints:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writing is None:
            return
        if error is not None and not isinstance(error, Exception):  # The user has no patience left.
            self._writing.cancel()
        [failure] = await asyncio.gather(self._writing, return_exceptions=True)
        if isinstance(failure, Exception):
            log.warning("the checkpoint of step %d was lost: %s", self.last_step, failure)


async def _written(models: Mapping[str, TrainCluster], sums: Sums) -> None:
    """Wait for all that write into a folder: also if one fails, it must not be taken from under the others."""
    for name, found in zip(models, await gather_all([model.written() for model in models.values()]), strict=True):
        sums |= _inside(name, found)


def _inside(folder: str, sums: Sums) -> Sums:
    return {f"{folder}/{name}" if folder else name: found for name, found in sums.items()}


@asynccontextmanager
async def _on_a_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """A context whose ends, which wait for a disk, do not keep the event loop from its work."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)
