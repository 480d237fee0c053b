"""What a step's samples earned, turned into one advantage per token. Pure functions `(episodes, **options) -> [T]`.

All give 0 on tokens nobody wrote and nothing on an empty batch. An episode in which nothing was written still counts
in the statistics of its group. Where nothing differs nothing is better: equal rewards, and a group of one against its
own mean, give exact zeros.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from reroll.algo.episodes import Episodes
from reroll.algo.segments import centre, in_deviations, normalise


def normalised(
    episodes: Episodes,
    *,
    mean: Literal["none", "group", "leave_one_out", "batch", "running"],
    std: Literal["none", "group", "batch", "batch_centred", "running"],
    epsilon: float,
) -> Tensor:
    """(reward - mean) / (std + epsilon), the same on all tokens of an episode. Sample deviation (divisor n - 1).

    leave_one_out: the mean of the siblings without the sample itself. batch_centred: the deviation of reward - mean
    rather than of the reward. running: over all steps so far. Zeros where the deviation is 0.
    """
    reward, group = episodes.reward, episodes.group
    if mean == "running":
        reward, mean = reward - episodes.running_mean, "none"
    if std == "running":
        deviation = torch.full_like(reward, episodes.running_std)
        return episodes.spread(in_deviations(centre(reward, group, mean=mean), deviation, epsilon=epsilon))
    return episodes.spread(normalise(reward, group, mean=mean, std=std, epsilon=epsilon))


def gae(episodes: Episodes, *, discount: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation over written tokens (arXiv 1506.02438): the sum of what each token and those after
    it brought beyond the critic's estimate, the n-th times (discount * gae_lambda)^n.

    The token after one that ends a turn is the first of the next turn. After the last token nothing is to come, for
    truncated episodes too.
    """
    value = episodes.rows(_critic_value(episodes))
    following = pad(value, (0, 1))[:, 1:]
    surprise = episodes.flat(episodes.rows(episodes.token_reward) + discount * following - value)
    return episodes.to_go(surprise, discount=discount * gae_lambda)


def gae_returns(episodes: Episodes, *, discount: float, gae_lambda: float) -> Tensor:
    """[T]: targets of the critic, `gae` plus its estimates; 0 on tokens that the policy did not write.

    With gae_lambda 1 these are the returns themselves, whatever the policy's gae_lambda is (VC-PPO, arXiv 2503.01491).
    """
    value = episodes.fill(_critic_value(episodes)[episodes.written])
    return gae(episodes, discount=discount, gae_lambda=gae_lambda) + value


def _critic_value(episodes: Episodes) -> Tensor:
    if episodes.value is None:
        raise ValueError("gae needs a critic's values, and there are none: add a critic, or choose another advantage")
    return episodes.value
