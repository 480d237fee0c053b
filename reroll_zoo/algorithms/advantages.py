"""Estimators beyond the core's `normalised` and `gae`. They keep to what `reroll.algo.advantages` promises."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from reroll.algo.episodes import Episodes
from reroll.algo.segments import centre, discounted_sum, normalise, segment_mean, segment_sum
from reroll.algo.shaping import whitened


def remax(episodes: Episodes) -> Tensor:
    """Reward minus what the greedy answer to the same prompt earned (arXiv 2310.10505)."""
    if episodes.baseline is None:
        raise ValueError("remax compares with the policy's greedy answers, and there are none: sample one for each prompt")
    return episodes.spread(episodes.reward - episodes.baseline)


def opo(episodes: Episodes) -> Tensor:
    """Reward minus the group's mean reward weighted by length (arXiv 2505.23585).

    That baseline has the least variance if a sample's squared gradient grows with its number of tokens.
    """
    baseline = segment_mean(episodes.reward, episodes.group, episodes.num_groups, weight=episodes.length)
    return episodes.spread(episodes.reward - baseline[episodes.group])


def gpg(episodes: Episodes) -> Tensor:
    """alpha * (reward - group mean), alpha = samples / samples in groups whose rewards differ (arXiv 2504.02546).

    Groups whose rewards are all equal have no gradient but count in the loss's denominator: alpha undoes that.
    """
    centred = centre(episodes.reward, episodes.group, mean="group")
    differing = segment_sum(centred.abs(), episodes.group, episodes.num_groups)[episodes.group] > 0
    return episodes.spread(centred * len(centred) / max(int(differing.sum()), 1))


def gdpo(episodes: Episodes, *, weights: dict[str, float], epsilon: float) -> Tensor:
    """Each part of the reward normalised in its group, summed by weight, and normalised over the batch (arXiv 2601.05242).

    `weights` names the parts that count; empty: all of them, each as the reward weighs it. A part of which no episode here
    has any adds nothing: its domain may have no group in this step.
    """
    if not episodes.parts:
        raise ValueError("gdpo needs the named parts of the reward, and there are none: return a Score with parts")
    if weights and not weights.keys() & episodes.parts.keys():
        raise ValueError(
            f"gdpo weighs {', '.join(sorted(weights))}, which is no part of the reward: "
            f"name some of {', '.join(sorted(episodes.parts))} in advantage.weights"
        )
    total = torch.zeros_like(episodes.reward)
    for name, part in episodes.parts.items():
        weight = weights.get(name, 0.0) if weights else episodes.part_weights.get(name, 1.0)
        total += weight * normalise(part.to(total.dtype), episodes.group, mean="group", std="group", epsilon=epsilon)
    return episodes.spread(normalise(total, episodes.group, mean="batch", std="batch", epsilon=epsilon))


def pass_at_k(episodes: Episodes, *, k: int, threshold: float) -> Tensor:
    """The exact mean, over all sets of k siblings that hold the sample, of whether the set has a right answer, less the
    group's mean, in standard deviations (arXiv 2508.10751).

    Right is a reward, before the penalty, of at least `threshold`. Zeros for groups of k or fewer, groups with no right
    answer, and groups in which every set has one.
    """
    right = episodes.gross_reward >= threshold
    size = torch.bincount(episodes.group, minlength=episodes.num_groups)
    wrong = torch.bincount(episodes.group[~right], minlength=episodes.num_groups)
    pairs = [_pass_at_k(n, num_wrong, k) for n, num_wrong in zip(size.tolist(), wrong.tolist(), strict=True)]
    by_group = episodes.reward.new_tensor(pairs).reshape(-1, 2)
    return episodes.spread(by_group[episodes.group, right.long()])


def _pass_at_k(size: int, num_wrong: int, k: int) -> tuple[float, float]:
    """The advantages of a wrong and of a right answer."""
    if size < k:
        return 0.0, 0.0
    mean = 1 - math.comb(num_wrong, k) / math.comb(size, k)
    deviation = math.sqrt(mean * (1 - mean))
    if deviation == 0:
        return 0.0, 0.0
    passes_beside_a_wrong = 1 - math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)
    return (passes_beside_a_wrong - mean) / deviation, (1 - mean) / deviation


def raft(episodes: Episodes, *, accept: Literal["threshold", "best"], threshold: float) -> Tensor:
    """1 for accepted samples, 0 for the others: imitate what was good (arXiv 2304.06767, 2504.11343).

    threshold: every sample whose reward, before the penalty, is at least `threshold`. best: the group's first sample
    with the highest reward.
    """
    if accept == "threshold":
        accepted = episodes.gross_reward >= threshold
    else:
        best = torch.zeros(episodes.num_groups, dtype=episodes.reward.dtype)
        best = best.scatter_reduce(0, episodes.group, episodes.reward, "amax", include_self=False)
        candidates = (episodes.reward == best[episodes.group]).nonzero().squeeze(1)
        first = torch.full((episodes.num_groups,), episodes.num_episodes)
        first = first.scatter_reduce(0, episodes.group[candidates], candidates, "amin")
        accepted = first[episodes.group] == torch.arange(episodes.num_episodes)
    return episodes.spread(accepted.to(episodes.reward.dtype))


def returns(episodes: Episodes, *, discount: float, whiten: bool) -> Tensor:
    """REINFORCE: the discounted sum of the rewards of a token and those after it; the penalty is each token's own.

    whiten: to mean 0 and standard deviation 1 over all written tokens, as REINFORCE++ does (arXiv 2501.03262).
    """
    to_go = episodes.to_go(episodes.token_reward, discount=discount)
    return whitened(to_go, episodes) if whiten else to_go


def optimal_token_baseline(episodes: Episodes, *, tail: Literal["return", "zero"]) -> Tensor:
    """Reward still to come minus its mean over the group at the same place, weighted by the squared norms of the gradients
    up to there (arXiv 2602.07078).

    That baseline has the least variance of those that know the prompt and the place. A token further on than any
    sibling has no one to be compared with: its advantage is its return, or zero.
    """
    if episodes.score_norm is None:
        raise ValueError("optimal_token_baseline needs the policy's score norms, and there are none: compute them first")
    to_go = episodes.to_go(episodes.token_reward, discount=1.0)[episodes.written]
    weight = episodes.rows(episodes.score_norm).cumsum(1)[episodes.token_episode, episodes.position]
    group = episodes.group[episodes.token_episode]
    width = int(episodes.position.max()) + 1 if len(episodes.position) else 0
    place, num_places = group * width + episodes.position, episodes.num_groups * width
    baseline = segment_mean(to_go, place, num_places, weight=weight)[place]
    if tail == "return":
        is_alone = torch.bincount(place, minlength=num_places)[place] == 1
        baseline = torch.where(is_alone, 0, baseline)
    return episodes.fill(to_go - baseline)


def turn_returns(
    episodes: Episodes,
    *,
    discount: float,
    mean: Literal["none", "group", "batch"],
    std: Literal["none", "group", "batch"],
    epsilon: float,
) -> Tensor:
    """REINFORCE by turns: the discounted sum of the rewards of a turn and those after it, on all tokens of the turn.

    (return - mean) / (std + epsilon), each over all turns of the group, of the batch, or left out.
    """
    group = episodes.group[episodes.turn_episode]
    return episodes.spread_turns(normalise(_turns_to_go(episodes, discount), group, mean=mean, std=std, epsilon=epsilon))


def gigpo(episodes: Episodes, *, discount: float, turn_weight: float, std: Literal["none", "group"], epsilon: float) -> Tensor:
    """Groups in groups (arXiv 2505.10978): the episode's reward normalised among its siblings, plus `turn_weight` times
    the turn's discounted return normalised among the turns of the group that started from the same state.

    A turn whose state no other turn started from adds nothing.
    """
    states = torch.stack([episodes.group[episodes.turn_episode], episodes.turn_state])
    same_state = torch.unique(states, dim=1, return_inverse=True)[1]
    episode = normalise(episodes.reward, episodes.group, mean="group", std=std, epsilon=epsilon)
    turn = normalise(_turns_to_go(episodes, discount), same_state, mean="group", std=std, epsilon=epsilon)
    return episodes.spread(episode) + turn_weight * episodes.spread_turns(turn)


def _turns_to_go(episodes: Episodes, discount: float) -> Tensor:
    return discounted_sum(episodes.turn_reward, episodes.turn_episode, episodes.num_episodes, discount=discount)
