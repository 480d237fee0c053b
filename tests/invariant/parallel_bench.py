"""A model that is put through the same by one process and by several: what they are held to is the same for every strategy.

The sums behind a gradient are taken in another order, which shows in the seventh digit of losses and norms. Adam divides by
the size of a gradient, so for a weight whose gradient is nearly zero that digit becomes a visible part of a step: weights
are held to a hundredth of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from warm import FORKS

from reroll.config.parts import LoraConfig, ModelConfig, OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.models.load import Head
from reroll.observe.metrics import Stats
from reroll.runtime.base import WorkerInfo
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Loss, Needs, Predictions, required
from reroll.training.cluster import PredictJob, Rendezvous, TrainWorker, train_jobs
from reroll.training.loss import PolicyLoss
from reroll.types import Sample
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig

STEP = 1e-3
OPTIM = OptimConfig(lr=STEP, clip_norm=0.5, weight_decay=0.1)
GRPO = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2}, kl_coef=0.05)
MICRO_BATCH_TOKENS = 30
GROUPS = ((60, 9, 14), (8, 11, 7), (33, 10))
"""Rows of three prompts, by their lengths. One row fills a rank by itself, so ranks have unequal numbers of micro-batches; the
row of 33 has no token in the loss, so that a micro-batch never reaches the head."""


def batch(seed: int, groups: Sequence[Sequence[int]] = GROUPS, *, unit_size: int = 1) -> Batch:
    """Prompts with siblings, and all that a loss may want to know about them."""
    rng = np.random.default_rng(seed)
    samples, advantages = [], []
    for lengths in groups:
        prompt = rng.integers(4, 90, size=4)
        rewards = rng.normal(size=len(lengths)).astype(np.float32)
        for length, reward in zip(lengths, rewards - rewards.mean(), strict=True):
            mask = (np.arange(length) >= 4) & (length != 33)
            ids = np.concatenate([prompt, rng.integers(4, 90, size=length - 4)])
            logp = np.where(mask, rng.normal(-4.5, 0.1, size=length), 0).astype(np.float32)
            samples.append(Sample(ids=ids, loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
            advantages.append(np.where(mask, reward, 0).astype(np.float32))
    packed = pack(samples).replace(advantage=torch.from_numpy(np.concatenate(advantages)))
    noise = torch.from_numpy(rng.normal(0, 0.1, size=packed.num_tokens).astype(np.float32)) * packed.loss_mask
    return packed.replace(
        ref_logp=packed.logp + noise,
        value=noise,
        returns=packed.advantage,
        target_ids=packed.ids[:, None] + torch.arange(1, 4),
        target_logp=torch.from_numpy(rng.normal(size=(packed.num_tokens, 4)).astype(np.float32)).log_softmax(-1),
        label=torch.zeros(len(packed)),
        unit_size=unit_size,
    )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a model is put through."""

    config: ModelConfig
    steps: range = range(2)
    head: Head = "language"
    loss: Loss = GRPO
    asks: Needs | None = None
    """What the model is asked before and after; None: what the loss asks."""
    groups: Sequence[Sequence[int]] = GROUPS
    unit_size: int = 1
    load: Path | None = None
    save: Path | None = None

    def play(self, worker: TrainWorker) -> Outcome:
        if self.load:
            worker.load(self.load)
        num_weights = len(worker.weights())  # Before the first pass: an engine gets its weights then.
        # The first pass may be about the model without its adapter, as a reference.
        needs = self.asks or self.loss.needs
        start = worker.predict(PredictJob(self.rows(8), replace(needs, adapter=False)))
        stats = [self.update(worker, self.rows(step)) for step in self.steps]
        if self.save:
            worker.save(self.save)
        end = worker.predict(PredictJob(self.rows(9), needs))
        weights = {name: weight.clone() for name, weight in worker.weights().items()}
        groups = worker._strategy._optimizer.param_groups  # type: ignore[attr-defined]
        num_held = sum(parameter.numel() for group in groups for parameter in group["params"])
        return Outcome(stats, weights, num_weights, num_held, answers_of(start), answers_of(end))

    def rows(self, seed: int) -> Batch:
        return batch(seed, self.groups, unit_size=self.unit_size)

    def update(self, worker: TrainWorker, rows: Batch) -> Stats:
        """This rank's part of two optimizer steps, as the controller would deal it out."""
        if self.loss.compares_with_old_policy:
            rows = rows.replace(old_logp=required(worker.predict(PredictJob(rows, Needs())).logp))
        ranks = worker._strategy.data_parallel
        return worker.train(train_jobs(rows, self.loss, steps_per_epoch=2, dp_size=ranks.size)[ranks.rank])


