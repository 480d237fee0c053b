from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll.types import Message
from reroll_zoo.games.frozen_lake import ACTIONS, FrozenLake, FrozenLakeConfig

GOLDEN_LAKE = "_ _ _ P\n_ _ _ O\n_ O _ O\n_ O G _"


def lake(board: str, **options: Any) -> FrozenLake:
    """A game that starts on this board."""
    rows = [line.split() for line in board.strip().splitlines()]
    places = {(row, column): symbol for row, line in enumerate(rows) for column, symbol in enumerate(line)}
    game = FrozenLake(FrozenLakeConfig(size=len(rows), **options))
    game.reset(0)
    game.player = next(cell for cell, symbol in places.items() if symbol == "P")
    game.goal = next(cell for cell, symbol in places.items() if symbol == "G")
    game.holes = frozenset(cell for cell, symbol in places.items() if symbol == "O")
    game._chances = [{game.goal: 1.0}]
    return game


def shown(messages: tuple[Message, ...] | list[Message]) -> list[str]:
    return [message["content"] for message in messages]


def play(game: FrozenLake, actions: list[str]) -> list[StepResult]:
    return [game.step(action) for action in actions]


def test_a_move_shows_the_next_board_and_pays_nothing() -> None:
    outcome = lake("P _\nO G").step("Right")
    assert shown(outcome.messages) == ["_ P\nO G"]
    assert outcome.state == "_ P\nO G"
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (0.0, False, False)
    assert outcome.info == {"effective": 1.0, "num_actions": 1.0, "success": 0.0}


def test_the_goal_pays_one_and_ends_the_episode() -> None:
    outcome = lake("_ P\nO G").step("Down")
    assert (outcome.reward, outcome.terminated, outcome.truncated, outcome.messages) == (1.0, True, False, ())
    assert outcome.info["success"] == 1.0


def test_a_hole_ends_the_episode_without_success() -> None:
    outcome = lake("P _\nO G").step("Down")
    assert (outcome.reward, outcome.terminated, outcome.messages) == (0.0, True, ())
    assert outcome.info == {"effective": 1.0, "num_actions": 1.0, "success": 0.0}


@pytest.mark.parametrize("action", ["Up", "Left"])
def test_at_the_edge_the_player_stays_and_the_action_is_not_effective(action: str) -> None:
    outcome = lake("P _\nO G").step(action)
    assert outcome.state == "P _\nO G"
    assert outcome.info["effective"] == 0.0


def test_the_step_limit_truncates() -> None:
    game = lake("P _\nO G", max_steps=2)
    first, second = play(game, ["Up", "Right"])
    assert not first.truncated
    assert (second.truncated, second.terminated, second.messages, second.info["success"]) == (True, False, (), 0.0)


def test_a_win_on_the_last_step_is_no_truncation() -> None:
    last = play(lake("P _\nO G", max_steps=2), ["Right", "Down"])[-1]
    assert (last.terminated, last.truncated) == (True, False)


def test_every_action_costs_the_step_penalty() -> None:
    rewards = [outcome.reward for outcome in play(lake("P _\nO G", step_penalty=0.1), ["Up", "Right", "Down"])]
    assert rewards == pytest.approx([-0.1, -0.1, 0.9])


def test_a_step_outside_an_episode_is_refused() -> None:
    over, closed = lake("P _\nO G"), lake("P _\nO G")
    over.step("Down")
    closed.close()
    for game in (over, closed, FrozenLake(FrozenLakeConfig())):
        with pytest.raises(EnvError, match="call reset"):
            game.step("Up")


@pytest.mark.parametrize("words", ["Right", "right", " RIGHT\n", "move right", "Move  Right.", "Right,"])
def test_case_spaces_and_move_do_not_matter(words: str) -> None:
    assert lake("P _\nO G").step(words).state == "_ P\nO G"


@pytest.mark.parametrize("words", ["", " ", "jump", "Rightwards", "Up or Right", "Right, Right", "1", "→", "x" * 10_000])
def test_other_words_are_refused_and_change_nothing(words: str) -> None:
    game = lake("P _\nO G", max_steps=3)
    with pytest.raises(InvalidAction, match="Up, Down, Left or Right") as refusal:
        game.step(words)
    assert len(str(refusal.value)) < 200
    assert (game.board, game.steps_left) == ("P _\nO G", 3)


