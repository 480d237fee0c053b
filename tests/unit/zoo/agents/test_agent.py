import asyncio
import contextlib
import importlib.util
import sys
import threading
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from agent_fakes import PROMPT, RENDERER, SAMPLING, Policy, is_alive, pass_time, say, serving, until
from pydantic import TypeAdapter, ValidationError
from rollout_fakes import make
from transformers import AutoModelForCausalLM

from reroll.config.agents import AgentConfig
from reroll.errors import RerollError, WorkerDied
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.worker import InferWorker
from reroll.models.load import load_tokenizer
from reroll.runtime.base import Placement
from reroll.runtime.local import LocalRuntime
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import rows_of
from reroll.types import FinishReason, Group, Prompt, Request, SamplingParams, Score, Status
from reroll_zoo.agents.agent import play_agent
from reroll_zoo.tiny_models import make_tiny

EXAMPLE = Path(__file__).parents[4] / "examples" / "agent_loop.py"


async def ask(access, *, times=1):
    async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=60) as client:
        for _ in range(times):
            answer = await client.chat.completions.create(model="any", messages=[dict(PROMPT.messages[0])])
        return answer.choices[0].message.content


TIMEOUT_S = 50.0
"""Less than clients wait for an answer, so that an agent that hangs is stopped before its request is given up."""


async def play(agent, *, policy=None, endpoint=None, timeout_s=TIMEOUT_S, **limits):
    async def run(endpoint):
        limits_ = {"max_turns": 4, **limits}
        return await play_agent(
            agent, endpoint, PROMPT, policy or Policy("ok"), RENDERER, SAMPLING, id="3.1", timeout_s=timeout_s, **limits_
        )

    if endpoint is not None:
        return await run(endpoint)
    async with serving() as endpoint:
        result = await run(endpoint)
        assert endpoint.num_episodes == 0, "its key is void"
        return result


def config(**tree):
    return TypeAdapter(AgentConfig).validate_python(tree)


def function(name, **options):
    """An agent from a function of this module, as a config names it."""
    return config(kind="function", path=f"{__name__}:{name}", options=options).make()


def command(code, *args, **fields):
    return config(kind="command", argv=[sys.executable, "-c", code, *args], **fields).make()


def asks_in_a_thread(prompt, *, base_url, api_key, reward=0.5):
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        client.chat.completions.create(model="any", messages=list(prompt.messages))
    assert threading.current_thread() is not threading.main_thread()
    return reward


async def asks_in_the_loop(prompt, *, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="any", messages=list(prompt.messages))
    return Score(value=0.5, parts={"style": 0.2})


async def leaves(prompt, *, base_url, api_key):
    sys.exit(3)


def leaves_its_thread(prompt, *, base_url, api_key):
    sys.exit(3)


async def test_a_plain_function_plays_in_a_thread_and_returns_its_reward():
    result = await play(function("asks_in_a_thread", reward=0.25))
    assert (result.id, result.status, result.reason, result.text) == ("3.1", Status.COMPLETED, "", "ok")
    assert (result.reward, result.reward_parts) == (0.25, {"agent": 0.25})
    assert result.turns[0].prompt_ids == RENDERER.start(PROMPT.messages)


async def test_an_async_function_plays_in_the_loop_and_returns_a_score():
    result = await play(function("asks_in_the_loop"))
    assert (result.status, result.reward, result.reward_parts) == (Status.COMPLETED, 0.5, {"style": 0.2})


async def test_without_a_report_the_reward_is_left_to_a_judge():
    async def agent(prompt, access):
        await ask(access)

    result = await play(agent)
    assert (result.status, result.reward, result.reward_parts) == (Status.COMPLETED, 0.0, {})


async def test_a_reported_zero_is_told_from_no_report():
    async def agent(prompt, access):
        await ask(access)
        return {"reward": 0}

    assert (await play(agent)).reward_parts == {"agent": 0.0}


async def test_a_reward_that_is_no_number_fails_the_sample():
    async def agent(prompt, access):
        await ask(access)
        return "great"

    result = await play(agent)
    assert (result.status, len(result.turns)) == (Status.FAILED, 1)
    assert "return a number" in result.reason


