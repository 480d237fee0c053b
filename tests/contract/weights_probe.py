"""Workers that tell what they hold, and that become others without a new process, which takes long to start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from reroll.config.parts import LoraConfig, ModelConfig
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.infer.worker import InferWorker
from reroll.models.load import Precision
from reroll.runtime.base import WorkerInfo
from reroll.training.cluster import TrainWorker
from reroll.weights.buckets import Bucket, PushBroken
from reroll_zoo.fsdp2.strategy import Fsdp2Strategy


class ProbeTrainer(TrainWorker):
    """A policy whose weights change without a batch."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info

    def become(self, config: ModelConfig, *, rendezvous: str) -> None:
        """Hold this model from now on."""
        if dist.is_initialized():
            dist.destroy_process_group()
        super().__init__(self._info, config, total_steps=1, rendezvous=rendezvous)

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
        super().take_weights(pieces)

    def held(self) -> dict[str, Tensor]:
        engine = self._engine
        assert isinstance(engine, EmbeddedEngine)
        return {name: parameter.detach().clone() for name, parameter in engine._runner._parameters.items()}

    def version(self) -> int:
        """What its tokens are tagged with."""
        engine = self._engine
        assert isinstance(engine, EmbeddedEngine)
        return engine._version
