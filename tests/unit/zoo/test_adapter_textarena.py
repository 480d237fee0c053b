"""TextArena behind the Env seam."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("textarena")

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll_zoo.adapters.config import TextArenaConfig
from reroll_zoo.adapters.textarena import TextArena


def guess(env: TextArena, *, low: int = 1, high: int = 20) -> list[StepResult]:
    """Halve the range until the game is over."""
    outcomes: list[StepResult] = []
    while not outcomes or outcomes[-1].messages:
        middle = (low + high) // 2
        outcomes.append(env.step(f"[{middle}]"))
        if "higher" in str(outcomes[-1].messages):
            low = middle + 1
        else:
            high = middle - 1
    return outcomes


def test_the_rules_come_first_and_hints_follow() -> None:
    env = TextArena(TextArenaConfig(env_id="GuessTheNumber-v0"))
    (rules,) = env.reset(3)
    assert rules["role"] == "user"
    assert "between 1 and 20" in rules["content"]
    outcome = env.step("[10]")
    assert outcome.messages[0]["content"] in ("The target number is lower.", "The target number is higher.")
    assert (outcome.reward, outcome.info["effective"]) == (0.0, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_halving_the_range_wins_with_reward_1(seed: int) -> None:
    env = TextArena(TextArenaConfig(env_id="GuessTheNumber-v0"))
    env.reset(seed)
    end = guess(env)[-1]
    assert (end.reward, end.terminated, end.truncated, end.info["success"]) == (1.0, True, False, 1.0)


def test_brackets_may_be_left_out() -> None:
    env = TextArena(TextArenaConfig(env_id="GuessTheNumber-v0"))
    env.reset(3)
    assert "target number" in env.step("10").messages[0]["content"]


def test_options_reach_the_game() -> None:
    env = TextArena(TextArenaConfig(env_id="GuessTheNumber-v0", options={"max_number": 5}))
    assert "between 1 and 5" in env.reset(0)[0]["content"]


def test_a_refused_move_is_invalid_any_number_of_times_and_changes_nothing() -> None:
    env = TextArena(TextArenaConfig(env_id="GuessTheNumber-v0"))
    env.reset(0)
    for _ in range(5):
        with pytest.raises(InvalidAction, match="valid '\\[number\\]'"):
            env.step("no number")
        with pytest.raises(InvalidAction, match="outside the range"):
            env.step("[99]")
    assert guess(env)[-1].info["success"] == 1.0


def test_the_turn_limit_truncates() -> None:
    env = TextArena(TextArenaConfig(env_id="GuessTheNumber-v0", options={"max_turns": 1, "max_number": 1000}))
    env.reset(0)
    outcomes = [env.step(f"[{number}]") for number in (1, 2)]
    end = outcomes[-1]
    assert (end.terminated, end.truncated, end.info["success"]) == (False, True, 0.0)
    assert 0 <= end.reward < 1
    with pytest.raises(EnvError, match="reset"):
        env.step("[3]")


def test_equal_seeds_give_equal_games_though_others_are_played_between() -> None:
    def play(env: TextArena, seed: int, *, other: TextArena | None = None) -> list[str]:
        shown = [env.reset(seed)[0]["content"]]
        for move in ("up", "left", "down", "right") * 5:
            if other is not None:
                other.reset(seed + 1)
                random.random()
            try:
                shown += [message["content"] for message in env.step(move).messages]
            except InvalidAction as refused:
                shown.append(str(refused))
        return shown

    alone = play(TextArena(TextArenaConfig(env_id="2048-v0")), 5)
    assert play(TextArena(TextArenaConfig(env_id="2048-v0")), 5, other=TextArena(TextArenaConfig(env_id="2048-v0"))) == alone
    assert play(TextArena(TextArenaConfig(env_id="2048-v0")), 6)[0] != alone[0]


def test_the_global_generator_is_left_alone() -> None:
    before = random.getstate()
    env = TextArena(TextArenaConfig(env_id="2048-v0"))
    env.reset(1)
    env.step("[up]")
    assert random.getstate() == before


@pytest.mark.parametrize(
    "env_id", ["Mastermind-v0", "Minesweeper-v0-small", "TowerOfHanoi-v0", "Sudoku-v0-easy", "FrozenLake-v0-random"]
)
def test_games_without_downloads_start(env_id: str) -> None:
    env = TextArena(TextArenaConfig(env_id=env_id))
    assert len(env.reset(0)[0]["content"]) > 50
    env.close()


def test_an_unknown_game_and_one_for_several_players_are_refused() -> None:
    with pytest.raises(EnvError, match="NoSuchGame"):
        TextArena(TextArenaConfig(env_id="NoSuchGame-v0"))
    with pytest.raises(EnvError, match="number of players has to be 2"):
        TextArena(TextArenaConfig(env_id="TicTacToe-v0")).reset(0)
    with pytest.raises(EnvError, match="several players"):
        TextArena(TextArenaConfig(env_id="PublicGoodsGame-v0")).reset(0)


def test_a_game_without_its_word_lists_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_words(env_id: str, **options: object) -> None:
        raise LookupError("Resource words not found")

    monkeypatch.setattr("textarena.make", no_words)
    with pytest.raises(EnvError, match=r"nltk\.downloader words"):
        TextArena(TextArenaConfig(env_id="Wordle-v0"))
