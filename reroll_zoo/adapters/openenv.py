"""OpenEnv: a session with an environment server, over its WebSocket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from openenv.core import GenericEnvClient

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll.tokens.tool_calls import read_json
from reroll.types import Message
from reroll_zoo.adapters.config import OpenEnvConfig


class OpenEnv:
    """One session, from reset to close. All calls must come from one event loop.

    The server says only that an episode is done, so every end is a termination. An action that does not fit the
    server's schema is an InvalidAction.
    """

    def __init__(self, options: OpenEnvConfig) -> None:
        self._options = options
        self._client = GenericEnvClient(
            options.base_url, connect_timeout_s=options.timeout_s, message_timeout_s=options.timeout_s
        )
        self._is_under_way = False

    async def reset(self, seed: int) -> tuple[Message, ...]:
        """The server's episode of this seed: the rules, if there are any, and its first observation."""
        async with self._asking():
            result = await self._client.reset(seed=seed, **self._options.reset_options)
        self._shown = self._show(result.observation)
        self._return = 0.0
        self._is_under_way = True
        rules: tuple[Message, ...] = ({"role": "system", "content": self._options.rules},) if self._options.rules else ()
        return *rules, {"role": "user", "content": self._shown}

    async def step(self, action: str) -> StepResult:
        """Send one action."""
        if not self._is_under_way:
            raise EnvError("no episode is under way: call reset, which starts one")
        payload = self._payload(action)
        async with self._asking(action):
            result = await self._client.step(payload)
        before, self._shown = self._shown, self._show(result.observation)
        self._is_under_way = not result.done
        reward = float(result.reward or 0.0)
        self._return += reward
        info = {"effective": float(self._shown != before)}
        if result.done:
            threshold = self._options.success_at
            info["success"] = float(reward > 0 if threshold is None else self._return >= threshold)
        return StepResult(
            messages=() if result.done else ({"role": "user", "content": self._shown},),
            reward=reward,
            terminated=bool(result.done),
            info=info,
            state=self._shown,
        )

    async def close(self) -> None:
        """End the session, which frees its place on the server."""
        self._is_under_way = False
        await self._client.close()

    def _payload(self, action: str) -> dict[str, Any]:
        if self._options.action_field is not None:
            return {self._options.action_field: action}
        try:
            payload = read_json(action)
        except ValueError as error:
            raise InvalidAction(f"Answer with one JSON object: {error}.") from error
        if not isinstance(payload, dict):
            raise InvalidAction("Answer with one JSON object, such as {…}.")
        return payload

    def _show(self, observation: Mapping[str, Any]) -> str:
        field = self._options.observation_field
        if field is None:
            return "\n".join(f"{name}: {value}" for name, value in observation.items() if name != "metadata")
        if field not in observation:
            have = ", ".join(observation)
            raise EnvError(f"observations of {self._options.base_url} have no {field!r}, they have: {have}")
        return str(observation[field])

    @asynccontextmanager
    async def _asking(self, action: str | None = None) -> AsyncIterator[None]:
        """Runs a call to the server, for an action or a reset, and translates how it may fail."""
        try:
            yield
        except RuntimeError as error:
            # The client raises one type for all that a server refuses; the code tells whose fault it is.
            if action is not None and "code: VALIDATION_ERROR" in str(error):
                field = self._options.action_field
                wrong = f"{action[:60]!r} does not fit the field `{field}`" if field else "Its fields do not fit"
                raise InvalidAction(f"That is no action here. {wrong}.") from error
            raise EnvError(f"the environment server at {self._options.base_url} failed: {error}") from error
        except Exception as error:
            raise EnvError(f"no answer from the environment server at {self._options.base_url}: {error!r}") from error