async def test_an_agent_that_raises_fails_the_sample_with_its_last_line():
    async def agent(prompt, access):
        await ask(access)
        raise KeyError("no such tool")

    result = await play(agent)
    assert result.status is Status.FAILED
    assert result.reason.startswith("the agent raised KeyError: 'no such tool' (")
    assert "test_agent.py:" in result.reason


@pytest.mark.parametrize("name", ["leaves", "leaves_its_thread"])
async def test_a_function_that_exits_ends_its_sample_and_not_the_run(name):
    result = await play(function(name))
    assert result.status is Status.FAILED
    assert "SystemExit: 3" in result.reason


async def test_an_agent_that_asks_nothing_fails():
    async def agent(prompt, access):
        return 1.0

    result = await play(agent)
    assert result.status is Status.FAILED
    assert "made no request" in result.reason


async def test_an_agent_that_falls_over_the_turn_limit_is_truncated():
    async def agent(prompt, access):
        await ask(access, times=3)

    result = await play(agent, max_turns=2)
    assert (result.status, len(result.turns)) == (Status.TRUNCATED, 2)
    assert "not done after 2 turns" in result.reason
    assert result.is_usable


async def test_a_first_prompt_beyond_the_context_fails_and_says_so():
    async def agent(prompt, access):
        await ask(access)

    result = await play(agent, max_total_tokens=3)
    assert result.status is Status.FAILED
    assert "no room within 3 tokens" in result.reason


async def test_a_last_completion_cut_by_the_run_is_truncated():
    async def agent(prompt, access):
        return float(len(await ask(access)))

    result = await play(agent, policy=Policy("x" * 99, finish=FinishReason.LENGTH))
    assert (result.status, result.reward) == (Status.TRUNCATED, 64.0)
    assert "rollout.max_tokens" in result.reason


async def test_an_aborted_request_aborts_the_sample():
    async def agent(prompt, access):
        await ask(access)

    assert (await play(agent, policy=Policy("ok", finish=FinishReason.ABORT))).status is Status.ABORTED


async def test_a_dead_engine_is_raised_and_stops_the_agent():
    stopped = []

    async def agent(prompt, access):
        try:
            with contextlib.suppress(openai.APIError):
                await ask(access)
            await asyncio.sleep(60)
        finally:
            stopped.append(True)

    with pytest.raises(WorkerDied, match="was killed"):
        await play(agent, policy=Policy(error=WorkerDied("engine[0] was killed")))
    assert stopped


async def test_an_agent_that_never_ends_is_stopped_in_time():
    policy = Policy("ok", gate=asyncio.Event())

    async def agent(prompt, access):
        await ask(access)

    task = asyncio.create_task(play(agent, policy=policy))
    await until(lambda: policy.requests)
    pass_time(TIMEOUT_S)
    result = await task
    assert (result.status, result.reason) == (Status.FAILED, "the agent did not end within 50 s")
    assert policy.cancelled == ["3.1.0"]


async def test_a_thread_that_never_ends_loses_its_key_and_is_reported(caplog):
    asked, released, refused = threading.Event(), threading.Event(), []

    def hangs(prompt, *, base_url, api_key):
        asks_in_a_thread(prompt, base_url=base_url, api_key=api_key)
        asked.set()
        released.wait(120)
        try:
            asks_in_a_thread(prompt, base_url=base_url, api_key=api_key)
        except openai.AuthenticationError as error:
            refused.append(error)

    globals()["hangs"] = hangs
    async with serving() as endpoint:
        task = asyncio.create_task(play(function("hangs"), endpoint=endpoint))
        await until(asked.is_set)
        pass_time(TIMEOUT_S)
        result = await task
        assert (result.status, len(result.turns)) == (Status.FAILED, 1)
        assert "sample 3.1: its agent's thread cannot be stopped" in caplog.text
        released.set()
        await until(lambda: refused)
        await until(lambda: not [thread for thread in threading.enumerate() if thread.name == "agent 3.1"])


