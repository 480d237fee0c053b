"""From a picklable description of a loss to the function a strategy differentiates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reroll.algo.kl import KL_ESTIMATORS
from reroll.algo.losses import LOSSES
from reroll.algo.reduce import aggregate
from reroll.config.algorithm import Aggregation, KlConfig, PpoLoss, ReinforceLoss
from reroll.observe.metrics import Max, Mean, Stats, Sum
from reroll.tokens.batch import Batch
from reroll.train.base import LossOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss as plain data, so that it travels to workers; called, it is a `Loss`."""

    kind: str
    """A key of LOSSES."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that loss."""
    aggregation: Aggregation = "token_mean"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"

    @classmethod
    def from_config(cls, loss: PpoLoss | ReinforceLoss, *, aggregation: Aggregation, kl: KlConfig) -> PolicyLoss:
        return cls(
            kind=loss.kind,
            options=loss.model_dump(exclude={"kind"}),
            aggregation=aggregation,
            kl_coef=kl.coef,
            kl_estimator=kl.estimator,
        )

    def __call__(self, batch: Batch, logp: Tensor) -> LossOutput:
        """Where `batch.old_logp` is None the policy has not moved yet: `logp` itself, held fixed, takes its place."""
        old_logp = logp.detach() if batch.old_logp is None else batch.old_logp
        per_token = LOSSES[self.kind](logp, old_logp, batch.advantage, **self.options)
        stats = _stats(batch, logp.detach(), old_logp)
        if self.kl_coef:
            if batch.ref_logp is None:
                raise ValueError("the loss has a KL penalty but the batch has no ref_logp: compute it with the reference model")
            kl = KL_ESTIMATORS[self.kl_estimator](logp, batch.ref_logp)
            per_token = per_token + self.kl_coef * kl
            stats += Stats({"kl_ref": _mean(kl.detach()[batch.loss_mask])})
        if "clip_low" in self.options:
            stats += Stats({"clip_fraction": self._clip_fraction(batch, logp.detach(), old_logp)})
        loss = aggregate(
            per_token,
            batch.loss_mask,
            batch.sequence_index,
            mode=self.aggregation,
            num_loss_tokens=batch.num_loss_tokens,
            num_sequences=batch.num_sequences,
        )
        return LossOutput(loss, stats + Stats({"loss": Sum(float(loss.detach()))}))

    def _clip_fraction(self, batch: Batch, logp: Tensor, old_logp: Tensor) -> Mean:
        """Share of tokens that clipping keeps from the gradient: gone too far in the direction the advantage wants."""
        ratio = torch.exp(logp - old_logp)
        too_high = (ratio > 1 + self.options["clip_high"]) & (batch.advantage > 0)
        too_low = (ratio < 1 - self.options["clip_low"]) & (batch.advantage < 0)
        return _mean((too_high | too_low)[batch.loss_mask])


SFT_LOSS = PolicyLoss(kind="reinforce")
"""With advantage 1 on every token: the mean cross-entropy."""


def _stats(batch: Batch, logp: Tensor, old_logp: Tensor) -> Stats:
    mask = batch.loss_mask
    if not mask.any():
        return Stats()
    from_old = (logp - old_logp)[mask]
    from_sampler = (logp - batch.logp)[mask]
    ratio = from_old.exp()
    return Stats(
        {
            "ratio": _mean(ratio),
            "ratio_max": Max(float(ratio.max())),
            "kl_old": _mean(torch.expm1(from_old) - from_old),
            "sampler_gap": _mean(from_sampler.abs()),
            "sampler_gap_max": Max(float(from_sampler.abs().max())),
            "entropy": _mean(-logp[mask]),
        }
    )


def _mean(values: Tensor) -> Mean:
    return Mean(float(values.sum(dtype=torch.float64)), float(values.numel()))