def test_a_turn_may_hold_several_actions() -> None:
    game = lake("P _ _\n_ _ _\n_ _ G", actions_per_turn=4, step_penalty=0.5)
    outcome = game.step("Right, up,\nDown\nmove left")
    assert outcome.state == "_ _ _\nP _ _\n_ _ G"
    assert outcome.info == {"effective": 0.75, "num_actions": 4.0, "success": 0.0}
    assert outcome.reward == -2.0


def test_a_turn_stops_where_the_episode_ends() -> None:
    won = lake("P G\n_ _", actions_per_turn=3).step("Right, Down, Down")
    assert (won.reward, won.terminated, won.info["num_actions"], won.info["success"]) == (1.0, True, 1.0, 1.0)
    cut = lake("P _\n_ G", actions_per_turn=3, max_steps=2).step("Up, Up, Right")
    assert (cut.truncated, cut.info["num_actions"], cut.info["effective"]) == (True, 2.0, 0.0)


@pytest.mark.parametrize("words", ["Right, Right, Right", "Right, jump", "Right, , Right"])
def test_a_turn_with_one_wrong_or_one_more_action_is_refused_whole(words: str) -> None:
    game = lake("P _ _\n_ _ _\n_ _ G", actions_per_turn=2)
    with pytest.raises(InvalidAction, match="1 to 2 actions"):
        game.step(words)
    assert game.board.startswith("P _ _")


def test_a_seed_gives_the_same_lake_on_every_machine() -> None:
    assert FrozenLake(FrozenLakeConfig()).reset(7) == FrozenLake(FrozenLakeConfig()).reset(7)
    assert shown(FrozenLake(FrozenLakeConfig()).reset(7))[1] == GOLDEN_LAKE


def test_seeds_give_different_lakes() -> None:
    boards = {shown(FrozenLake(FrozenLakeConfig(size=6)).reset(seed))[1] for seed in range(200)}
    assert len(boards) == 200


@settings(max_examples=60)
@given(
    size=st.integers(2, 7),
    seed=st.integers(0, 10**9),
    hole_probability=st.floats(0, 1),
    max_steps=st.integers(1, 30),
    slippery=st.booleans(),
)
def test_the_solver_wins_every_lake_within_the_limit(seed: int, **options: Any) -> None:
    game = FrozenLake(FrozenLakeConfig(**options))
    game.reset(seed)
    outcomes = play(game, game.solve())
    assert outcomes[-1].info["success"] == 1.0
    assert all(outcome.info["effective"] == 1.0 for outcome in outcomes)


@pytest.mark.parametrize(("size", "num_holes"), [(2, 0), (2, 2), (4, 5), (4, 14), (6, 20)])
def test_the_number_of_holes_is_exact(size: int, num_holes: int) -> None:
    game = FrozenLake(FrozenLakeConfig(size=size, num_holes=num_holes))
    for seed in range(10):
        assert shown(game.reset(seed))[1].count("O") == num_holes


def test_holes_are_as_frequent_as_asked() -> None:
    game = FrozenLake(FrozenLakeConfig(size=5, hole_probability=0.2))
    holes = sum(shown(game.reset(seed))[1].count("O") for seed in range(300))
    assert holes / (300 * 23) == pytest.approx(0.2, abs=0.02)


def test_the_solver_takes_the_shortest_way_around_holes() -> None:
    assert lake("P O G\n_ O _\n_ _ _").solve() == ["Down", "Down", "Right", "Right", "Up", "Up"]


def test_the_solver_gives_nothing_when_the_steps_left_do_not_suffice() -> None:
    game = lake("P O G\n_ O _\n_ _ _", max_steps=6)
    game.step("Left")
    assert game.solve() == []


def test_the_three_directions_are_equally_likely_and_the_opposite_never_happens() -> None:
    where: Counter[str] = Counter()
    game = FrozenLake(FrozenLakeConfig(size=3, num_holes=0, slippery=True))
    for seed in range(900):
        game.reset(seed)
        game.player, game.goal = (1, 1), (0, 0)
        game.step("Right")
        row, column = game.player
        where[f"{row}{column}"] += 1
    assert set(where) == {"01", "12", "21"}
    assert all(count == pytest.approx(300, abs=50) for count in where.values())