async def test_cancelling_an_episode_stops_its_agent_and_its_generation():
    policy = Policy("ok", gate=asyncio.Event())

    async def agent(prompt, access):
        await ask(access)

    async with serving() as endpoint:
        task = asyncio.create_task(play(agent, policy=policy, endpoint=endpoint))
        await until(lambda: policy.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert policy.cancelled == ["3.1.0"]
        assert endpoint.num_episodes == 0


async def test_a_command_finds_address_key_and_prompt_and_posts_its_reward():
    program = """
import json, os, sys, urllib.request

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

prompt = json.load(sys.stdin)
assert sys.argv[1:] == ["say it", "{x}"] and os.environ["COLOUR"] == "red", sys.argv
assert (prompt["id"], prompt["domain"], prompt["answer"], prompt["extra"]) == ("p/0", "d", "7", {"level": 2})
answer = post("/chat/completions", {"messages": prompt["messages"]})
post("/reward", {"reward": len(answer["choices"][0]["message"]["content"]), "parts": {"length": 2}})
"""
    result = await play(command(program, "{prompt}", "{x}", env={"COLOUR": "red"}))
    assert (result.status, result.reason) == (Status.COMPLETED, "")
    assert (result.reward, result.reward_parts, result.text) == (2.0, {"length": 2.0}, "ok")


async def test_a_command_that_fails_gives_its_code_and_the_end_of_its_stderr():
    result = await play(command("import sys; print('x' * 9999, 'it broke', file=sys.stderr); sys.exit(3)"))
    assert result.status is Status.FAILED
    assert "exited with code 3" in result.reason
    assert result.reason.endswith("it broke")
    assert len(result.reason) < 700


async def test_a_command_that_a_signal_ended_says_which():
    result = await play(command("import os; os.kill(os.getpid(), 11)"))
    assert result.reason == "the agent's program was killed by signal 11: it wrote nothing to stderr"


FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid} ")
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


def pids(file):
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


@pytest.mark.parametrize("how", ["timeout", "cancel", "exit"])
async def test_a_commands_whole_family_is_gone_when_its_episode_is_over(how, tmp_path):
    file = tmp_path / "pids"
    agent = command(FAMILY + ("" if how == "exit" else "time.sleep(600)"), str(file))
    task = asyncio.create_task(play(agent, timeout_s=600))
    await until(lambda: len(pids(file)) == 2)
    if how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        if how == "timeout":
            pass_time(600)
        assert ("did not end within 600 s" if how == "timeout" else "made no request") in (await task).reason
    await until(lambda: not any(map(is_alive, pids(file))))


async def test_a_scheduler_takes_groups_that_agents_played_and_stops_the_rest_with_itself(journal):
    policy = Policy("ok")

    async def agent(prompt, access):
        await ask(access, times=2)
        return float(access.sample_id.split(".")[1])

    async with serving() as endpoint:

        async def episode(prompt, id, seed):
            sampling = replace(SAMPLING, seed=seed)
            return await play_agent(agent, endpoint, prompt, policy, RENDERER, sampling, id=id, timeout_s=20, max_turns=2)

        async def as_reported(prompt, trajectory):
            return Score(value=trajectory.reward, parts=trajectory.reward_parts)

        scheduler = make(journal, episode=episode, score=as_reported, max_staleness=1)
        groups = await scheduler.take(2)
        assert [group.rewards for group in groups] == [(0.0, 1.0)] * 2
        policy.gate = asyncio.Event()
        num_before = len(policy.requests)
        scheduler.release(groups, version=1)
        await until(lambda: len(policy.requests) > num_before)
        await scheduler.close()
        assert len(policy.cancelled) > 0
        assert endpoint.num_episodes == 0


def test_what_is_not_there_is_refused_before_any_episode():
    with pytest.raises(RerollError, match="cannot be imported"):
        config(kind="function", path="no_such_module:agent").make()
    with pytest.raises(RerollError, match="cannot be imported"):
        config(kind="function", path="reroll.types:agent").make()
    with pytest.raises(RerollError, match="is no function"):
        config(kind="function", path=f"{__name__}:PROMPT").make()
    with pytest.raises(RerollError, match="'no-such-program' is not installed"):
        config(kind="command", argv=["no-such-program"]).make()
    with pytest.raises(ValidationError, match="at least 1 item"):
        config(kind="command", argv=[])


