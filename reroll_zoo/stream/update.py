"""An update that begins while the last samples of its step are still being written (`train.stream`)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from reroll.algo.episodes import Episodes
from reroll.observe.metrics import Last, Mean, Stats
from reroll.pipeline.credit import advantage_stats, kl_to_reference
from reroll.pipeline.rlvr import GroupLearner
from reroll.tokens.batch import Batch, pack
from reroll.tokens.samples import rows_of
from reroll.types import Group

DENOMINATOR = 1024
"""What losses are divided by until the step's own denominator is known. A power of two: to correct it rounds once."""


class StreamedUpdate:
    """One optimizer step of the policy, whose gradient is added up as groups come in.

    Groups wait until they fill a micro-batch on every rank, so that there are about as many passes as for the whole step.
    Weights change in `finish` only: every pass is by the weights that the step began with, and the gradient is that of the
    whole step, summed in another order.
    """

    def __init__(self, learner: GroupLearner, step: int) -> None:
        self._learner, self._step = learner, step
        self._pass_tokens = learner.policy.num_shares * learner.config.policy.strategy.pass_tokens
        self._waiting: list[Group] = []
        self._last: tuple[Batch, Episodes, Sequence[Group]] | None = None
        self._stats = Stats()
        self._kl = Mean(0.0, 0.0)
        self._advantages: list[Tensor] = []
        self._num_loss_tokens = self._num_sequences = 0
        self.busy_s = 0.0
        """Seconds of training until now."""

    async def add(self, groups: Sequence[Group]) -> None:
        """Train on these groups and those that wait, if there is enough for a pass; else they wait too."""
        self._waiting += groups
        num_tokens = sum(one.num_completion_tokens for group in self._waiting for one in group.trajectories)
        if num_tokens >= self._pass_tokens:
            await self._train()

    async def finish(self) -> Stats:
        """Train on the groups that wait, and take the optimizer step."""
        learner, streamed_s = self._learner, self.busy_s
        with learner.context.view.doing(lambda: "training on the last samples"):
            await self._train()
            started_s = time.perf_counter()
            async with learner.parts.devices.lease("policy"):
                stats = await self._apply()
        train_s = self.busy_s + time.perf_counter() - started_s
        return stats + Stats({"time/train_s": Last(train_s), "time/streamed_s": Last(streamed_s)})

    async def _apply(self) -> Stats:
        """Take the optimizer step, by the step's own denominator."""
        learner, stats = self._learner, self._stats + self._learned()
        by_tokens = learner.config.aggregation == "token_mean"
        if denominator := self._num_loss_tokens if by_tokens else self._num_sequences:
            stats += await learner.policy.apply(scale=DENOMINATOR / denominator)
        if self._last is not None:
            await learner.check_sampler(stats, *self._last, self._step)
        await learner.sync_reference(num_steps=self._step + 1)
        return stats

    async def _train(self) -> None:
        groups, self._waiting = self._waiting, []
        samples, episodes = rows_of(groups)
        if not samples:
            return
        started_s, learner = time.perf_counter(), self._learner
        batch = learner.with_temperature(pack(samples), episodes, groups)
        async with learner.parts.devices.lease("policy"):
            batch, episodes = await learner.add_reference_and_values(batch, episodes)
            batch = await learner.credit(batch, episodes, groups)
            await self._accumulate(batch.without_untrained())
        self._note(batch)
        self._last = batch, episodes, groups
        self.busy_s += time.perf_counter() - started_s

    async def _accumulate(self, batch: Batch) -> None:
        if not batch.loss_mask.any():
            return
        self._num_loss_tokens += batch.num_loss_tokens
        self._num_sequences += batch.num_sequences
        loss = self._learner.loss_of(self._step)
        self._stats += await self._learner.policy.accumulate(batch, loss, denominator=DENOMINATOR)

    def _note(self, batch: Batch) -> None:
        self._advantages.append(batch.advantage[batch.loss_mask])
        if (kl := kl_to_reference(batch)) is not None:
            self._kl += Mean(kl * len(self._advantages[-1]), float(len(self._advantages[-1])))

    def _learned(self) -> Stats:
        """What the advantages and the KL of the whole step look like."""
        kl = self._kl.value if self._kl.weight else None
        return advantage_stats(torch.cat([*self._advantages, torch.empty(0)])) + self._learner.kl_stats(kl)
