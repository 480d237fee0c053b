"""verifiers behind the Env seam."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("verifiers.envs.multiturn_env")

import verifiers as vf
from datasets import Dataset

from reroll.envs.base import InvalidAction
from reroll.errors import EnvError
from reroll_zoo.adapters.config import VerifiersConfig
from reroll_zoo.adapters.verifiers import Verifiers, read_answer


def load_environment(shape: str) -> Any:
    rows = Dataset.from_list([{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(3)])
    held_out = Dataset.from_list([{"question": "9 + 1?", "answer": "10"}])
    shapes = {"single": vf.SingleTurnEnv, "guessing": Guessing, "tools": vf.ToolEnv, "rewriting": Rewriting, "broken": Broken}
    options: dict[str, Any] = {"tools": [add]} if shape == "tools" else {}
    rubric = vf.Rubric(funcs=[by_group if shape == "group" else is_right])
    kind = shapes.get(shape, vf.SingleTurnEnv)
    return kind(dataset=rows, eval_dataset=held_out, system_prompt="Be brief.", rubric=rubric, **options)


def is_right(completion: Any, answer: str, **_: Any) -> float:
    return float(completion[-1].content == answer)


def by_group(completions: list[Any], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def add(first: int, second: int) -> int:
    """Adds two whole numbers."""
    return first + second


class Guessing(vf.MultiTurnEnv):  # type: ignore[misc]
    """Says "no" to each wrong answer, three times at most."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_turns=3, **options)

    @vf.stop
    async def was_right(self, state: Any) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [vf.UserMessage(content=f"no, not {messages[-1].content}")]


class Rewriting(Guessing):
    async def get_prompt_messages(self, state: Any) -> Any:
        turn = len(state["trajectory"])
        return [vf.UserMessage(content=f"turn {turn}")] * (2 * turn + 1)


class Broken(Guessing):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        raise vf.Error("out of order")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed environment package."""
    module = ModuleType("env_for_tests")
    module.load_environment = load_environment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "env_for_tests", module)


def make(shape: str, **options: Any) -> Verifiers:
    return Verifiers(VerifiersConfig(env_id="env-for-tests", options={"shape": shape}, **options))


@pytest.mark.parametrize(("answer", "reward"), [("2", 1.0), ("3", 0.0)])
async def test_a_single_turn_is_scored_by_the_rubric(answer: str, reward: float) -> None:
    env = make("single")
    assert await env.reset(1) == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"})
    end = await env.step(answer)
    assert (end.reward, end.terminated, end.truncated, end.messages) == (reward, True, False, ())
    assert (end.info["success"], end.info["is_right"]) == (reward, reward)
    with pytest.raises(EnvError, match="reset"):
        await env.step(answer)


async def test_seeds_name_rows_and_the_split_names_the_dataset() -> None:
    env, held_out = make("single"), make("single", split="eval")
    assert [(await env.reset(seed))[1]["content"] for seed in (0, 2, 3)] == ["0 + 1?", "2 + 1?", "0 + 1?"]
    assert (await held_out.reset(0))[1]["content"] == "9 + 1?"
    await env.close()
    await held_out.close()


async def test_several_turns_show_what_the_environment_says() -> None:
    env = make("guessing")
    await env.reset(1)
    assert (await env.step("7")).messages == ({"role": "user", "content": "no, not 7"},)
    end = await env.step("2")
    assert (end.reward, end.terminated, end.info["num_turns"]) == (1.0, True, 2.0)


async def test_the_turn_limit_truncates() -> None:
    env = make("guessing")
    await env.reset(1)
    end = [await env.step("7") for _ in range(3)][-1]
    assert (end.terminated, end.truncated, end.reward) == (False, True, 0.0)


async def test_tools_are_listed_called_and_answered() -> None:
    env = make("tools")
    system, _ = await env.reset(1)
    assert system["content"].startswith("Be brief.")
    assert '"name": "add"' in system["content"]
    outcome = await env.step('Let me see. <tool_call>{"name": "add", "arguments": {"first": 1, "second": 1}}</tool_call>')
    assert outcome.messages == ({"role": "tool", "content": "2"},)
    end = await env.step("2")
    assert (end.reward, end.info["add_calls"]) == (1.0, 1.0)


async def test_a_malformed_tool_call_is_invalid_and_leaves_the_rollout_waiting() -> None:
    env = make("tools")
    await env.reset(1)
    for words in ("<tool_call>add 1 1</tool_call>", "<tool_call>[1]</tool_call>", '{"name" "add"}'):
        with pytest.raises(InvalidAction, match=r"not JSON|JSON object"):
            await env.step(words)
    assert (await env.step('{"name": "add", "arguments": {"first": 4, "second": 1}}')).messages[0]["content"] == "5"
    await env.close()


def test_words_around_tool_calls_are_kept() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    answer = read_answer(f"first {call}{call}")
    assert answer["content"] == "first"
    assert [(call["id"], call["name"], json.loads(call["arguments"])) for call in answer["tool_calls"]] == [
        ("call_0", "f", {}),
        ("call_1", "f", {}),
    ]


async def test_rollouts_of_one_environment_run_side_by_side() -> None:
    envs = [make("guessing") for _ in range(3)]
    await asyncio.gather(*(env.reset(seed) for seed, env in enumerate(envs)))
    outcomes = await asyncio.gather(*(env.step(str(seed)) for seed, env in enumerate(envs)))
    assert [outcome.messages[0]["content"] for outcome in outcomes] == ["no, not 0", "no, not 1", "no, not 2"]
    ends = await asyncio.gather(*(env.step(str(seed + 1)) for seed, env in enumerate(envs)))
    assert [end.reward for end in ends] == [1.0, 1.0, 1.0]


async def test_closing_in_the_middle_leaves_no_task_behind() -> None:
    env = make("guessing")
    await env.reset(0)
    await env.close()
    await env.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("shape", "why"), [("rewriting", "rewrites"), ("broken", "out of order")])
async def test_what_cannot_be_played_on_fails_the_sample(shape: str, why: str) -> None:
    env = make(shape)
    await env.reset(0)
    with pytest.raises(EnvError, match=why):
        await env.step("7")
    await env.close()


def test_a_rubric_over_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="group"):
        make("group")


def test_an_environment_loads_in_a_thread_and_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    made: list[Verifiers] = []
    thread = threading.Thread(
        target=lambda: made.append(Verifiers(VerifiersConfig(env_id="env-for-tests", options={"shape": "thread"})))
    )
    thread.start()
    thread.join()
    assert len(made) == 1
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
