"""The loop that all environments with tools share: the policy calls tools until it answers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll.tokens.tool_calls import Call, MalformedCall, find_calls, write_call
from reroll.types import Message
from reroll_zoo.tool_use.answers import final_answer, same_answer
from reroll_zoo.tool_use.config import ToolLimitsConfig
from reroll_zoo.tool_use.tool import Tool, ToolError, run_call

RULES = "When you know the answer, write it as <answer>...</answer>."
_NO_CALLS_LEFT = "No calls are left: answer now."


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an episode is about."""

    messages: tuple[Message, ...]
    """The question. How to answer is added to it."""
    answer: str


class ToolLoop(ABC):
    """An episode in which the policy calls tools until it answers: a turn without a call is its answer.

    An action is a turn of the policy without its thinking. The first message brings the tools' schemas, each call is answered
    by a message of role `tool`, and what goes wrong with a call is said there. The right answer pays 1.
    """

    def __init__(self, limits: ToolLimitsConfig, *, tools: Sequence[Tool] = ()) -> None:
        self.use(tools)
        self._limits = limits
        self._made: list[Call | MalformedCall] = []
        self.task: Task | None = None
        """None when no episode is under way."""

    def use(self, tools: Sequence[Tool]) -> None:
        """Put these in the place of the tools so far. Raises ValueError if two have the same name."""
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"two tools have the name {', '.join(twice)}: leave one of them out")

    @abstractmethod
    def draw_task(self, seed: int) -> Task:
        """The task of this seed."""

    def is_right(self, answer: str, expected: str) -> bool:
        """Whether an answer counts."""
        return same_answer(answer, expected)

    def reset(self, seed: int) -> tuple[Message, ...]:
        self.task = self.draw_task(seed)
        self._made = []
        self._state = ""
        first, *others = self.task.messages
        if first["role"] != "system":
            first, others = Message(role="system", content=""), [first, *others]
        rules = f"{first['content']} {RULES}".lstrip()
        return {"role": "system", "content": rules, "tools": [tool.schema for tool in self.tools.values()]}, *others

    def step(self, action: str) -> StepResult:
        if self.task is None:
            raise EnvError("no episode is under way: call reset, which starts one")
        if not action.strip():
            raise InvalidAction(f"Your turn is empty. Call a tool, or answer. {RULES}")
        calls = find_calls(action)
        if not calls:
            return self._judge(final_answer(action), self.task)
        if not self._calls_left:
            self.task = None
            return StepResult(truncated=True, info={"effective": 0.0, "success": 0.0}, state=self._state)
        return self._answer_calls(calls)

    def close(self) -> None:
        """End the episode."""
        self.task = None

    def play_on(self, calls: Sequence[Call]) -> list[str]:
        """The turns of a policy that knows which calls to make: those not made yet, as far as they are left, then the answer.

        Empty when no episode is under way.
        """
        if self.task is None:
            return []
        ahead = [call for call in calls if call not in self._made][: self._calls_left]
        return [*(write_call(call.name, call.arguments) for call in ahead), f"<answer>{self.task.answer}</answer>"]

    @property
    def _calls_left(self) -> int:
        return self._limits.max_calls - len(self._made)

    def _judge(self, answer: str, task: Task) -> StepResult:
        self.task = None
        success = float(self.is_right(answer, task.answer))
        return StepResult(reward=success, terminated=True, info={"effective": 1.0, "success": success}, state=self._state)

    def _answer_calls(self, calls: Sequence[Call | MalformedCall]) -> StepResult:
        made = calls[: self._calls_left]
        answers = [self._answer(call) for call in made]
        self._made += made
        texts = [text for text, _ in answers]
        if len(made) < len(calls):
            texts.append(f"{len(calls) - len(made)} further calls were not made. {_NO_CALLS_LEFT}")
        elif not self._calls_left:
            texts[-1] = f"{texts[-1]}\n{_NO_CALLS_LEFT}"
        num_failed = sum(not worked for _, worked in answers)
        # Sibling episodes that have seen the same results are where they are, whatever they wrote to get there.
        self._state = hashlib.sha256(repr((self._state, texts)).encode()).hexdigest()[:16]
        return StepResult(
            messages=tuple(Message(role="tool", content=text) for text in texts),
            info={
                "effective": float(num_failed < len(made)),
                "num_calls": float(len(made)),
                "failed_calls": float(num_failed),
                "success": 0.0,
            },
            state=self._state,
        )

    def _answer(self, call: Call | MalformedCall) -> tuple[str, bool]:
        """What the policy is told, and whether the call worked."""
        if isinstance(call, MalformedCall):
            return f"Error: {call.problem}", False
        try:
            return self._cut(run_call(self.tools, call, timeout_s=self._limits.call_timeout_s)), True
        except ToolError as error:
            return self._cut(f"Error: {error}"), False

    def _cut(self, text: str) -> str:
        over = len(text) - self._limits.max_result_chars
        if over <= 0:
            return text
        head = self._limits.max_result_chars // 2
        return f"{text[:head]}\n... {over} characters left out ...\n{text[over + head :]}"
