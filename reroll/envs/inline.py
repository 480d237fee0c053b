"""Environments in the event loop itself, for those that answer in microseconds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reroll.envs.base import Env, StepResult
from reroll.envs.checked import as_env_error, as_messages, as_step_result
from reroll.envs.make import env_name, make_env
from reroll.envs.worker import NOT_OPEN
from reroll.errors import EnvError
from reroll.types import Message

if TYPE_CHECKING:
    from reroll.envs.cluster import EnvCluster


class InlineEnv:
    """An environment of a cluster that has no workers. A hang or crash of it is the run's own."""

    def __init__(self, cluster: EnvCluster, domain: str, seed: int) -> None:
        self._cluster = cluster
        self._domain = domain
        self._seed = seed
        self._node = cluster.envs[domain]
        self._name = env_name(self._node)
        self._max_chars = cluster.config.max_message_chars
        self._env: Env | None = None
        self._id: int | None = None

    async def reset(self) -> tuple[Message, ...]:
        if self._id is not None:
            raise EnvError("reset was called before: an environment is for one episode")
        self._id = await self._cluster.enter()
        with self._cluster.meter.timing(self._domain, "reset"):
            with as_env_error(self._name, "__init__"):
                self._env = make_env(self._node)
            self._cluster.inline.add(self)
            with as_env_error(self._name, "reset"):
                messages: Any = self._env.reset(self._seed)
                if inspect.isawaitable(messages):
                    messages = await messages
                return as_messages(messages, max_chars=self._max_chars)

    async def step(self, action: str) -> StepResult:
        if self._env is None:
            raise EnvError(NOT_OPEN)
        with self._cluster.meter.timing(self._domain, "step"), as_env_error(self._name, "step", max_chars=self._max_chars):
            result: Any = self._env.step(action)
            if not isinstance(result, StepResult) and inspect.isawaitable(result):
                result = await result
            return as_step_result(result, max_chars=self._max_chars)

    async def close(self) -> None:
        env, self._env = self._env, None
        self._cluster.inline.discard(self)
        if self._id is not None:
            self._cluster.leave(self._id)
        if env is not None:
            close: Callable[[], Any] = env.close
            with self._cluster.meter.counting_failures(self._domain), as_env_error(self._name, "close"):
                closed = close()
                if inspect.isawaitable(closed):
                    await closed
