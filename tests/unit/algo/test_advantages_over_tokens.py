"""Token-level estimators against plain loops over the tokens of an episode."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from episode_cases import Case, Episode, Token, Turn, case_of, random_case

from reroll.algo.advantages import gae, gae_returns, normalised
from reroll_zoo.algorithms.advantages import optimal_token_baseline, returns

SEEDS = range(8)


def close(actual: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-9)


def at(episode: Episode, turn: int, place: int) -> int:
    """The place of a token among all that the episode wrote."""
    return sum(len(before.tokens) for before in episode.turns[:turn]) + place


def to_go(episode: Episode, token: int, discount: float) -> float:
    return sum(discount**n * reward for n, reward in enumerate(episode.token_rewards[token:]))


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_returns_are_the_discounted_rewards_still_to_come(discount: float, seed: int) -> None:
    """REINFORCE, with the KL penalty in each token's reward as in REINFORCE++, arXiv 2501.03262."""
    case = random_case(seed)
    expected = case.expect(lambda episode, turn, place: to_go(episode, at(episode, turn, place), discount))
    close(returns(case.flat(), discount=discount, whiten=False), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_returns_have_mean_zero_and_deviation_one_over_all_written_tokens(seed: int) -> None:
    """REINFORCE++, arXiv 2501.03262: over all tokens of the global batch."""
    case = random_case(seed)
    raw = [to_go(episode, token, 0.95) for episode in case.episodes for token in range(len(episode.tokens))]

    def advantage(episode: Episode, turn: int, place: int) -> float:
        return float((to_go(episode, at(episode, turn, place), 0.95) - np.mean(raw)) / np.std(raw, ddof=1))

    actual = returns(case.flat(), discount=0.95, whiten=True)
    np.testing.assert_allclose(actual.numpy(), case.expect(advantage), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_sums_what_each_token_brought_beyond_the_critics_estimate(discount: float, gae_lambda: float, seed: int) -> None:
    """GAE, arXiv 1506.02438, equation 16: sum of (discount * gae_lambda)^l * delta, delta = r + discount * V' - V."""
    case = random_case(seed)

    def delta(episode: Episode, token: int) -> float:
        following = episode.tokens[token + 1].value if token + 1 < len(episode.tokens) else 0.0
        return episode.token_rewards[token] + discount * following - episode.tokens[token].value

    def advantage(episode: Episode, turn: int, place: int) -> float:
        first = at(episode, turn, place)
        return sum((discount * gae_lambda) ** (one - first) * delta(episode, one) for one in range(first, len(episode.tokens)))

    def target(episode: Episode, turn: int, place: int) -> float:
        return advantage(episode, turn, place) + episode.turns[turn].tokens[place].value

    close(gae(case.flat(), discount=discount, gae_lambda=gae_lambda), case.expect(advantage))
    close(gae_returns(case.flat(), discount=discount, gae_lambda=gae_lambda), case.expect(target))


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_that_trusts_rewards_only_gives_the_returns(seed: int) -> None:
    flat = random_case(seed).flat()
    expected = returns(flat, discount=0.9, whiten=False)
    blind = replace(flat, value=torch.zeros_like(expected))
    torch.testing.assert_close(gae(blind, discount=0.9, gae_lambda=1.0), expected)
    torch.testing.assert_close(gae_returns(flat, discount=0.9, gae_lambda=1.0), expected)


@pytest.mark.parametrize("tail", ["return", "zero"])
@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_token_baseline_weighs_siblings_by_their_gradient_so_far(tail: Any, seed: int) -> None:
    """arXiv 2602.07078: B_t = sum_i W_it G_it / sum_i W_it over siblings that reach t, W_it = sum of score norms up to t."""
    case = random_case(seed)

    def advantage(episode: Episode, turn: int, place: int) -> float:
        token = at(episode, turn, place)
        reaching = [other for other in case.siblings(episode) if len(other.tokens) > token]
        if len(reaching) == 1:
            return to_go(episode, token, 1.0) if tail == "return" else 0.0
        weights = [sum(one.score_norm for one in other.tokens[: token + 1]) for other in reaching]
        weighted = sum(weight * to_go(other, token, 1.0) for weight, other in zip(weights, reaching, strict=True))
        return to_go(episode, token, 1.0) - weighted / sum(weights)

    close(optimal_token_baseline(case.flat(), tail=tail), case.expect(advantage))


def test_optimal_token_baseline_of_equal_weights_is_the_group_mean() -> None:
    flat = case_of([1.0, 0.0, 0.5], [2.0, -1.0]).flat()
    expected = normalised(flat, mean="group", std="none", epsilon=1e-6)
    torch.testing.assert_close(optimal_token_baseline(flat, tail="zero"), expected)


def test_optimal_token_baseline_where_no_gradient_flowed_has_no_baseline() -> None:
    flat = case_of([1.0, 0.0]).flat()
    flat = replace(flat, score_norm=torch.zeros_like(flat.penalty))
    assert optimal_token_baseline(flat, tail="zero").tolist() == [0, 1, 1, 0, 0, 0]


def test_episodes_of_one_token_are_judged_by_that_token() -> None:
    episodes = [Episode(0, [Turn(reward, 0, [Token(0.25, 0.5, 1.0)])]) for reward in (1.0, 0.0)]
    flat = Case(episodes, [None, (0, 0, 0), None, (1, 0, 0)]).flat()
    assert returns(flat, discount=0.5, whiten=False).tolist() == [0, 0.75, 0, -0.25]
    assert gae(flat, discount=0.5, gae_lambda=0.5).tolist() == [0, 0.25, 0, -0.75]
    assert optimal_token_baseline(flat, tail="return").tolist() == [0, 0.5, 0, -0.5]


def test_equal_returns_are_whitened_to_zeros() -> None:
    assert not returns(case_of([0.1] * 3).flat(), discount=1.0, whiten=True).any()
