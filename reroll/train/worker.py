"""The worker that holds a model and its strategy, and the loop of epochs, mini-batches and micro-batches, written once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from reroll.config.parts import ModelConfig
from reroll.errors import ModelError
from reroll.models.heads import keep_padding_apart, score_head
from reroll.models.load import DTYPES, Head, load_model, load_tokenizer
from reroll.observe.metrics import Mean, Stats, Sum
from reroll.runtime.base import WorkerInfo
from reroll.tokens.batch import Batch
from reroll.tokens.packing import fill, micro_batches, mini_batches
from reroll.train.base import Loss, Needs, Predictions, join_predictions
from reroll.train.torch_strategy import TorchStrategy


@dataclass(frozen=True, slots=True)
class PredictJob:
    """One question: what do you say about this batch?"""

    batch: Batch
    needs: Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One update: a batch, the loss, and how often to go through it."""

    batch: Batch
    loss: Loss
    epochs: int = 1
    mini_batches: int = 1
    """Optimizer steps per epoch, at most the number of sequences."""
    seed: int = 0
    """Of the cut into mini-batches, which differs from epoch to epoch."""


class TrainWorker:
    """Holds one model: to train for `total_steps` optimizer steps, or, with 0 of them, only to answer."""

    def __init__(self, info: WorkerInfo, config: ModelConfig, *, total_steps: int, head: Head = "language") -> None:
        self._world_size = info.world_size
        self._micro_batch_tokens = config.strategy.micro_batch_tokens
        dtype = DTYPES[config.strategy.precision]
        model = load_model(config.model, dtype=dtype, device=info.device, head=head, lora=config.lora)
        tokenizer = load_tokenizer(config.model)
        if head == "score":
            keep_padding_apart(model, tokenizer)
        if total_steps == 0:
            if head == "score" and not score_head(model).weight.any():
                raise ModelError(f"{config.model} has no scalar head: name a reward model, e.g. one of pipeline reward_model")
            model.requires_grad_(False)  # Then it has no master weights either.
        self._strategy = TorchStrategy(model, tokenizer, config.strategy, config.optim, total_steps=total_steps, head=head)

    def predict(self, job: PredictJob) -> Predictions:
        """What the model says about a batch, on the CPU."""
        parts = fill(job.batch.lengths, max_tokens=self._micro_batch_tokens)
        answers = [self._strategy.forward(job.batch.select(part), job.needs) for part in parts]
        return join_predictions(job.batch, parts, answers)

    def train(self, job: TrainJob) -> Stats:
        """Go through the batch, one optimizer step per mini-batch.

        With a single step the policy has not moved when it meets a token, so the training pass itself gives the old
        log-probs. With several they are computed first, unless the batch brings them.
        """
        if self._world_size > 1:
            raise ValueError(f"strategy torch trains on one device, got {self._world_size}: name one in policy.devices")
        started_s = time.perf_counter()
        batch = job.batch
        if job.epochs * job.mini_batches > 1 and batch.old_logp is None and job.loss.compares_with_old_policy:
            batch = batch.replace(old_logp=self.predict(PredictJob(batch, Needs())).logp)
        stats = Stats()
        for epoch in range(job.epochs):
            for step_batch in mini_batches(batch, job.mini_batches, seed=job.seed * job.epochs + epoch):
                stats += self._step(step_batch, job.loss)
        return stats + _throughput(batch, epochs=job.epochs, seconds=time.perf_counter() - started_s)

    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        """The parameters that are trained (or those that are frozen) by Hugging Face name, by reference."""
        return self._strategy.weights(frozen=frozen)

    def to(self, device: str) -> None:
        """Move weights and optimizer state, e.g. to `cpu` while another role uses the device."""
        self._strategy.to(device)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder and the optimizer's state."""
        self._strategy.save(folder)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._strategy.load(folder)

    def _step(self, batch: Batch, loss: Loss) -> Stats:
        """One optimizer step. The losses of its micro-batches add up; over steps the reported loss is a mean."""
        stats = Stats()
        batch = loss.prepare(batch)
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