async def test_the_example_plays_as_a_function_and_as_a_program(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    as_function = config(kind="function", path="agent_loop:solve", options={"max_tries": 3}).make()
    as_program = config(kind="command", argv=[sys.executable, str(EXAMPLE)]).make()
    for agent in (as_function, as_program):
        result = await play(agent, policy=Policy("is it 5", "maybe 6", "it is 7"))
        assert (result.status, result.reason) == (Status.COMPLETED, "")
        assert result.reward == pytest.approx(1 / 3)
        assert [turn.text for turn in result.turns] == ["is it 5", "maybe 6", "it is 7"]
        group = Group(number=0, prompt=PROMPT, trajectories=(result,), version=0)
        assert len(rows_of([group]).samples) == 1, "three turns, one row"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), max_positions=512))


@pytest.fixture
async def engine(tiny_folder):
    async with LocalRuntime() as runtime:
        placement = Placement(role="engine", devices=("cpu",), concurrency=CONCURRENCY)
        workers = await runtime.spawn(InferWorker, placement, model=tiny_folder, precision="fp32", max_running=8)
        cluster = InferCluster(workers)
        await cluster.generate(Request(id="warm", prompt_ids=(5,), sampling=SamplingParams(max_tokens=1)))
        yield cluster, workers
        await cluster.close()


async def test_what_an_agent_did_with_a_real_engine_is_what_the_model_gives_those_tokens(engine, tiny_folder):
    cluster, _ = engine
    spec = importlib.util.spec_from_file_location("agent_loop_alone", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def agent(prompt, *, base_url, api_key):
        return example.solve(prompt, base_url=base_url, api_key=api_key, max_tries=3)

    globals()["real_agent"] = agent
    prompt = Prompt(id="p", messages=(say("user", "hi"),), domain="d", answer="never said so")
    renderer = Renderer(load_tokenizer(tiny_folder))
    async with serving() as endpoint:
        played = await asyncio.gather(
            *(
                play_agent(
                    function("real_agent"),
                    endpoint,
                    prompt,
                    cluster.generate,
                    renderer,
                    SamplingParams(max_tokens=12, seed=seed),
                    id=f"0.{seed}",
                    timeout_s=60,
                    max_turns=5,
                )
                for seed in range(4)
            )
        )
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    samples = rows_of([Group(number=0, prompt=prompt, trajectories=tuple(played), version=0)]).samples
    assert len(samples) == 4
    assert len({sample.ids.tobytes() for sample in samples}) == 4, "each sample has its own seed"
    for sample, trajectory in zip(samples, played, strict=True):
        assert len(trajectory.turns) == 3
        assert sample.loss_mask.sum() == trajectory.num_completion_tokens
        ids = torch.from_numpy(sample.ids)
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1).gather(1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(sample.loss_mask)[1:]
        torch.testing.assert_close(logp[mask], torch.from_numpy(sample.logp)[1:][mask], atol=1e-4, rtol=1e-4)


async def test_a_real_engine_forgets_the_request_of_an_agent_that_is_stopped(engine, tiny_folder):
    cluster, workers = engine
    renderer = Renderer(load_tokenizer(tiny_folder))

    async def agent(prompt, access):
        await ask(access)

    async def status():
        (status,) = await workers.broadcast(InferWorker.stats)
        return status

    before = await status()
    await cluster.pause()
    async with serving() as endpoint:
        sampling = SamplingParams(max_tokens=400, min_tokens=400)
        result = asyncio.create_task(
            play_agent(
                agent, endpoint, PROMPT, cluster.generate, renderer, sampling, id="9.9", timeout_s=TIMEOUT_S, max_turns=1
            )
        )
        while not (await status()).num_unfinished:
            await asyncio.sleep(0.01)
        pass_time(TIMEOUT_S)
        assert (await result).reason == "the agent did not end within 50 s"
    await cluster.resume()
    while (await status()).num_unfinished:
        await asyncio.sleep(0.01)
    assert (await status()).num_tokens - before.num_tokens < 400, "it was not written to its end"
