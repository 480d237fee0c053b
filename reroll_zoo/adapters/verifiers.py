"""verifiers: its own rollout runs as it is, and asks reroll's policy where it would ask a model server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import verifiers
from verifiers.clients import Client
from verifiers.envs import environment

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll.tokens.tool_calls import CALL_OPENS, MalformedCall, find_calls
from reroll.types import Message
from reroll_zoo.adapters.config import VerifiersConfig

# A call ends before the next one opens, so that calls which stay open are not read to the end of the text, each again.
TOOL_CALL = re.compile(r"<tool_call>((?:(?!</?tool_call>).)*+)</tool_call>", re.DOTALL)
LIMITS = ("max_turns_reached", "timeout_reached", "prompt_too_long", "max_total_completion_tokens_reached")
"""Stop conditions by which the library cuts an episode."""


class Verifiers:
    """One rollout of a verifiers environment; the rubric's score is the reward of its last step.

    Its metrics are in the last step's info; a score of at least the environment's pass threshold is a success. A policy
    calls tools by writing `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or the JSON object alone; the tools are
    listed in the system message. All calls must come from one event loop.
    """

    def __init__(self, options: VerifiersConfig) -> None:
        env_id = self._env_id = options.env_id
        self._env = _load(env_id, json.dumps(options.options, sort_keys=True))
        if self._env.requires_group_rollouts:
            raise ValueError(f"the rubric of {env_id} compares the rollouts of a group: it cannot score one episode")
        self._rows = self._env.get_dataset() if options.split == "train" else self._env.get_eval_dataset()
        self._policy = _Policy()
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, seed: int) -> tuple[Message, ...]:
        """The row of this seed, as its conversation."""
        await self.close()
        self._policy = _Policy()
        self._rollout = asyncio.create_task(self._play(self._rows[seed % len(self._rows)]))
        if not await self._is_asked(self._rollout):
            raise EnvError(f"{self._env_id} ended before the policy could speak: {self._rollout.result().get('error')!r}")
        self._shown: Sequence[Any] = self._policy.prompt
        messages = _plain(self._shown)
        return _with_tools(messages, self._policy.tools) if self._policy.tools else messages

    async def step(self, action: str) -> StepResult:
        """Let the policy's words be the model's answer, and run on to the next question or the end."""
        if self._rollout is None:
            raise EnvError("no episode is under way: call reset, which starts one")
        self._policy.answer(read_answer(action) if self._policy.tools else {"content": action})
        if not await self._is_asked(self._rollout):
            state, self._rollout = self._rollout.result(), None
            return self._outcome(state)
        before, self._shown = self._shown, self._policy.prompt
        if list(self._shown[: len(before)]) != list(before):
            raise EnvError(f"{self._env_id} rewrites what was said before: only conversations that grow can be played")
        return StepResult(messages=_plain(self._shown[len(before) + 1 :]), info={"effective": 1.0})

    async def close(self) -> None:
        """Stop the rollout; the environment cleans up after it."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.cancel()
            with suppress(asyncio.CancelledError):
                await rollout

    async def _play(self, row: Mapping[str, Any]) -> Any:
        state = await self._env.rollout(row, self._policy, "policy", {})
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return state

    async def _is_asked(self, rollout: asyncio.Task[Any]) -> bool:
        """Waits until the policy is asked (true) or the rollout is over (false)."""
        asked = asyncio.create_task(self._policy.asked())
        try:
            await asyncio.wait({asked, rollout}, return_when=asyncio.FIRST_COMPLETED)
            return not rollout.done()
        finally:
            asked.cancel()

    def _outcome(self, state: Any) -> StepResult:
        if state["error"] is not None:
            raise EnvError(f"{self._env_id} failed: {state['error']!r}")
        reward = float(state["reward"])
        # One turn is the whole task of a single-turn environment, not a limit that cut it.
        was_cut = bool(state["is_truncated"] or (state["stop_condition"] in LIMITS and self._env.max_turns != 1))
        metrics = {name: float(value) for name, value in state["metrics"].items()}
        return StepResult(
            reward=reward,
            terminated=not was_cut,
            truncated=was_cut,
            info={**metrics, "effective": 1.0, "success": float(reward >= self._env.pass_threshold)},
        )


class _Policy(Client):  # type: ignore[misc]  # the library has no types
    """A model server to the library: each request waits for the words of the policy."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prompt: Sequence[Any] = ()
        self.tools: Sequence[Any] = ()
        self._question = asyncio.Event()
        self._answers: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    async def asked(self) -> None:
        """Waits for the next question; its conversation is then in `prompt`."""
        await self._question.wait()

    def answer(self, message: Mapping[str, Any]) -> None:
        """Give the words that the library waits for."""
        self._question.clear()
        self._answers.put_nowait(message)

    async def get_native_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        self.prompt, self.tools = list(prompt), tools or ()
        self._question.set()
        return await self._answers.get()

    async def from_native_response(self, response: Mapping[str, Any]) -> Any:
        finish_reason = "tool_calls" if "tool_calls" in response else "stop"
        message = {**response, "finish_reason": finish_reason, "is_truncated": False}
        return verifiers.Response.model_validate({"id": "policy", "created": 0, "model": "policy", "message": message})

    async def raise_from_native_response(self, response: Any) -> None: ...

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    def setup_client(self, config: Any) -> None: ...

    async def close(self) -> None: ...


def read_answer(text: str) -> dict[str, Any]:
    """The policy's words as an assistant message with the tool calls in them. Raises InvalidAction for a malformed call."""
    blocks = TOOL_CALL.findall(text)
    if not blocks and re.match(r'\s*\{\s*"name"', text):
        blocks, text = [text], ""
    if not blocks:
        return {"content": text}
    calls = [_read_call(block, number=number) for number, block in enumerate(blocks)]
    return {"content": TOOL_CALL.sub("", text).strip(), "tool_calls": calls}


def _read_call(block: str, *, number: int) -> dict[str, str]:
    (call,) = find_calls(f"{CALL_OPENS}{block}")
    if isinstance(call, MalformedCall):
        raise InvalidAction(call.problem)
    return {"id": f"call_{number}", "name": call.name, "arguments": json.dumps(call.arguments)}


def _with_tools(messages: tuple[Message, ...], tools: Sequence[Any]) -> tuple[Message, ...]:
    """The conversation with the tools and how to call them in its system message."""
    listed = [json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters}) for tool in tools]
    how = 'Call a tool with <tool_call>{"name": "…", "arguments": {…}}</tool_call>. The tools:'
    text = "\n".join([how, *listed])
    if messages[0]["role"] == "system":
        return {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]
    return {"role": "system", "content": text}, *messages


def _plain(messages: Sequence[Any]) -> tuple[Message, ...]:
    return tuple(Message(role=message.role, content=_text(message.content)) for message in messages)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise EnvError("the environment shows more than text, which no policy here can read")
    return "\n".join(str(part["text"]) for part in parts)


@lru_cache(maxsize=8)
def _load(env_id: str, options: str) -> Any:
    """The environment, once a process: it holds a dataset, and any number of its rollouts may run side by side."""
    with _signals_left_alone():
        env = verifiers.load_environment(env_id, **json.loads(options))
    if not isinstance(env, verifiers.MultiTurnEnv):
        raise ValueError(
            f"{env_id} is a {type(env).__name__}: only environments built on verifiers' MultiTurnEnv can be played"
        )
    return env


@contextmanager
def _signals_left_alone() -> Iterator[None]:
    """An environment would take SIGINT and SIGTERM for itself: a run needs them, and a thread may not set them."""
    environment.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    try:
        yield
    finally:
        environment.signal = signal
