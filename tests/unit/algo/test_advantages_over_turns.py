"""Turn-level estimators against plain loops over the turns of an episode."""

from typing import Any

import numpy as np
import pytest
import torch
from episode_cases import Case, Episode, Token, Turn, random_case

from reroll.algo.advantages import normalised
from reroll_zoo.algorithms.advantages import gigpo, turn_returns

SEEDS = range(8)
EPSILON = 1e-6


def close(actual: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-9)


def to_go(episode: Episode, turn: int, discount: float) -> float:
    return sum(discount**n * later.net for n, later in enumerate(episode.turns[turn:]))


def in_stds(value: float, others: list[float], *, centred: bool = True, scaled: bool = True) -> float:
    """A value that is one of `others`, by their mean and sample deviation."""
    std = np.std(others, ddof=1) if len(others) > 1 and max(others) > min(others) else 0.0
    above = value - (np.mean(others) if centred else 0.0)
    if not scaled:
        return float(above)
    return float(above / (std + EPSILON)) if std else 0.0


@pytest.mark.parametrize(("mean", "std"), [("none", "none"), ("group", "none"), ("group", "group"), ("batch", "batch")])
@pytest.mark.parametrize("seed", SEEDS)
def test_turn_returns_are_normalised_over_all_turns_of_the_group_or_the_batch(mean: Any, std: Any, seed: int) -> None:
    """Step-wise REINFORCE: R_t = sum of discount^n r_(t+n) over turns, then (R - mean) / std."""
    case = random_case(seed)

    def advantage(episode: Episode, turn: int, place: int) -> float:
        among = case.episodes if mean == "batch" else case.siblings(episode)
        others = [to_go(other, t, 0.9) for other in among for t in range(len(other.turns))]
        return in_stds(to_go(episode, turn, 0.9), others, centred=mean != "none", scaled=std != "none")

    close(turn_returns(case.flat(), discount=0.9, mean=mean, std=std, epsilon=EPSILON), case.expect(advantage))


@pytest.mark.parametrize(("mean", "std"), [("none", "none"), ("group", "group"), ("group", "batch"), ("batch", "none")])
def test_episodes_of_one_turn_have_the_returns_of_their_outcome(mean: Any, std: Any) -> None:
    flat = random_case(1, max_turns=1, all_written=True).flat()
    torch.testing.assert_close(
        turn_returns(flat, discount=0.5, mean=mean, std=std, epsilon=EPSILON),
        normalised(flat, mean=mean, std=std, epsilon=EPSILON),
    )


@pytest.mark.parametrize("std", ["none", "group"])
@pytest.mark.parametrize("seed", SEEDS)
def test_gigpo_compares_episodes_with_siblings_and_turns_with_those_of_the_same_state(std: Any, seed: int) -> None:
    """GiGPO, arXiv 2505.10978: A_E + omega * A_S; A_S compares the returns (their equation 5) of turns of the group that
    started from the same state."""
    case = random_case(seed)

    def advantage(episode: Episode, turn: int, place: int) -> float:
        state, siblings = episode.turns[turn].state, case.siblings(episode)
        same = [to_go(other, t, 0.95) for other in siblings for t, one in enumerate(other.turns) if one.state == state]
        of_episode = in_stds(episode.reward, [other.reward for other in siblings], scaled=std == "group")
        return of_episode + 0.7 * in_stds(to_go(episode, turn, 0.95), same, scaled=std == "group")

    actual = gigpo(case.flat(), discount=0.95, turn_weight=0.7, std=std, epsilon=EPSILON)
    close(actual, case.expect(advantage))


def test_gigpo_without_its_turns_is_grpo() -> None:
    flat = random_case(2).flat()
    torch.testing.assert_close(
        gigpo(flat, discount=0.9, turn_weight=0.0, std="group", epsilon=EPSILON),
        normalised(flat, mean="group", std="group", epsilon=EPSILON),
        rtol=0,
        atol=0,
    )


def test_a_state_that_two_prompts_number_alike_is_not_shared() -> None:
    episodes = [Episode(group, [Turn(reward, 7, [Token(0.0, 0.0, 1.0)])]) for group, reward in ((0, 1.0), (1, 0.0))]
    flat = Case(episodes, [(0, 0, 0), (1, 0, 0)]).flat()
    assert not gigpo(flat, discount=1.0, turn_weight=1.0, std="none", epsilon=EPSILON).any()
