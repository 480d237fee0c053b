"""Workers that tell what they hold, and that become others without a new process, which takes long to start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reroll.config.parts import LoraConfig, ModelConfig
from reroll.config.weights import WeightsConfig, WeightsKind
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.infer.worker import InferWorker
from reroll.models.load import Precision
from reroll.pipeline.weight_sync import WeightSync
from reroll.runtime.base import Placement, WorkerInfo, Workers
from reroll.runtime.processes import ProcessRuntime
from reroll.training.cluster import Rendezvous, TrainCluster, TrainWorker
from reroll.weights.buckets import Bucket, PushBroken
from reroll.weights.slices import Slice
from reroll_zoo.fsdp2.strategy import Fsdp2Strategy
from reroll_zoo.push_ring.group import PushGroup


@dataclass
class Traffic:
    """What a process has to do with pushes."""

    num_sent: int = 0
    """Bytes that it gave to a process group."""
    num_taken: int = 0
    """Bytes of the buckets that an engine took."""
    largest: int = 0
    """Bytes of the largest memory that was made for a push."""


TRAFFIC = Traffic()
"""Of this process."""


_send = PushGroup._send


def _counted_send(group: PushGroup, flat: Tensor, engine: int) -> Work:
    TRAFFIC.num_sent += flat.nbytes
    return _send(group, flat, engine)


def count_traffic() -> None:
    """From now on, anew."""
    TRAFFIC.__init__()  # type: ignore[misc]
    PushGroup._send = _counted_send  # type: ignore[method-assign]


class NewMemory(TorchDispatchMode):
    """Notes the size of memory that did not exist before an operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        new = [leaf.untyped_storage() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        TRAFFIC.largest = max([TRAFFIC.largest, *(memory.nbytes() for memory in new if memory.data_ptr() not in before)])
        return made


class ProbeTrainer(TrainWorker):
    """A policy whose weights change without a batch."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info

    def become(self, config: ModelConfig, *, rendezvous: str) -> None:
        """Hold this model from now on."""
        if dist.is_initialized():
            dist.destroy_process_group()
        super().__init__(self._info, config, total_steps=1, rendezvous=rendezvous)
        count_traffic()

    def next_bucket(self) -> Bucket | None:
        with NewMemory() if self._sends_slices else nullcontext():
            return super().next_bucket()

    def traffic(self) -> Traffic:
        return TRAFFIC

    def nudge(self, *, scale: float) -> None:
        """Move every second value that is trained."""
        strategy = self._strategy
        trained = strategy._trained() if isinstance(strategy, Fsdp2Strategy) else strategy._parameters  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter in trained.values():
                local = parameter.to_local() if isinstance(strategy, Fsdp2Strategy) else parameter
                local.view(-1)[::2] *= 1 + scale


class ProbeEngine(InferWorker):
    """An engine that shows its weights."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._refused: int | None = None

    def become(self, model: str, *, precision: Precision = "fp32", lora: LoraConfig | None = None) -> None:
        """Serve this model from now on."""
        if "_thread" in vars(self):
            self.close()
        super().__init__(self._info, model=model, precision=precision, max_running=4, lora=lora)
        count_traffic()

    def close(self) -> None:
        if "_thread" in vars(self):
            super().close()

    def refuse(self, index: int | None) -> None:
        """Raise when this bucket comes, once."""
        self._refused = index

    def take_weights(self, pieces: Sequence[Bucket]) -> None:
        if pieces[0].index == self._refused:
            self._refused = None
            raise PushBroken("this bucket is refused")
        TRAFFIC.num_taken += sum(piece.num_bytes for piece in pieces)
        super().take_weights(pieces)

    def traffic(self) -> Traffic:
        return TRAFFIC

    def held(self) -> dict[str, Tensor]:
        engine = self._engine
        assert isinstance(engine, EmbeddedEngine)
        return {name: parameter.detach().clone() for name, parameter in engine._runner._parameters.items()}

    def version(self) -> int:
        """What its tokens are tagged with."""
        engine = self._engine
        assert isinstance(engine, EmbeddedEngine)
        return engine._version


class Pair:
    """A policy on some ranks and some engines, in processes of their own that can be others in the next test."""

    def __init__(self, runtime: ProcessRuntime, trainers: Workers[ProbeTrainer], engines: Workers[ProbeEngine]) -> None:
        self.runtime, self._trainers, self._engines = runtime, trainers, engines
        self.policy = TrainCluster(trainers)  # type: ignore[arg-type]

    async def become(self, config: ModelConfig, *, engine_precision: Precision = "fp32") -> None:
        self._meeting = Rendezvous(self.runtime.host)
        self.cluster = InferCluster(self._engines)  # type: ignore[arg-type]
        await asyncio.gather(
            self._trainers.broadcast(ProbeTrainer.become, config, rendezvous=self._meeting.address),
            self._engines.broadcast(ProbeEngine.become, config.model, precision=engine_precision, lora=config.lora),
        )

    def sync(self, kind: WeightsKind, folder: Path, *, delta: bool = False, bucket_mb: float = 0.01) -> WeightSync:
        config, host = WeightsConfig(kind=kind, bucket_mb=bucket_mb, delta=delta), self.runtime.host
        return WeightSync(self.policy, self.cluster, config, share_memory=False, snapshot=False, host=host, folder=folder)

    async def move(self, *, scale: float) -> None:
        await self._trainers.broadcast(ProbeTrainer.nudge, scale=scale)

    async def refuse(self, index: int) -> None:
        """The first engine raises when this bucket comes."""
        await self._engines.one(0, ProbeEngine.refuse, index)

    async def versions(self) -> list[int]:
        return await self._engines.broadcast(ProbeEngine.version)

    async def traffic(self) -> tuple[list[Traffic], list[Traffic]]:
        """Of each trainer and each engine, since they became what they are."""
        return await self._trainers.broadcast(ProbeTrainer.traffic), await self._engines.broadcast(ProbeEngine.traffic)

    async def layouts(self) -> list[dict[str, Slice] | None]:
        return await self._trainers.broadcast(ProbeTrainer.slices)

    async def assert_in_step(self) -> None:
        want = await self.policy.weights()
        for held in await self._engines.broadcast(ProbeEngine.held):
            assert want.keys() <= held.keys()
            assert all(torch.equal(held[name], tensor.to(held[name].dtype)) for name, tensor in want.items())


async def spawn_pair(*, num_trainers: int, num_engines: int) -> Pair:
    """The processes; what they hold is told by `become`."""
    runtime = ProcessRuntime()
    trainers, engines = await asyncio.gather(
        runtime.spawn(ProbeTrainer, Placement("policy", ("cpu",) * num_trainers)),
        runtime.spawn(ProbeEngine, Placement("engine", ("cpu",) * num_engines, concurrency=CONCURRENCY)),
    )
    return Pair(runtime, trainers, engines)