def answers_of(predictions: Predictions) -> dict[str, Tensor]:
    return {name: answer for name, answer in asdict(predictions).items() if answer is not None}


@dataclass(frozen=True)
class Outcome:
    """What has come of a scenario."""

    stats: list[Stats]
    weights: dict[str, Tensor]
    num_weights_at_start: int
    num_held: int
    """Numbers in this process that the optimizer works on."""
    answers_at_start: dict[str, Tensor]
    answers: dict[str, Tensor]


def play_as_rank(scenario: Scenario, rank: int, num_ranks: int, rendezvous: str) -> Outcome:
    info = WorkerInfo("policy", rank, num_ranks, "cpu")
    try:
        worker = TrainWorker(info, scenario.config, total_steps=6, head=scenario.head, rendezvous=rendezvous)
        return scenario.play(worker)
    finally:
        dist.destroy_process_group()


def model_config(folder: Path, strategy: TorchStrategyConfig | Fsdp2StrategyConfig, *, lora: bool = False) -> ModelConfig:
    adapter = LoraConfig(rank=4) if lora else None
    return ModelConfig(model=str(folder), strategy=strategy, optim=OPTIM, lora=adapter, devices="cpu")


def fsdp2(**options: Any) -> Fsdp2StrategyConfig:
    return Fsdp2StrategyConfig(kind="fsdp2", micro_batch_tokens=MICRO_BATCH_TOKENS, logprob_chunk=7, **options)


def played_by_ranks(scenario: Scenario, num_ranks: int) -> Outcome:
    rendezvous = Rendezvous("127.0.0.1")
    # New ones for every model, as in a run: torch remembers the groups that a process was in.
    with ProcessPoolExecutor(num_ranks, mp_context=FORKS) as pool:
        calls = [pool.submit(play_as_rank, scenario, rank, num_ranks, rendezvous.address) for rank in range(num_ranks)]
        return said_together([call.result() for call in calls], scenario)


def said_together(outcomes: Sequence[Outcome], scenario: Scenario) -> Outcome:
    """What the ranks of one model say, as if they were one process."""
    told = outcomes[:: scenario.config.strategy.ranks_per_share]
    stats = [sum(parts, Stats()) for parts in zip(*(outcome.stats for outcome in told), strict=True)]
    return replace(told[0], stats=stats, num_held=max(outcome.num_held for outcome in told))


def played_alone(config: ModelConfig, kind: type[Scenario] = Scenario, **scenario: Any) -> Outcome:
    plain = config.model_copy(update={"strategy": TorchStrategyConfig(micro_batch_tokens=MICRO_BATCH_TOKENS)})
    worker = TrainWorker(WorkerInfo("policy", 0, 1, "cpu"), plain, total_steps=6, head=scenario.get("head", "language"))
    return kind(config=plain, **scenario).play(worker)


def assert_same(ours: Outcome, expected: Outcome) -> None:
    for mine, theirs in zip(ours.stats, expected.stats, strict=True):
        assert without_time(mine) == pytest.approx(without_time(theirs), rel=1e-4, abs=1e-6)
    assert ours.weights.keys() == expected.weights.keys()
    assert ours.num_weights_at_start == len(expected.weights)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=0.01 * STEP)
    torch.testing.assert_close(ours.answers_at_start, expected.answers_at_start, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.answers, expected.answers, rtol=1e-5, atol=2e-5)


def without_time(stats: Stats) -> dict[str, float]:
    return {name: value for name, value in stats.values_by_name().items() if name != "tokens_per_s"}
