"""The worker that holds a model and its strategy, and the loop of epochs, mini-batches and micro-batches, written once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from reroll.config.parts import PolicyConfig
from reroll.models.load import DTYPES, load_model, load_tokenizer
from reroll.observe.metrics import Mean, Stats, Sum
from reroll.runtime.base import WorkerInfo
from reroll.tokens.batch import Batch
from reroll.tokens.packing import fill, join, micro_batches, mini_batches
from reroll.train.loss import PolicyLoss
from reroll.train.torch_strategy import TorchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One update: a batch, the loss, and how often to go through it."""

    batch: Batch
    loss: PolicyLoss
    epochs: int = 1
    mini_batches: int = 1
    """Optimizer steps per epoch, at most the number of sequences."""
    seed: int = 0
    """Of the cut into mini-batches, which differs from epoch to epoch."""


class TrainWorker:
    """Holds one model: a policy to train, or a reference that only gives log-probs (its optimizer then takes no memory)."""

    def __init__(self, info: WorkerInfo, policy: PolicyConfig, *, total_steps: int) -> None:
        self._world_size = info.world_size
        self._micro_batch_tokens = policy.strategy.micro_batch_tokens
        self._strategy = TorchStrategy(
            load_model(policy.model, dtype=DTYPES[policy.strategy.precision], device=info.device),
            load_tokenizer(policy.model),
            policy.strategy,
            policy.optim,
            total_steps=total_steps,
        )

    def logprobs(self, batch: Batch) -> Tensor:
        """[T] fp32 log-probs of the batch's tokens, on the CPU; 0 off the loss mask."""
        parts = fill(batch.lengths, max_tokens=self._micro_batch_tokens)
        return join(batch, parts, [self._strategy.forward(batch.select(part)).cpu() for part in parts])

    def train(self, job: TrainJob) -> Stats:
        """Go through the batch, one optimizer step per mini-batch.

        With a single step the policy has not moved when it meets a token, so the training pass itself gives the old
        log-probs. With several they are computed first, unless the batch brings them.
        """
        if self._world_size > 1:
            raise ValueError(f"strategy torch trains on one device, got {self._world_size}: name one in policy.devices")
        started_s = time.perf_counter()
        batch = job.batch
        if job.epochs * job.mini_batches > 1 and batch.old_logp is None:
            batch = batch.replace(old_logp=self.logprobs(batch))
        stats = Stats()
        for epoch in range(job.epochs):
            for step_batch in mini_batches(batch, job.mini_batches, seed=job.seed * job.epochs + epoch):
                stats += self._step(step_batch, job.loss)
        return stats + _throughput(batch, epochs=job.epochs, seconds=time.perf_counter() - started_s)

    def weights(self) -> Mapping[str, Tensor]:
        """The parameters by Hugging Face name, by reference."""
        return self._strategy.weights()

    def to(self, device: str) -> None:
        """Move weights and optimizer state, e.g. to `cpu` while another role uses the device."""
        self._strategy.to(device)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder and the optimizer's state."""
        self._strategy.save(folder)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._strategy.load(folder)

    def _step(self, batch: Batch, loss: PolicyLoss) -> Stats:
        """One optimizer step. The losses of its micro-batches add up; over steps the reported loss is a mean."""
        stats = Stats()
        for part in micro_batches(batch, max_tokens=self._micro_batch_tokens):
            stats += self._strategy.forward_backward(part, loss)
        metrics = dict(stats) | {"loss": Mean(stats["loss"].value)}
        return Stats(metrics) + self._strategy.optim_step()


def _throughput(batch: Batch, *, epochs: int, seconds: float) -> Stats:
    tokens = float(batch.num_tokens)
    return Stats(
        {
            "tokens": Sum(tokens * epochs),
            "loss_tokens": Sum(float(batch.num_loss_tokens) * epochs),
            "tokens_per_s": Mean(tokens * epochs, seconds),
            "padding_avoided": Mean(len(batch) * max(batch.lengths) - tokens, len(batch) * max(batch.lengths)),
        }
    )
