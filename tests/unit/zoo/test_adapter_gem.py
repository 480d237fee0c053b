"""GEM behind the Env seam."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

pytest.importorskip("gem.envs")

import datasets

from reroll.envs.base import StepResult
from reroll.errors import EnvError
from reroll_zoo.adapters.config import GemConfig
from reroll_zoo.adapters.gem import Gem

GAME = "game:GuessTheNumber-v0-easy"


def guess(env: Gem, *, low: int = 1, high: int = 10) -> StepResult:
    """Halve the range until the game is over."""
    while True:
        middle = (low + high) // 2
        outcome = env.step(str(middle))
        if not outcome.messages:
            return outcome
        low, high = (middle + 1, high) if "higher" in outcome.messages[0]["content"] else (low, middle - 1)


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_a_game_is_won_by_plain_numbers(seed: int) -> None:
    env = Gem(GemConfig(env_id=GAME))
    (rules,) = env.reset(seed)
    assert "between 1 and 10" in rules["content"]
    end = guess(env)
    assert (end.reward, end.terminated, end.truncated, end.info["success"]) == (1.0, True, False, 1.0)
    with pytest.raises(EnvError, match="reset"):
        env.step("1")


def test_a_boxed_action_is_passed_on_as_it_is() -> None:
    env = Gem(GemConfig(env_id=GAME))
    env.reset(0)
    assert "you guessed 5" in env.step("I say \\boxed{5}").messages[0]["content"]


def test_without_boxing_the_environment_judges_the_bare_words() -> None:
    env = Gem(GemConfig(env_id=GAME, boxed=False))
    env.reset(0)
    end = env.step("5")
    assert (end.terminated, end.info["success"]) == (True, 0.0)
    assert end.reward < 0  # the environment's price for a malformed action


def test_an_end_by_the_last_turn_is_terminated_only() -> None:
    env = Gem(GemConfig(env_id=GAME, options={"max_turns": 1, "max_number": 1000}))
    env.reset(0)
    end = env.step("1000")
    assert (end.terminated, end.truncated, end.info["success"]) == (True, False, 0.0)


def test_a_question_is_answered_in_one_step() -> None:
    env = Gem(GemConfig(env_id="rg:chain_sum"))
    (question,) = env.reset(1)
    terms = re.findall(r"[+-]?\s*\d+", question["content"].split(":")[-1])
    end = env.step(str(sum(int(term.replace(" ", "")) for term in terms)))
    assert (end.reward, end.terminated, end.messages) == (1.0, True, ())
    env.close()


def test_equal_seeds_give_equal_games_though_others_are_played_between() -> None:
    def play(*, disturbed: bool) -> list[str]:
        env, other = Gem(GemConfig(env_id="game:Game2048-v0-easy")), Gem(GemConfig(env_id="game:Game2048-v0-easy"))
        shown = [env.reset(5)[0]["content"]]
        for move in ("up", "left", "down", "right") * 3:
            if disturbed:
                other.reset(1)
                random.random()
            shown += [message["content"] for message in env.step(move).messages]
        return shown

    before = random.getstate()
    alone = play(disturbed=False)
    assert random.getstate() == before
    assert len(alone) > 5
    assert play(disturbed=True) == alone


def test_an_unknown_environment_is_refused() -> None:
    with pytest.raises(EnvError, match="NoSuchGame"):
        Gem(GemConfig(env_id="game:NoSuchGame"))


# Environments that judge by running what they are given.


def attacks(mark: Path) -> list[str]:
    return [f"[open({str(mark)!r}, 'w').write('x')]", f"__import__('os').system('touch {mark}')"]


def test_tasks_of_reasoning_gym_are_scored_as_everywhere(tmp_path: Path) -> None:
    env = Gem(GemConfig(env_id="rg:countdown"))
    for attack in attacks(tmp_path / "mark"):
        env.reset(0)
        assert env.step(attack).reward <= 0.01
    env.reset(0)
    assert env.step("1 + 1").reward <= 0.05
    assert not list(tmp_path.iterdir())


def test_mathematics_is_judged_in_the_sandbox(tmp_path: Path) -> None:
    pytest.importorskip("pylatexenc", reason="GEM reads mathematics with it, and does not bring it")
    rows = datasets.Dataset.from_list([{"problem": "One half?", "answer": "1/2"}])
    env = Gem(GemConfig(env_id="math:Math12K", options={"dataset": rows, "dataset_name": ""}))
    for answer, reward in (("\\boxed{\\frac{1}{2}}", 1.0), ("0.5", 1.0), ("2", 0.0)):
        env.reset(0)
        assert env.step(answer).reward == reward
    for attack in attacks(tmp_path / "mark"):
        env.reset(0)
        assert env.step(attack).reward == 0.0
    assert not list(tmp_path.iterdir())


def test_programs_run_in_the_sandbox(tmp_path: Path) -> None:
    tests = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    rows = datasets.Dataset.from_list([{"problem": "Add them.", "tests": tests}])
    env = Gem(GemConfig(env_id="code:Taco8k", options={"dataset": rows, "dataset_name": "taco"}, boxed=False))
    right = "a, b = map(int, input().split())\nprint(a + b)"
    for program, reward in ((right, 1.0), ("print(math.isqrt(9))", 1.0), ("print(4)", 0.0)):
        env.reset(0)
        assert env.step(f"```python\n{program}\n```").reward == reward
    for attack in attacks(tmp_path / "mark"):
        env.reset(0)
        env.step(f"```python\n{attack}\nprint(3)\n```")
    assert not list(tmp_path.iterdir())