def test_equal_seeds_and_actions_slip_alike() -> None:
    rng = random.Random(1)
    actions = [rng.choice(ACTIONS) for _ in range(30)]
    games = [FrozenLake(FrozenLakeConfig(size=6, num_holes=0, slippery=True, max_steps=30)) for _ in range(2)]
    seen = []
    for game in games:
        game.reset(5)
        states = []
        for action in actions:
            states.append(game.step(action).state)
            if game.won:
                break
        seen.append(states)
    assert seen[0] == seen[1]


def test_demonstrations_play_the_best_odds_there_are() -> None:
    # Gymnasium's 4×4 map: with no end of steps the best policy is known to win 14 times in 17.
    game = lake("P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G", slippery=True, max_steps=2000)
    game._best_odds()
    assert game._chances[-1][(0, 0)] == pytest.approx(14 / 17, abs=1e-3)


def test_demonstrations_do_not_know_the_slips_to_come() -> None:
    game = FrozenLake(FrozenLakeConfig(slippery=True, max_steps=60))
    wins = 0
    for seed in range(60):
        game.demonstration(seed)
        wins += game.won
    assert 30 < wins < 60


def test_the_rules_tell_the_legend_the_grammar_and_the_limit() -> None:
    rules, board = FrozenLake(FrozenLakeConfig(max_steps=9)).reset(0)
    assert (rules["role"], board["role"]) == ("system", "user")
    for words in ("P is you", "_ ice", "O a hole", "G the goal", "at most 9 actions", "Up, Down, Left or Right"):
        assert words in rules["content"]
    assert "slippery" not in rules["content"]
    assert "slippery" in shown(FrozenLake(FrozenLakeConfig(slippery=True)).reset(0))[0]
    assert "1 to 3 actions" in shown(FrozenLake(FrozenLakeConfig(actions_per_turn=3)).reset(0))[0]


def test_symbols_change_the_board_and_the_legend_alone() -> None:
    usual, other = (
        FrozenLake(FrozenLakeConfig()),
        FrozenLake(FrozenLakeConfig(symbols={"player": "A", "ice": ".", "hole": "x", "goal": "*"})),
    )
    rules, board = shown(other.reset(3))
    assert board.translate(str.maketrans("A.x*", "P_OG")) == shown(usual.reset(3))[1]
    assert "A is you, . ice, x a hole, * the goal" in rules


def test_a_demonstration_is_the_winning_conversation() -> None:
    game = FrozenLake(FrozenLakeConfig(actions_per_turn=2))
    conversation = game.demonstration(4, answer="I go <answer>{action}</answer>")
    assert game.won
    assert conversation[:2] == list(FrozenLake(FrozenLakeConfig(actions_per_turn=2)).reset(4))
    assert {message["role"] for message in conversation[2::2]} == {"assistant"}
    assert conversation[-1]["role"] == "assistant"
    again = FrozenLake(FrozenLakeConfig(actions_per_turn=2))
    again.reset(4)
    for said, *heard in zip(conversation[2::2], conversation[3::2], strict=False):
        action = said["content"].removeprefix("I go <answer>").removesuffix("</answer>")
        assert list(again.step(action).messages) == heard


def test_a_node_holds_the_options_of_the_class() -> None:
    node = FrozenLakeConfig(size=3, slippery=True, symbols={"player": "@"})  # type: ignore[arg-type]
    game = FrozenLake(node)
    assert game.options == node
    assert "@" in shown(game.reset(0))[1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"size": 1}, "greater than or equal to 2"),
        ({"size": 2, "num_holes": 3}, "at most 2"),
        ({"hole_probability": 1.5}, "less than or equal to 1"),
        ({"symbols": {"goal": "P"}}, "look alike"),
        ({"symbols": {"goal": "GG"}}, "pattern"),
        ({"symbols": {"goal": " "}}, "pattern"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_reason(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        FrozenLake(FrozenLakeConfig(**options))
