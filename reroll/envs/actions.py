"""From the policy's words to an environment's action, and what becomes of words that are none."""

from __future__ import annotations

from dataclasses import replace

from reroll.config.actions import ActionConfig, LastLineActionConfig, RegexActionConfig, TagActionConfig
from reroll.envs.base import AsyncEnv, InvalidAction, StepResult
from reroll.runtime.patterns import last_match
from reroll.types import Message


class ParsedEnv:
    """An environment for a policy that writes its actions in the form that `config` describes: it takes the whole turn.

    The first message says how to write an action. A turn without one, or with one that the environment refuses, costs
    `format_penalty`; the policy is told what was wrong and the episode goes on as it was. `info` says whether a turn was
    `valid`.
    """

    def __init__(self, env: AsyncEnv, config: ActionConfig, *, format_penalty: float = 0.0) -> None:
        self.env = env
        self._config = config
        self._format_penalty = format_penalty
        self._state: str | None = None

    async def reset(self) -> tuple[Message, ...]:
        return self._begin(await self.env.reset())

    async def step(self, action: str) -> StepResult:
        try:
            return self._accept(await self.env.step(parse_action(action, self._config)))
        except InvalidAction as error:
            return self._refuse(error)

    async def close(self) -> None:
        await self.env.close()

    def _begin(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        self._state = None
        rule = action_rule(self._config)
        if not rule:
            return messages
        first, *others = messages
        return {**first, "content": f"{first['content']} {rule}"}, *others

    def _accept(self, outcome: StepResult) -> StepResult:
        self._state = outcome.state
        return replace(outcome, info={**outcome.info, "valid": 1.0})

    def _refuse(self, error: InvalidAction) -> StepResult:
        told = f"{str(error) or 'That is no action here.'} {action_rule(self._config)}".rstrip()
        return StepResult(
            messages=({"role": "user", "content": told},),
            reward=-self._format_penalty,
            info={"effective": 0.0, "valid": 0.0},
            state=self._state,
        )


def parse_action(text: str, config: ActionConfig) -> str:
    """The action in the policy's words, without spaces around it. Raises InvalidAction if there is none."""
    if config.thinking == "strip":
        text = _after_thinking(text)
    action: str | None
    match config:
        case TagActionConfig():
            action = last_tagged(text, config.tag)
        case RegexActionConfig():
            action = (last_match(config.pattern, text) or "").strip()
        case LastLineActionConfig():
            action = last_line(text)
        case _:
            action = text.strip()
    if not action:
        raise InvalidAction("Your answer holds no action." if text.strip() else "Your answer is empty.")
    return action


def action_rule(config: ActionConfig) -> str:
    """What the policy is told about writing an action; empty if it may write as it likes."""
    match config:
        case TagActionConfig():
            return f"Write your action as <{config.tag}>...</{config.tag}>."
        case LastLineActionConfig():
            return "Write your action alone on the last line."
        case RegexActionConfig():
            return config.rule
        case _:
            return ""


def last_tagged(text: str, tag: str) -> str | None:
    """What stands in the last `<tag>…</tag>`, without spaces around it; None if there is none."""
    before, close, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if close and opening else None


def last_line(text: str) -> str:
    """The last line that is not blank, without spaces around it; empty if all are."""
    return text.strip().rpartition("\n")[2].strip()


def _after_thinking(text: str) -> str:
    rest = text.rpartition("</think>")[2]
    if "<think>" in rest:
        raise InvalidAction("Your thinking did not end: close it with </think>, then act.")
    return rest
