from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from episode_cases import Case, Episode, Token, Turn, case_of, floats, random_case

from reroll.algo.advantages import normalised
from reroll.algo.episodes import Episodes
from reroll.algo.shaping import difficulty_weight, length_weight, shape_advantages, shape_rewards, standardised
from reroll.config.advantages import (
    AdvantageShapingConfig,
    DifficultyWeightConfig,
    LengthWeightConfig,
    RewardShapingConfig,
    ShapingConfig,
)
from reroll_zoo.algorithms.advantages import returns

SEEDS = range(8)
CURVE = {"low": 0.4, "high": 1.5, "midpoint": 0.75, "steepness": 10.0}


def of_lengths(*answers: tuple[float, int]) -> Case:
    """One group of answers of one turn, by reward and number of tokens."""
    episodes = [Episode(0, [Turn(reward, 0, [Token(0.0, 0.0, 1.0) for _ in range(n)])]) for reward, n in answers]
    return Case(episodes, [(number, 0, place) for number, (_, n) in enumerate(answers) for place in range(n)])


@pytest.mark.parametrize("seed", SEEDS)
def test_right_answers_are_weighted_by_how_long_they_are_among_the_right_ones(seed: int) -> None:
    """GRPO-LEAD, arXiv 2504.09696, section 3: r * exp(-alpha z), z = (length - mean) / std over right answers."""
    case = random_case(seed)
    expected = []
    for episode in case.episodes:
        lengths = [len(other.tokens) for other in case.siblings(episode) if other.gross >= 0.5]
        std = np.std(lengths, ddof=1) if len(lengths) > 1 else 0.0
        z = (len(episode.tokens) - np.mean(lengths)) / (std + 1e-6) if episode.gross >= 0.5 and std else 0.0
        expected.append(episode.reward + episode.gross * (np.exp(-0.3 * z) - 1))
    shaped = shape_rewards(case.flat(), length={"strength": 0.3, "threshold": 0.5}, clip=None)
    np.testing.assert_allclose(shaped.reward.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_a_shorter_right_answer_earns_more_and_a_wrong_one_stays() -> None:
    shaped = shape_rewards(
        of_lengths((1.0, 2), (1.0, 6), (0.0, 1)).flat(), length={"strength": 0.05, "threshold": 0.5}, clip=None
    )
    root = 0.5**0.5
    assert shaped.reward.tolist() == pytest.approx([np.exp(0.05 * root), np.exp(-0.05 * root), 0.0])


@pytest.mark.parametrize("answers", [[(1.0, 3)], [(1.0, 3), (1.0, 3)], [(0.0, 3), (0.0, 5)], [(1.0, 3), (0.0, 5)]])
def test_length_says_nothing_where_right_answers_do_not_differ_in_it(answers: list[tuple[float, int]]) -> None:
    weight = length_weight(of_lengths(*answers).flat(), strength=0.05, threshold=0.5)
    assert weight.tolist() == [1.0] * len(answers)


def test_clipped_rewards_stay_in_the_range_and_the_last_turn_pays_for_it() -> None:
    def turn(reward: float) -> Turn:
        return Turn(reward, 0, [Token(0.0, 0.0, 1.0)])

    episodes = [Episode(0, [turn(2.0), turn(3.0)]), Episode(0, [turn(-7.0)]), Episode(0, [turn(1.0), turn(0.5)])]
    flat = Case(episodes, [None, (0, 0, 0), None, (0, 1, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0)]).flat()
    shaped = shape_rewards(flat, length=None, clip=4.0)
    assert shaped.reward.tolist() == [4.0, -4.0, 1.5]
    assert shaped.turn_reward.tolist() == [2.0, 2.0, -4.0, 1.0, 0.5]


@pytest.mark.parametrize("seed", SEEDS)
def test_turns_still_add_up_to_the_episode_and_penalties_are_not_clipped(seed: int) -> None:
    case = random_case(seed)
    shaped = shape_rewards(case.flat(), length={"strength": 0.5, "threshold": 0.2}, clip=0.25)
    assert shaped.gross_reward.abs().max() <= 0.25 + 1e-12
    written = torch.unique(shaped.turn_episode)
    totals = floats([0.0] * shaped.num_episodes).index_add(0, shaped.turn_episode, shaped.turn_reward)
    torch.testing.assert_close(totals[written], shaped.reward[written])
    penalty = shaped.spread(shaped.gross_reward) - returns(shaped, discount=1.0, whiten=False)
    first = [min(i for i, at in enumerate(case.layout) if at and at[0] == number) for number in written.tolist()]
    penalties = [sum(token.penalty for token in case.episodes[number].tokens) for number in written.tolist()]
    np.testing.assert_allclose(penalty[first].numpy(), penalties, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_difficulty_weighs_what_is_good_by_the_share_of_right_answers_and_what_is_bad_by_that_of_wrong_ones(seed: int) -> None:
    """GRPO-LEAD, arXiv 2504.09696, section 3: w(p) = A + (B - A) / (1 + exp(k (p - p0)))."""
    case = random_case(seed)
    flat = case.flat()
    advantage = normalised(flat, mean="group", std="group", epsilon=1e-6)

    def weight(episode: Episode, turn: int, place: int) -> float:
        siblings = case.siblings(episode)
        share = sum(other.gross >= 0.5 for other in siblings) / len(siblings)
        mean = sum(other.reward for other in siblings) / len(siblings)
        equal = len({other.reward for other in siblings}) == 1
        share = share if episode.reward > mean and not equal else 1 - share
        return 0.4 + (1.5 - 0.4) / (1 + float(np.exp(10 * (share - 0.75))))

    shaped = shape_advantages(advantage, flat, difficulty={**CURVE, "threshold": 0.5}, whiten=False, clip=None)
    np.testing.assert_allclose(shaped.numpy(), advantage.numpy() * case.expect(weight), rtol=1e-9, atol=1e-12)


def test_a_clipped_reward_is_compared_with_a_clipped_greedy_answer() -> None:
    flat = case_of([5.0, 0.5, -3.0]).flat()
    flat = replace(flat, baseline=torch.tensor([5.0, 5.0, -0.25], dtype=flat.reward.dtype))
    shaped = shape_rewards(flat, length=None, clip=1.0)
    assert shaped.baseline is not None
    assert (shaped.reward - shaped.baseline).tolist() == [0.0, -0.5, -0.75]


def test_a_right_answer_to_a_hard_prompt_weighs_most() -> None:
    flat = case_of([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]).flat()
    advantage = normalised(flat, mean="group", std="none", epsilon=1e-6)
    weight = difficulty_weight(advantage, flat, **CURVE, threshold=0.5)[flat.token_turn >= 0][::2].tolist()
    right_hard, wrong_hard, right_easy, wrong_easy = weight[0], weight[1], weight[4], weight[7]
    assert right_hard == pytest.approx(1.49, abs=0.01)
    assert right_easy == pytest.approx(0.95)
    assert wrong_hard == pytest.approx(0.95)
    assert wrong_easy == pytest.approx(1.49, abs=0.01)


@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_advantages_have_mean_zero_and_deviation_one_over_written_tokens(seed: int) -> None:
    flat = random_case(seed).flat()
    raw = returns(flat, discount=0.9, whiten=False)
    shaped = shape_advantages(raw, flat, difficulty=None, whiten=True, clip=None)
    written = shaped[flat.written]
    assert written.mean().item() == pytest.approx(0, abs=1e-9)
    assert written.std().item() == pytest.approx(1, abs=1e-6)
    assert not shaped[flat.token_turn < 0].any()
    torch.testing.assert_close(shaped, returns(flat, discount=0.9, whiten=True))


def test_millions_of_advantages_are_whitened_as_well_as_a_few() -> None:
    num = 3_000_000
    flat = replace(case_of([0.0]).flat(), token_turn=torch.zeros(num, dtype=torch.int64))
    raw = 100 + torch.rand(num, generator=torch.Generator().manual_seed(0))
    shaped = shape_advantages(raw, flat, difficulty=None, whiten=True, clip=None).double()
    assert shaped.mean().item() == pytest.approx(0, abs=1e-6)
    assert shaped.std().item() == pytest.approx(1, abs=1e-6)


def test_equal_advantages_are_whitened_to_zeros() -> None:
    flat = case_of([0.1, 0.1, 0.1]).flat()
    assert not shape_advantages(flat.spread(flat.reward), flat, difficulty=None, whiten=True, clip=None).any()


def test_advantages_are_clipped_after_they_are_whitened() -> None:
    flat = case_of([100.0, 0.0, 0.0, 0.0]).flat()
    shaped = shape_advantages(flat.spread(flat.reward), flat, difficulty=None, whiten=True, clip=0.75)
    assert shaped.max() == 0.75
    assert -0.75 < shaped.min() < 0


@pytest.mark.parametrize("flat", [random_case(0).flat(), Case([], []).flat()])
def test_nothing_changes_unless_it_is_asked_for(flat: Episodes) -> None:
    config = ShapingConfig()
    shaped = shape_rewards(flat, **config.rewards.model_dump())
    torch.testing.assert_close(shaped.reward, flat.reward, rtol=0, atol=0)
    torch.testing.assert_close(shaped.turn_reward, flat.turn_reward, rtol=0, atol=0)
    advantage = flat.spread(flat.reward)
    torch.testing.assert_close(shape_advantages(advantage, flat, **config.advantages.model_dump()), advantage, rtol=0, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_rewards_and_baselines_become_deviations_and_turns_still_sum_to_them(seed: int) -> None:
    case = random_case(seed)
    flat = replace(case.flat(), baseline=torch.full((len(case.episodes),), 0.5, dtype=torch.float64))
    mean, std = torch.full_like(flat.reward, 0.25), torch.full_like(flat.reward, 2.0)
    shaped = standardised(flat, mean=mean, std=std)
    expected = [episode.reward + (episode.gross - 0.25) / 2.0 - episode.gross for episode in case.episodes]
    np.testing.assert_allclose(shaped.reward.numpy(), expected, rtol=1e-7, atol=1e-7)
    assert shaped.baseline is not None
    np.testing.assert_allclose(shaped.baseline.numpy(), 0.125, rtol=1e-7)
    sums = torch.zeros_like(shaped.reward).index_add(0, shaped.turn_episode, shaped.turn_reward)
    has_turns = shaped.turn_episode.unique()
    torch.testing.assert_close(sums[has_turns], shaped.reward[has_turns])


def test_where_all_rewards_were_equal_only_the_mean_is_taken_off() -> None:
    flat = case_of([3.0, 3.0]).flat()
    shaped = standardised(flat, mean=torch.full_like(flat.reward, 3.0), std=torch.zeros_like(flat.reward))
    assert shaped.reward.tolist() == [0.0, 0.0]


def test_an_empty_batch_can_be_shaped() -> None:
    flat = Case([], []).flat()
    config = ShapingConfig(
        rewards=RewardShapingConfig(length=LengthWeightConfig(), clip=1.0),
        advantages=AdvantageShapingConfig(difficulty=DifficultyWeightConfig(), whiten=True, clip=1.0),
    )
    assert shape_rewards(flat, **config.rewards.model_dump()).num_episodes == 0
    assert shape_advantages(torch.zeros(0), flat, **config.advantages.model_dump()).shape == (0,)


@pytest.mark.parametrize(
    ("function", "node"),
    [
        (shape_rewards, RewardShapingConfig),
        (shape_advantages, AdvantageShapingConfig),
        (length_weight, LengthWeightConfig),
        (difficulty_weight, DifficultyWeightConfig),
    ],
)
def test_every_shaping_node_has_the_options_of_its_function(function: Any, node: Any) -> None:
    assert node.model_fields.keys() == get_type_hints(function).keys() - {"advantage", "episodes", "return"}
