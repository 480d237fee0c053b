"""OpenEnv behind the Env seam, against the library's own server on this machine."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("openenv.core")

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from reroll.envs.base import InvalidAction
from reroll.errors import EnvError
from reroll_zoo.adapters.config import OpenEnvConfig
from reroll_zoo.adapters.openenv import OpenEnv

RULES = "Guess the number from 1 to 8."


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str
    num_guesses: int


class Guessing(Environment):  # type: ignore[type-arg]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self.target = options.get("target") or random.Random(seed).randint(1, 8)
        self.num_guesses = 0
        return Hint(hint="guess", num_guesses=options.get("num_guesses", 0))

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        if action.number > 1000:
            raise ZeroDivisionError("the server broke")
        self.num_guesses += 1
        is_right = action.number == self.target
        hint = "right" if is_right else "higher" if action.number < self.target else "lower"
        return Hint(hint=hint, num_guesses=self.num_guesses, done=is_right or self.num_guesses == 4, reward=float(is_right))

    @property
    def state(self) -> State:
        return State(step_count=self.num_guesses)


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server that runs for as long."""
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=16)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as address:
        yield address


async def win(env: OpenEnv) -> list[float]:
    low, high, rewards = 1, 8, []
    while True:
        middle = (low + high) // 2
        outcome = await env.step(str(middle))
        rewards.append(outcome.reward)
        if outcome.terminated:
            assert (outcome.messages, outcome.info["success"]) == ((), outcome.reward)
            return rewards
        low, high = (middle + 1, high) if outcome.messages[0]["content"] == "higher" else (low, middle - 1)


async def test_an_episode_is_played_over_the_wire(url: str) -> None:
    env = OpenEnv(OpenEnvConfig(base_url=url, rules=RULES, action_field="number", observation_field="hint"))
    assert await env.reset(3) == ({"role": "system", "content": RULES}, {"role": "user", "content": "guess"})
    rewards = await win(env)
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    with pytest.raises(EnvError, match="reset"):
        await env.step("1")
    await env.close()


async def test_an_action_can_be_a_json_object_and_an_observation_all_its_fields(url: str) -> None:
    env = OpenEnv(OpenEnvConfig(base_url=url, reset_options={"target": 5}))
    assert (await env.reset(0))[0]["content"] == "hint: guess\nnum_guesses: 0"
    outcome = await env.step('{"number": 2}')
    assert outcome.messages[0]["content"] == outcome.state == "hint: higher\nnum_guesses: 1"
    for words in ("2", "{number: 2}"):
        with pytest.raises(InvalidAction, match="JSON object"):
            await env.step(words)
    await env.close()


async def test_an_action_that_the_schema_refuses_is_invalid_and_changes_nothing(url: str) -> None:
    env = OpenEnv(OpenEnvConfig(base_url=url, action_field="number", reset_options={"target": 5}))
    await env.reset(0)
    with pytest.raises(InvalidAction, match="'five' does not fit the field `number`"):
        await env.step("five")
    assert (await env.step("1")).state == "hint: higher\nnum_guesses: 1"
    await env.close()
    env = OpenEnv(OpenEnvConfig(base_url=url))
    await env.reset(0)
    with pytest.raises(InvalidAction, match="fields"):
        await env.step('{"digit": 5}')
    await env.close()


async def test_a_reset_that_the_server_refuses_fails_the_sample(url: str) -> None:
    env = OpenEnv(OpenEnvConfig(base_url=url, reset_options={"num_guesses": "many"}))
    with pytest.raises(EnvError, match="VALIDATION_ERROR"):
        await env.reset(0)
    await env.close()


async def test_an_observation_that_stays_as_it_was_is_no_effect(url: str) -> None:
    env = OpenEnv(OpenEnvConfig(base_url=url, action_field="number", observation_field="hint", reset_options={"target": 5}))
    await env.reset(0)
    assert [(await env.step("1")).info["effective"] for _ in range(2)] == [1.0, 0.0]
    await env.close()


async def test_sessions_run_side_by_side_and_seeds_choose_their_instances(url: str) -> None:
    async def play(seed: int) -> list[float]:
        env = OpenEnv(OpenEnvConfig(base_url=url, action_field="number", observation_field="hint"))
        await env.reset(seed)
        try:
            return await win(env)
        finally:
            await env.close()

    first = await asyncio.gather(*(play(seed) for seed in range(4)))
    assert await asyncio.gather(*(play(seed) for seed in range(4))) == first
    assert len({len(rewards) for rewards in first}) > 1


async def test_a_server_that_goes_away_fails_the_sample() -> None:
    with serving() as address:
        env = OpenEnv(OpenEnvConfig(base_url=address, action_field="number"))
        await env.reset(0)
    with pytest.raises(EnvError, match="no answer"):
        await env.step("1")
    await env.close()


async def test_a_broken_server_an_absent_one_and_a_missing_field_fail_the_sample(url: str) -> None:
    env = OpenEnv(OpenEnvConfig(base_url=url, action_field="number"))
    await env.reset(0)
    with pytest.raises(EnvError, match="the server broke"):
        await env.step("1001")
    await env.close()
    with pytest.raises(EnvError, match="no answer"):
        await OpenEnv(OpenEnvConfig(base_url="http://127.0.0.1:9", timeout_s=2)).reset(0)
    env = OpenEnv(OpenEnvConfig(base_url=url, observation_field="text"))
    with pytest.raises(EnvError, match=r"have no 'text', they have: .*hint, num_guesses"):
        await env.reset(0)
    await env.close()
