"""Losses that learn from preferences: one value per pair, or per judged answer.

A log-ratio is log p(answer | prompt) under the policy minus the same under the reference. The margin h of a pair is the
log-ratio of the chosen answer minus that of the rejected one; without a reference it is a difference of log-probs, and of
log odds for ORPO. Where a loss normalises by length, each log-prob is first divided by the number of tokens of its answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sigmoid(margin: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log sigma(beta * h): DPO, arXiv 2305.18290.

    With `label_smoothing` e the labels are taken to be wrong that often: the loss becomes
    -(1 - e) log sigma(beta * h) - e log sigma(-beta * h), conservative DPO (ericmitchell.ai/cdpo.pdf).
    """
    return -(1 - label_smoothing) * logsigmoid(beta * margin) - label_smoothing * logsigmoid(-beta * margin)


def ipo(margin: Tensor, *, beta: float) -> Tensor:
    """(h - 1 / (2 beta))²: IPO, arXiv 2310.12036, equation 17, whose tau is `beta`. The margin is drawn to a finite goal."""
    return (margin - 1 / (2 * beta)).square()


def hinge(margin: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - beta * h): SLiC's loss (arXiv 2305.10425) on log-ratios, as RSO has it (2309.06657, hinge-norm)."""
    return torch.relu(1 - beta * margin)


def simpo(margin: Tensor, *, beta: float, gamma: float) -> Tensor:
    """-log sigma(beta * h - gamma): SimPO, arXiv 2405.14734. h is per token and has no reference; `gamma` is the target."""
    return -logsigmoid(beta * margin - gamma)


def orpo(margin: Tensor, *, beta: float) -> Tensor:
    """-beta * log sigma(h): the odds-ratio term of ORPO, arXiv 2403.07691, equations 6 and 7, whose lambda is `beta`.

    h is the difference of the `log_odds` of mean log-probs and has no reference. The rest of the paper's loss is
    `negative_log_likelihood` of the chosen answer.
    """
    return -beta * logsigmoid(margin)


PREFERENCES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
    "hinge": hinge,
    "simpo": simpo,
    "orpo": orpo,
}
"""Losses of pairs by config name: (margin [P], **options) -> [P]."""


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)), of log p. A p that is 1 to rounding has the odds of the next smaller one, which are finite."""
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    # `expm1` keeps the digits of 1 - p near p = 1. For small p its logarithm rounds to 0, which beside log p it is.
    return logp - torch.log(-torch.expm1(logp))


def negative_log_likelihood(logp: Tensor, num_tokens: Tensor) -> Tensor:
    """Minus the mean log-prob of an answer's tokens, of their sum: the SFT term of RPO, arXiv 2404.19733."""
    return -logp / num_tokens


def kto(
    log_ratio: Tensor,
    is_desirable: Tensor,
    *,
    reference_point: float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """[N] -> [N]: KTO, arXiv 2402.01306, for answers that were judged one by one.

    weight * (1 - sigma(± beta * (log-ratio - reference point))), with + for desirable answers.
    """
    above = beta * (log_ratio - reference_point)
    return torch.where(is_desirable, desirable_weight * torch.sigmoid(-above), undesirable_weight * torch.sigmoid(above))


def kto_reference_point(mismatched_log_ratio: Tensor) -> float:
    """How far the policy is from the reference: max(0, the mean log-ratio of answers to other prompts than their own)."""
    return max(0.0, float(mismatched_log_ratio.double().mean()))


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """-log sigma(chosen - rejected - margin), for scores [P]: a reward model's loss (arXiv 2203.02155, equation 1).

    The margin (arXiv 2307.09288, equation 2) is by how much the better answer should win; 0 asks for no particular gap.
    """
    return -logsigmoid(chosen - rejected - margin)
