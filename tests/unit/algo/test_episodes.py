from dataclasses import replace

import numpy as np
import pytest
import torch
from episode_cases import Case, Episode, Token, Turn, floats, random_case

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_turns_reward_stands_on_its_last_token_and_each_token_pays_its_penalty(seed: int) -> None:
    case = random_case(seed)

    def reward(episode: Episode, turn: int, place: int) -> float:
        one = episode.turns[turn]
        return (one.reward if place == len(one.tokens) - 1 else 0.0) - one.tokens[place].penalty

    np.testing.assert_allclose(case.flat().token_reward.numpy(), case.expect(reward), atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_token_rewards_add_up_to_the_reward_and_the_gross_reward_leaves_the_penalty_out(seed: int) -> None:
    case = random_case(seed)
    flat = case.flat()
    totals = floats([0.0] * flat.num_episodes).index_add(0, flat.token_episode, flat.token_reward[flat.written])
    written = flat.length > 0
    torch.testing.assert_close(totals[written], flat.reward[written])
    torch.testing.assert_close(flat.gross_reward, floats([episode.gross for episode in case.episodes]))


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_and_positions_count_written_tokens_only(seed: int) -> None:
    case = random_case(seed)
    flat = case.flat()
    assert flat.length.tolist() == [len(episode.tokens) for episode in case.episodes]
    assert flat.position.tolist() == [place for episode in case.episodes for place in range(len(episode.tokens))]
    assert flat.written.tolist() == [index for index, at in enumerate(case.layout) if at is not None]


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_line_episodes_up_and_flat_puts_them_back(seed: int) -> None:
    case = random_case(seed)
    flat = case.flat()
    rows = flat.rows(flat.value)
    for row, episode in zip(rows.tolist(), case.episodes, strict=True):
        values = [token.value for token in episode.tokens]
        assert row == values + [0.0] * (len(row) - len(values))
    back = case.expect(lambda episode, turn, place: episode.turns[turn].tokens[place].value)
    assert flat.flat(rows).tolist() == back.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_penalty_is_taken_off_tokens_turns_and_episodes_alike(seed: int) -> None:
    expected = random_case(seed).flat()
    free = random_case(seed)
    for token in (token for episode in free.episodes for token in episode.tokens):
        token.penalty = 0.0
    penalised = replace(free.flat(), penalty=None).penalised(expected.penalty)
    for name in ("reward", "turn_reward", "token_reward", "gross_reward"):
        torch.testing.assert_close(getattr(penalised, name), getattr(expected, name))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_episode_has_one_last_turn(seed: int) -> None:
    case = random_case(seed)
    expected = [turn is episode.turns[-1] for episode in case.episodes for turn in episode.turns]
    assert case.flat().is_last_turn.tolist() == expected


def test_what_is_spread_reaches_every_token_of_its_owner_and_no_other() -> None:
    token = Token(0.0, 0.0, 0.0)
    episodes = [
        Episode(0, [Turn(0.0, 0, [token] * 2), Turn(0.0, 0, [token])]),
        Episode(0, []),
        Episode(1, [Turn(0.0, 0, [token])]),
    ]
    flat = Case(episodes, [None, (0, 0, 0), None, (0, 0, 1), (0, 1, 0), None, (2, 0, 0), None]).flat()
    assert flat.spread(floats([5.0, 6.0, 7.0])).tolist() == [0, 5, 0, 5, 5, 0, 7, 0]
    assert flat.spread_turns(floats([1.0, 2.0, 3.0])).tolist() == [0, 1, 0, 1, 2, 0, 3, 0]
    assert flat.num_groups == 2


def test_no_episodes_have_no_groups_and_no_tokens() -> None:
    flat = Case([], []).flat()
    assert (flat.num_episodes, flat.num_groups, len(flat.token_reward)) == (0, 0, 0)
    assert len(flat.is_last_turn) == 0
    assert flat.rows(flat.token_reward).shape == (0, 0)
