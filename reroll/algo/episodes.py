"""What a step's samples earned, laid out as flat tensors: all that an advantage estimator sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from reroll.algo.segments import discounted_sum, segment_position, segment_sum


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """N episodes (trajectories) of M turns and T packed tokens. Siblings of a prompt are one group.

    A turn here is one with at least one token to train on: rewards of empty turns are counted to a neighbour.
    Tokens nobody wrote (prompts, environment replies) have turn -1 and take part in nothing.
    """

    group: Tensor
    """[N] int64, from 0: which prompt."""
    reward: Tensor
    """[N] what the episode earned in all; the sum of its turn rewards."""
    turn_episode: Tensor
    """[M] int64, not decreasing: which episode a turn belongs to; turns of one episode in order of time."""
    turn_reward: Tensor
    """[M] what each turn earned; a reward for the outcome is counted to the last turn."""
    turn_state: Tensor
    """[M] int64: equal for turns of one group that started from the same state of the environment."""
    token_turn: Tensor
    """[T] int64: which turn wrote the token, -1 for nobody. Does not decrease from one written token to the next."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each: the named parts of the reward, where there are several; 0 in an episode that has no such part."""
    part_weights: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each: what a part counts by the reward itself; 1 for parts that are not named here."""
    baseline: Tensor | None = None
    """[N] what the policy's greedy answer to the same prompt earned."""
    running_mean: float = 0.0
    """Mean of the rewards of all steps so far, this one included."""
    running_std: float = 0.0
    penalty: Tensor | None = None
    """[T] taken off the reward of each token, e.g. a KL penalty; already counted in `reward` and `turn_reward`."""
    value: Tensor | None = None
    """[T] the critic's estimate of what is still to come, before the token is written."""
    score_norm: Tensor | None = None
    """[T] squared norm of the gradient of the token's log-prob in its logits: 1 - 2 p(token) + sum of p squared."""
    entropy: Tensor | None = None
    """[T] of the policy's whole distribution where the token was drawn, before the update."""

    @property
    def num_episodes(self) -> int:
        return len(self.reward)

    @property
    def num_groups(self) -> int:
        return int(self.group.max()) + 1 if len(self.group) else 0

    @cached_property
    def written(self) -> Tensor:
        """[W] indices into T of the tokens the policy wrote."""
        return (self.token_turn >= 0).nonzero().squeeze(1)

    @cached_property
    def token_episode(self) -> Tensor:
        """[W] which episode each written token belongs to."""
        return self.turn_episode[self.token_turn[self.written]]

    @cached_property
    def length(self) -> Tensor:
        """[N] tokens written, as a float."""
        return torch.bincount(self.token_episode, minlength=self.num_episodes).to(self.reward.dtype)

    @cached_property
    def gross_reward(self) -> Tensor:
        """[N] `reward` before the penalty: what says whether an answer is right."""
        if self.penalty is None:
            return self.reward
        return self.reward + segment_sum(self.penalty[self.written], self.token_episode, self.num_episodes)

    @cached_property
    def token_reward(self) -> Tensor:
        """[T] each turn's reward on its last token, less the penalty of every token. Sums to `reward` per episode."""
        turn_reward, per_token = self.turn_reward, self.turn_reward.new_zeros(len(self.token_turn))
        if self.penalty is not None:
            turn_of_token = self.token_turn[self.written]
            penalty = self.penalty[self.written]
            turn_reward = turn_reward + segment_sum(penalty, turn_of_token, len(turn_reward))  # Not counted twice.
            per_token[self.written] -= penalty
        last = torch.zeros(len(self.turn_episode), dtype=torch.int64)
        last = last.scatter_reduce(0, self.token_turn[self.written], self.written, "amax")
        return per_token.index_add(0, last, turn_reward)

    @property
    def is_last_turn(self) -> Tensor:
        """[M] bool: whether no turn of the episode follows."""
        is_last = torch.ones_like(self.turn_episode, dtype=torch.bool)
        is_last[:-1] = self.turn_episode[1:] != self.turn_episode[:-1]
        return is_last

    def penalised(self, penalty: Tensor) -> Episodes:
        """The same episodes with `penalty` [T] taken off what their tokens, turns and they themselves earned."""
        written = penalty[self.written]
        return replace(
            self,
            reward=self.reward - segment_sum(written, self.token_episode, self.num_episodes),
            turn_reward=self.turn_reward - segment_sum(written, self.token_turn[self.written], len(self.turn_reward)),
            penalty=penalty,
        )

    def spread(self, per_episode: Tensor) -> Tensor:
        """[N] -> [T]: each episode's number on every token it wrote, 0 elsewhere."""
        return self.spread_turns(per_episode[self.turn_episode])

    def spread_turns(self, per_turn: Tensor) -> Tensor:
        """[M] -> [T]: each turn's number on every token it wrote, 0 elsewhere."""
        return torch.cat([per_turn, per_turn.new_zeros(1)])[self.token_turn]

    def fill(self, per_written: Tensor) -> Tensor:
        """[W] -> [T]: 0 on tokens nobody wrote."""
        return per_written.new_zeros(len(self.token_turn)).index_copy(0, self.written, per_written)

    def to_go(self, per_token: Tensor, *, discount: float) -> Tensor:
        """[T] -> [T]: each written token's value and those that follow in its episode, the n-th times discount^n."""
        sums = discounted_sum(per_token[self.written], self.token_episode, self.num_episodes, discount=discount)
        return self.fill(sums)

    def rows(self, per_token: Tensor) -> Tensor:
        """[T] -> [N, L]: the written tokens of each episode from column 0 on, zeros behind them."""
        width = int(self.position.max()) + 1 if len(self.written) else 0
        rows = per_token.new_zeros(self.num_episodes, width)
        rows[self.token_episode, self.position] = per_token[self.written]
        return rows

    def flat(self, rows: Tensor) -> Tensor:
        """[N, L] -> [T]: back from `rows`; 0 on tokens nobody wrote."""
        return self.fill(rows[self.token_episode, self.position])

    @cached_property
    def position(self) -> Tensor:
        """[W] the place of each written token among those of its episode, from 0."""
        return segment_position(self.token_episode, self.num_episodes)
