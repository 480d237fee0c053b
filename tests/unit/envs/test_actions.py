from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from reroll.config.actions import ActionConfig
from reroll.config.envs import EnvDomainConfig
from reroll.envs.actions import ParsedEnv, parse_action
from reroll.envs.base import Env, InvalidAction, StepResult
from reroll.types import Message
from reroll_zoo.games.frozen_lake import FrozenLake, FrozenLakeConfig


def form(kind: str, **options: Any) -> ActionConfig:
    config: ActionConfig = TypeAdapter(ActionConfig).validate_python({"kind": kind, **options})
    return config


ANSWER = form("tag")
MOVE = form("regex", pattern=r"move (\w+)", rule="Write move and a direction.")


class Door:
    """Opens at the word `open`; `push` does nothing."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.is_closed = False

    def reset(self, seed: int) -> tuple[Message, ...]:
        return {"role": "system", "content": f"Door {seed}."}, {"role": "user", "content": "It is shut."}

    def step(self, action: str) -> StepResult:
        self.heard.append(action)
        if action not in ("open", "push"):
            raise InvalidAction(f"{action} is no use: open or push.")
        if action == "open":
            return StepResult(reward=1.0, terminated=True, info={"effective": 1.0, "success": 1.0}, state="open")
        return StepResult(messages=({"role": "user", "content": "Nothing."},), info={"effective": 0.0}, state="shut")

    def close(self) -> None:
        self.is_closed = True


class Live:
    """A plain environment as an episode plays it."""

    def __init__(self, env: Env, seed: int = 0) -> None:
        self.env, self.seed = env, seed

    async def reset(self) -> tuple[Message, ...]:
        return self.env.reset(self.seed)

    async def step(self, action: str) -> StepResult:
        return self.env.step(action)

    async def close(self) -> None:
        self.env.close()


@pytest.mark.parametrize(
    ("config", "text", "action"),
    [
        (ANSWER, "I go <answer> Up </answer>.", "Up"),
        (ANSWER, "<answer>Up</answer> no, <answer>Down</answer>", "Down"),
        (ANSWER, "in <answer>...</answer> I write: <answer>Up</answer> done <answer>", "Up"),
        (ANSWER, "an <answer> to open, then <answer>Up</answer>", "Up"),
        (form("tag", tag="act"), "<answer>Up</answer><act>Down</act>", "Down"),
        (form("last_line"), "I think\nUp\n\n", "Up"),
        (form("last_line"), "Up", "Up"),
        (MOVE, "move Up or move Down", "Down"),
        (form("regex", pattern="Up|Down", rule="Say it."), "Up!", "Up"),
        (form("text"), " search[x]\nand more ", "search[x]\nand more"),
        (ANSWER, "<think><answer>Up</answer></think><answer>Down</answer>", "Down"),
        (ANSWER, "the cue opened it: <answer>Up</answer></think>\n<answer>Down</answer>", "Down"),
        (form("text"), "<think>a</think>b</think> c", "c"),
        (form("text", thinking="keep"), "<think>a</think>b", "<think>a</think>b"),
        (form("tag", thinking="keep"), "<think><answer>Up</answer>", "Up"),
    ],
)
def test_the_action_is_found_in_the_words(config: ActionConfig, text: str, action: str) -> None:
    assert parse_action(text, config) == action


@pytest.mark.parametrize(
    ("config", "text", "problem"),
    [
        (ANSWER, "Up", "no action"),
        (ANSWER, "<answer>Up", "no action"),
        (ANSWER, "Up</answer>", "no action"),
        (ANSWER, "</answer>Up<answer>", "no action"),
        (ANSWER, "<answer> </answer>", "no action"),
        (ANSWER, "<think>I <answer>Up</answer>", "did not end"),
        (ANSWER, "a</think><think>b<answer>Up</answer>", "did not end"),
        (ANSWER, "<think><answer>Up</answer></think>", "empty"),
        (form("last_line"), " \n \n", "empty"),
        (MOVE, "go Up", "no action"),
        (form("regex", pattern=r"go(?: (\w+))?", rule="Go."), "go", "no action"),
        (form("text"), "", "empty"),
    ],
)
def test_words_without_an_action_are_refused_with_the_reason(config: ActionConfig, text: str, problem: str) -> None:
    with pytest.raises(InvalidAction, match=problem):
        parse_action(text, config)


@given(st.text(), st.sampled_from(["tag", "last_line", "text"]), st.sampled_from(["strip", "keep"]))
def test_any_words_are_an_action_or_invalid(text: str, kind: str, thinking: str) -> None:
    try:
        action = parse_action(text, form(kind, thinking=thinking))
    except InvalidAction:
        return
    assert action
    assert action in text
    assert action == action.strip()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "tag", "tag": "a>b"}, "pattern"),
        ({"kind": "regex", "pattern": "(", "rule": "Go."}, "not a regular expression"),
        ({"kind": "regex", "pattern": "go"}, "rule"),
        ({"kind": "text", "thinking": "maybe"}, "strip"),
    ],
)
def test_forms_that_cannot_work_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        TypeAdapter(ActionConfig).validate_python(options)


async def test_the_first_message_says_how_to_write_an_action() -> None:
    first, second = await ParsedEnv(Live(Door(), seed=7), ANSWER).reset()
    assert first["content"] == "Door 7. Write your action as <answer>...</answer>."
    assert second["content"] == "It is shut."
    assert await ParsedEnv(Live(Door(), seed=7), form("text")).reset() == Door().reset(7)


async def test_a_valid_turn_passes_through_and_says_so() -> None:
    door = Door()
    outcome = await ParsedEnv(Live(door), ANSWER, format_penalty=0.5).step("<think>hm</think><answer>open</answer>")
    assert door.heard == ["open"]
    assert (outcome.reward, outcome.terminated, outcome.state) == (1.0, True, "open")
    assert outcome.info == {"effective": 1.0, "success": 1.0, "valid": 1.0}


async def test_a_turn_without_an_action_costs_the_penalty_and_the_episode_goes_on() -> None:
    door = Door()
    env = ParsedEnv(Live(door), ANSWER, format_penalty=0.5)
    await env.reset()
    outcome = await env.step("open")
    assert door.heard == []
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (-0.5, False, False)
    assert outcome.info == {"effective": 0.0, "valid": 0.0}
    told = "Your answer holds no action. Write your action as <answer>...</answer>."
    assert outcome.messages == ({"role": "user", "content": told},)
    assert (await env.step("<answer>open</answer>")).terminated


async def test_an_action_that_the_environment_refuses_is_told_with_its_reason() -> None:
    outcome = await ParsedEnv(Live(Door()), MOVE, format_penalty=0.1).step("move away")
    assert outcome.messages[0]["content"] == "away is no use: open or push. Write move and a direction."
    assert (outcome.reward, outcome.info["valid"]) == (-0.1, 0.0)


async def test_a_refused_turn_leaves_the_state_as_it_was_and_a_new_episode_has_none_yet() -> None:
    env = ParsedEnv(Live(Door()), ANSWER)
    assert (await env.step("?")).state is None
    await env.step("<answer>push</answer>")
    assert (await env.step("?")).state == "shut"
    await env.reset()
    assert (await env.step("?")).state is None


async def test_closing_it_closes_the_environment() -> None:
    door = Door()
    await ParsedEnv(Live(door), ANSWER).close()
    assert door.is_closed


async def test_what_is_no_invalid_action_is_not_swallowed() -> None:
    class Broken(Door):
        def step(self, action: str) -> StepResult:
            raise KeyError(action)

    with pytest.raises(KeyError):
        await ParsedEnv(Live(Broken()), ANSWER).step("<answer>open</answer>")


def test_a_negative_penalty_would_pay_for_nonsense_and_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        EnvDomainConfig(env=FrozenLakeConfig(), format_penalty=-1.0)


async def test_a_bundled_game_is_won_through_the_wrapper_with_nonsense_in_between() -> None:
    game = FrozenLake(FrozenLakeConfig())
    env = ParsedEnv(Live(game, seed=4), ANSWER, format_penalty=0.25)
    await env.reset()
    rewards = []
    for action in game.solve():
        rewards.append((await env.step("hm")).reward)
        rewards.append((await env.step(f"<think>?</think> <answer>{action}</answer>")).reward)
    assert sum(rewards) == 1.0 - 0.25 * len(rewards) / 2
