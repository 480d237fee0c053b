"""Replicas: checkpoints in this machine's memory, as many as a small share of the run's time allows.

They are checkpoints like those on disk, in another folder: written by the same code, read by the same code, each with its
manifest. They outlive the run's processes, not the machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reroll.config.parts import CheckpointConfig, LocalRuntimeConfig, ProcessesRuntimeConfig
from reroll.config.pipeline import PipelineConfig
from reroll.errors import RerollError, WorkerDied
from reroll.observe.manifest import find_damage
from reroll.observe.run_folder import Checkpoint, RunFolder
from reroll.pipeline.checkpoints import Checkpoints
from reroll.pipeline.restarts import Restarts
from reroll.runtime.devices import num_usable_cores
from reroll.training.cluster import TrainCluster, TrainWorker
from reroll_zoo import supervisor
from reroll_zoo.replicas.place import SHARED_MEMORY, has_room, is_ours, make_place, place_of, sweep

FIRST_COST_S = 0.2
"""What the first is taken to cost: it is made when the run has earned that. So a short run makes none."""
WRITING_S, WRITING_S_PER_GIB = 0.01, 2.0
"""Of a core, to write one and to sum it up. How long that takes by the clock says more of what else the machine does."""
BYTES_PER_PARAMETER = 16
"""At most, of one that is trained, in a checkpoint."""

log = logging.getLogger(__name__)


@contextmanager
def open_replicas(run: Path, config: PipelineConfig, restarts: Restarts) -> Iterator[MemoryReplicas | None]:
    """Those of the run in this folder, as the config wants them. They are deleted in the end, unless this process is killed."""
    wanted = config.checkpoint.background and config.run.restarts > 0 and config.checkpoint.replica_share > 0
    # Elsewhere another machine may be where the next attempt runs.
    is_here = isinstance(config.runtime, LocalRuntimeConfig | ProcessesRuntimeConfig) and SHARED_MEMORY.is_dir()
    if not (wanted and is_here):
        yield None
        return
    sweep()
    place = place_of(run, owner=supervisor.waits_here or os.getpid())
    try:
        yield MemoryReplicas(place, share=config.checkpoint.replica_share)
    finally:
        shutil.rmtree(place, ignore_errors=True)


class MemoryReplicas:
    """Checkpoints in `place`, of which the newest is kept. Making them takes `share` of the run's time."""

    def __init__(self, place: Path, *, share: float) -> None:
        self._place, self._share = place, share
        self._folder = RunFolder(place)
        self._checkpoints = Checkpoints(self._folder, CheckpointConfig(keep=1))
        self._writing: asyncio.Task[None] | None = None
        self._next_s = time.perf_counter() + FIRST_COST_S / share
        self._num_bytes = 0
        """Of one. 0 until it is known."""
        self._is_off = False

    def newest(self) -> Checkpoint | None:
        """The newest that is whole. All else that an earlier attempt has left is deleted."""
        if not is_ours(self._place):
            return None
        whole = next((one for one in reversed(self._folder.all_checkpoints()) if not find_damage(one.path)), None)
        for path in self._folder.checkpoints_path.glob("*"):
            if whole is None or path != whole.path:
                shutil.rmtree(path, ignore_errors=True)
        return whole

    async def take_if_due(self, num_steps: int, models: Mapping[str, TrainCluster], state: Mapping[str, Any]) -> None:
        """Take one if that is due, and memory has room for it beside the last. It is written in the background."""
        if self._is_off or time.perf_counter() < self._next_s or (self._writing and not self._writing.done()):
            return
        try:
            self._num_bytes = self._num_bytes or await _most_bytes(models)
            # The copy that is written from, and what is written: the last one goes only then.
            if not has_room(2 * self._num_bytes):
                self._give_up(f"{2 * self._num_bytes / 2**30:.1f} GiB would be too much of what is free")
                return
            make_place(self._place)
            began_s = time.perf_counter()
            await self._checkpoints.take(num_steps, models, state)
        except WorkerDied:
            raise
        except (OSError, RerollError) as error:
            self._give_up(error)
            return
        self._writing = asyncio.create_task(self._write(taken_s=time.perf_counter() - began_s))

    async def finish(self, *, at_once: bool = False) -> None:
        """Wait until the one under way is written, or given up."""
        writing, self._writing = self._writing, None
        if writing is not None:
            if at_once:
                writing.cancel()
            await asyncio.wait({writing})

    async def _write(self, *, taken_s: float) -> None:
        """Until it is written, and the time of the next is known. While one is taken the run stands still; while it is written
        the run has all cores but one."""
        try:
            await self._checkpoints.finish()
        except WorkerDied:  # The run finds out by itself.
            return
        except (OSError, RerollError) as error:
            self._give_up(error)
            return
        files = [path for path in self._place.rglob("*") if path.is_file()]
        self._num_bytes = sum(path.stat().st_size for path in files)
        writing_s = WRITING_S + WRITING_S_PER_GIB * self._num_bytes / 2**30
        self._next_s = time.perf_counter() + (taken_s + writing_s / num_usable_cores()) / self._share

    def _give_up(self, why: object) -> None:
        """They are a help, and no condition: the run goes on without."""
        self._is_off = True
        shutil.rmtree(self._place, ignore_errors=True)
        log.warning("no replicas in memory: %s. A run that loses a process goes on from its last checkpoint on disk", why)


async def _most_bytes(models: Mapping[str, TrainCluster]) -> int:
    """At most so many has a checkpoint of these models. Of one with an adapter, the adapter is all that is saved."""
    total = 0
    for model in models.values():
        for held in await model.broadcast(TrainWorker.part_shapes):
            adapter = {name: part for name, part in held.items() if ".lora_" in name}
            total += BYTES_PER_PARAMETER * sum(part.num_bytes // part.dtype.itemsize for part in (adapter or held).values())
    return total
