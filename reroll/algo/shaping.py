"""What is done to rewards before any estimator, and to advantages after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reroll.algo.episodes import Episodes
from reroll.algo.segments import in_deviations, normalise, segment_mean, segment_std

WHITEN_EPSILON = 1e-8
"""Added to the standard deviation. Small, since values of every scale are whitened."""


def shape_rewards(episodes: Episodes, *, length: Mapping[str, float] | None, clip: float | None) -> Episodes:
    """The same episodes with other rewards: weighted by length, then clipped to [-clip, clip]; None leaves a part out.

    Both act on the reward before the penalty. What an episode gains or loses is counted to its last turn. The named
    parts stay as they are. A baseline is clipped with the rewards it is compared with; it has no length here to be weighted by.
    """
    gross, baseline = episodes.gross_reward, episodes.baseline
    shaped = gross if length is None else gross * length_weight(episodes, **length)
    if clip is not None:
        shaped = shaped.clamp(-clip, clip)
        baseline = None if baseline is None else baseline.clamp(-clip, clip)
    return replace(_with_gain(episodes, shaped - gross), baseline=baseline)


def standardised(episodes: Episodes, *, mean: Tensor, std: Tensor) -> Episodes:
    """The same episodes with rewards before the penalty, and baselines, as deviations: (reward - mean) / std, both [N].

    Where the deviation is 0 only the mean is taken off. What an episode gains or loses is counted to its last turn.
    """

    def scaled(rewards: Tensor) -> Tensor:
        return torch.where(std > 0, (rewards - mean) / (std + WHITEN_EPSILON), rewards - mean)

    baseline = None if episodes.baseline is None else scaled(episodes.baseline)
    return replace(_with_gain(episodes, scaled(episodes.gross_reward) - episodes.gross_reward), baseline=baseline)


def _with_gain(episodes: Episodes, gain: Tensor) -> Episodes:
    turn_gain = torch.where(episodes.is_last_turn, gain[episodes.turn_episode], 0)
    return replace(episodes, reward=episodes.reward + gain, turn_reward=episodes.turn_reward + turn_gain)


def shape_advantages(
    advantage: Tensor, episodes: Episodes, *, difficulty: Mapping[str, float] | None, whiten: bool, clip: float | None
) -> Tensor:
    """[T] -> [T]: weighted by difficulty, then whitened, then clipped to [-clip, clip]; None leaves a part out."""
    if difficulty is not None:
        advantage = advantage * difficulty_weight(advantage, episodes, **difficulty)
    if whiten:
        advantage = whitened(advantage, episodes)
    return advantage if clip is None else advantage.clamp(-clip, clip)


def whitened(per_token: Tensor, episodes: Episodes) -> Tensor:
    """[T] -> [T]: mean 0 and standard deviation 1 over all written tokens; zeros where they are all equal."""
    values = per_token[episodes.written].double()  # Single precision cannot even count to 20 million tokens.
    batch = torch.zeros_like(episodes.written)
    white = normalise(values, batch, mean="batch", std="batch", epsilon=WHITEN_EPSILON)
    return episodes.fill(white.to(per_token.dtype))


def length_weight(episodes: Episodes, *, strength: float, threshold: float) -> Tensor:
    """[N]: exp(-strength * z) for right answers, 1 for others: what is shorter than the group's other right answers earns
    more (GRPO-LEAD, arXiv 2504.09696).

    z is how many standard deviations longer the answer is than the right answers of its group; 0 if it is the only one.
    """
    right = episodes.gross_reward >= threshold
    length, group = episodes.length[right], episodes.group[right]
    centred = length - segment_mean(length, group, episodes.num_groups)[group]
    deviation = segment_std(length, group, episodes.num_groups)[group]
    weight = torch.ones_like(episodes.reward)
    weight[right] = torch.exp(-strength * in_deviations(centred, deviation, epsilon=1e-6))
    return weight


def difficulty_weight(
    advantage: Tensor, episodes: Episodes, *, low: float, high: float, midpoint: float, steepness: float, threshold: float
) -> Tensor:
    """[T]: what is good weighs more where few siblings are right, what is bad where many are (GRPO-LEAD, arXiv 2504.09696).

    w(p) = low + (high - low) / (1 + exp(steepness * (p - midpoint))) of the group's share p of right answers where the
    advantage is positive, w(1 - p) elsewhere.
    """
    right = (episodes.gross_reward >= threshold).to(advantage.dtype)
    share = segment_mean(right, episodes.group, episodes.num_groups)[episodes.group]

    def weight(share: Tensor) -> Tensor:
        return episodes.spread(low + (high - low) * torch.sigmoid(-steepness * (share - midpoint)))

    return torch.where(advantage > 0, weight(share), weight(1 - share))


class RunningMoments:
    """Welford's running mean and sum of squared deviations, in double precision."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Sample standard deviation (divisor n - 1); 0 for fewer than two rewards."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, rewards: Tensor | Sequence[float]) -> None:
        """Count a step's rewards in."""
        values = rewards.tolist() if isinstance(rewards, Tensor) else list(rewards)
        for value in values:
            self.count += 1
            above = value - self.mean
            self.mean += above / self.count
            self._squares += above * (value - self.mean)

    def state(self) -> dict[str, float]:
        """All there is to know, as JSON."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` gave."""
        self.count, self.mean, self._squares = int(state["count"]), state["mean"], state["squares"]
