"""What a policy writes runs nowhere but in the sandbox: every reward, environment and tool is given words with code in them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import planted
import pytest
from pydantic import TypeAdapter

from reroll.config.actions import ActionConfig
from reroll.config.agents import AgentConfig, EndpointConfig
from reroll.config.envs import EnvConfig
from reroll.config.registry import KindConfig
from reroll.config.reward_base import RewardConfig
from reroll.config.rewards import RewardWorkersConfig
from reroll.envs.actions import parse_action
from reroll.envs.base import InvalidAction
from reroll.envs.make import make_env
from reroll.envs.worker import HostedEnv, LoopThread
from reroll.errors import RewardError
from reroll.rewards.cluster import RewardCluster
from reroll.runtime.local import LocalRuntime
from reroll.testing import trajectory_of
from reroll.tokens.renderer import Renderer
from reroll.tokens.tool_calls import write_call
from reroll.types import Completion, FinishReason, Message, Prompt, SamplingParams, Status, Trajectory
from reroll_zoo.games.frozen_lake import FrozenLake, FrozenLakeConfig
from reroll_zoo.judge.answer import Answer
from reroll_zoo.judge.config import JudgeModel
from reroll_zoo.tiny_models import tiny_tokenizer
from reroll_zoo.tool_use.config import ToolConfig

SECURITY_PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def kinds(union: Any) -> set[str]:
    """Of a config union, or of a class that stands for all kinds of a group: what its `kind` may be."""
    if isinstance(union, type) and issubclass(union, KindConfig):
        return set(union.kinds())
    schema = TypeAdapter(union).json_schema()
    return set(schema["discriminator"]["mapping"])


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that none of the texts may make."""
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder / "mark"


def test_the_texts_do_harm_where_they_are_run(mark: Path) -> None:
    for what in ("eval, a shell", "eval, a file", "eval, a literal that is none", "an f-string"):
        subprocess.run([sys.executable, "-c", f"eval({planted.texts(mark)[what]!r})"], check=True)
        mark.unlink()
    pickled = planted.texts(mark)["pickle"].encode()
    subprocess.run([sys.executable, "-c", f"import pickle; pickle.loads({pickled!r})"], check=True)
    assert mark.exists()


# Rewards.


class Hosted:
    """A model that the run hosts, as a judge and as a reward model."""

    async def __call__(self, *asked: Any, **options: Any) -> Any:
        return Answer(text="Score: 5") if isinstance(asked[-1], SamplingParams) else 0.5

    async def close(self) -> None:
        return None


@pytest.fixture
def judge_url() -> Iterator[str]:
    """A server that judges everything to be middling."""

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            choice = {"index": 0, "message": {"role": "assistant", "content": "Score: 5"}, "finish_reason": "stop"}
            body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


USER_MODULE = """
from reroll.envs.base import StepResult
from reroll_zoo.games.frozen_lake import FrozenLake

def length(prompt, trajectory):
    return len(trajectory.text)

def repeat(text: str) -> str:
    '''Say it again.'''
    return text

class Echo:
    def reset(self, seed): return ({"role": "user", "content": "Say something."},)
    def step(self, action): return StepResult(messages=({"role": "user", "content": action},))
    def close(self): pass
"""


def reward_nodes(url: str) -> dict[str, list[dict[str, Any]]]:
    """By kind: the nodes that the texts are given to."""
    hosted, endpoint = {"kind": "hosted", "model": "none"}, {"kind": "endpoint", "url": url, "model": "judge", "retries": 0}
    alone: dict[str, dict[str, Any]] = {
        "overlong": {"max_tokens": 64, "buffer_tokens": 16},
        "length": {"max_tokens": 64},
        "regex": {"pattern": r"\bsum\b"},
        "import": {"path": "planted_user:length"},
        "code": {"limits": {"wall_s": 5, "cpu_s": 5}},
        "reward_model": {"model": "none"},
        "stack": {"parts": {"number": {"kind": "numeric"}, "long": {"kind": "repetition"}}},
        "cascade": {"steps": [{"kind": "exact"}, {"kind": "numeric"}]},
    }
    nodes = {kind: [{"kind": kind, **alone.get(kind, {})}] for kind in kinds(RewardConfig)}
    nodes["judge"] = [{"kind": "judge", "model": model} for model in (hosted, endpoint)]
    nodes["exact"].append({"kind": "exact", "pattern": r"(?s)<answer>(.*?)</answer>"})
    return nodes


def rows(kind: str) -> list[tuple[str | None, dict[str, Any]]]:
    """Reference answers and further columns that make the reward look at the answer closely."""
    if kind == "reasoning_gym":
        reasoning_gym = pytest.importorskip("reasoning_gym")
        task = {"name": "countdown", "options": {}, "entry": reasoning_gym.create_dataset("countdown", size=1, seed=3)[0]}
        return [(None, {"reasoning_gym": task})]
    extra = {
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:json_format"],
        "kwargs": [{}, {}],
        "tests": {"function": "add", "calls": [{"args": [1, 1], "returns": 2}]},
        "schema": {"type": "object", "required": ["sum"]},
        "options": ["one", "two"],
    }
    answer = {"choice": "A", "math": r"\frac{x+1}{2}"}.get(kind, "2")
    return [(answer, extra)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(kinds(RewardConfig)))
async def test_no_reward_runs_what_the_policy_writes(kind: str, judge_url: str, mark: Path, tmp_path: Path) -> None:
    (tmp_path / "planted_user.py").write_text(USER_MODULE)
    nodes = {f"{kind}{place}": node for place, node in enumerate(reward_nodes(judge_url)[kind])}
    configs = TypeAdapter(dict[str, RewardConfig]).validate_python(nodes)
    hosts: Any = dict.fromkeys(nodes, Hosted())
    async with LocalRuntime() as runtime:
        workers = RewardWorkersConfig(num_processes=2)
        rewards = await RewardCluster.start(
            runtime, configs, workers=workers, hosts=hosts, config_folder=tmp_path, run_folder=tmp_path
        )
        asked = [
            (Prompt(id="p", messages=({"role": "user", "content": "1 + 1"},), domain=name, answer=answer, extra=extra), text)
            for name in nodes
            for answer, extra in rows(kind)
            for bare in planted.texts(mark).values()
            for text in (bare, planted.dressed(bare))
        ]
        scores = (rewards.score(prompt, trajectory_of(text)) for prompt, text in asked)
        verdicts = await asyncio.gather(*scores, return_exceptions=True)
        await rewards.close()
    judged = sum(not isinstance(verdict, BaseException) for verdict in verdicts)
    assert all(isinstance(verdict, RewardError) for verdict in verdicts if isinstance(verdict, BaseException)), verdicts
    assert judged > len(asked) // 2, verdicts
    assert not list(mark.parent.iterdir())


# Environments.

ENVS: dict[str, list[dict[str, Any]]] = {
    "frozen_lake": [{}],
    "sokoban": [{}],
    "webshop": [{"num_products": 10}],
    "python_math": [{}],
    "retrieval_qa": [{"num_people": 10}],
    "gymnasium": [{"env_id": "FrozenLake-v1"}, {"env_id": "CartPole-v1"}],
    "textarena": [{"env_id": "GuessTheNumber-v0"}],
    "reasoning_gym_env": [{"name": "spiral_matrix"}, {"name": "chain_sum"}],
    "gem": [{"env_id": "game:GuessTheNumber-v0-easy"}, {"env_id": "rg:countdown"}],
    "import": [{"path": "planted_user:Echo"}],
}
"""By kind: the options of the environments that the texts are given to. Tools have tests of their own below."""
OTHERS_CODE = {"openenv", "verifiers"}
"""A server's or an installed module's environments, which answer in the tests below what they are told."""
ACTIONS: dict[str, dict[str, Any]] = {
    "tag": {},
    "last_line": {},
    "text": {},
    "regex": {"pattern": r"(?s)boxed\{(.*)\}", "rule": "Box it."},
}


def test_every_environment_and_form_of_action_is_given_the_texts() -> None:
    assert set(ENVS) | OTHERS_CODE | {"tools"} == kinds(EnvConfig)
    assert set(ACTIONS) == kinds(ActionConfig)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(ENVS))
def test_no_environment_runs_what_the_policy_writes(
    kind: str, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_user.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for package in EnvConfig.kinds()[kind].packages:
        pytest.importorskip(package)
    for options in ENVS[kind]:
        env = make_env(TypeAdapter(EnvConfig).validate_python({"kind": kind, **options}))
        play(env, "text", [text for bare in planted.texts(mark).values() for text in (bare, planted.dressed(bare))])
        env.close()
    assert not list(mark.parent.iterdir())


@pytest.mark.parametrize("form", sorted(ACTIONS))
def test_no_form_of_action_runs_what_the_policy_writes(form: str, mark: Path) -> None:
    play(FrozenLake(FrozenLakeConfig()), form, [planted.dressed(bare) for bare in planted.texts(mark).values()])
    assert not list(mark.parent.iterdir())


@pytest.mark.parametrize("kind", ["python_math", "retrieval_qa"])
def test_no_tool_of_a_bundled_environment_runs_what_the_policy_writes_outside_the_sandbox(kind: str, mark: Path) -> None:
    tool, argument = {"python_math": ("python", "code"), "retrieval_qa": ("search", "query")}[kind]
    env = make_env(TypeAdapter(EnvConfig).validate_python({"kind": kind, "max_calls": 1}))
    play(env, "text", [write_call(tool, {argument: bare}) for bare in planted.texts(mark).values()])
    assert not list(mark.parent.iterdir())


VERIFIERS_MODULE = """
import verifiers as vf
from datasets import Dataset

def add(first: int) -> int:
    '\''Adds one.'\''
    return first + 1

def length(completion, **_):
    return len(completion[-1].content or "")

class Echoes(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [vf.UserMessage(content=messages[-1].content)]

def load_environment(tools):
    rows = Dataset.from_list([{"question": "1 + 1?", "answer": "2"}])
    options = dict(dataset=rows, max_turns=1000, rubric=vf.Rubric(funcs=[length]))
    return vf.ToolEnv(tools=[add], **options) if tools else Echoes(**options)
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tools", [False, True])
def test_a_module_of_verifiers_is_given_the_words_as_words(
    tools: bool, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers.envs.multiturn_env")
    (tmp_path / "planted_module.py").write_text(VERIFIERS_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    play_hosted({"kind": "verifiers", "env_id": "planted-module", "options": {"tools": tools}}, mark)


@pytest.fixture
def openenv_url() -> Iterator[str]:
    """A server of OpenEnv whose environment shows what it is told."""
    pytest.importorskip("openenv.core")
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Words(Action):
        words: Any

    class Shown(Observation):
        shown: Any

    class Echoes(Environment):  # type: ignore[type-arg]
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State(step_count=0)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Shown:
            return Shown(shown="Say something.")

        def step(self, action: Words, timeout_s: float | None = None, **options: Any) -> Shown:
            return Shown(shown=action.words)

    listening = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Echoes, Words, Shown, max_concurrent_envs=2)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("options", [{}, {"action_field": "words"}])
def test_a_client_of_openenv_sends_the_words_and_runs_nothing(options: dict[str, Any], mark: Path, openenv_url: str) -> None:
    play_hosted({"kind": "openenv", "base_url": openenv_url, **options}, mark)


def play_hosted(node: dict[str, Any], mark: Path) -> None:
    """Say each text, bare and wherever an answer or a call is looked for, in as many episodes as it takes."""
    env = HostedEnv(TypeAdapter(EnvConfig).validate_python(node), LoopThread(), max_message_chars=20_000)
    env.open(0)
    for bare in planted.texts(mark).values():
        calls = write_call("add", {"first": bare}), f'<tool_call>{{"name": "{bare}", "arguments": {bare}}}</tool_call>'
        for text in (bare, planted.dressed(bare), json.dumps({"words": bare}), *calls):
            with suppress(InvalidAction):
                outcome = env.step(text)
                if outcome.terminated or outcome.truncated:
                    env.close()
                    env.open(0)
    env.close()
    assert not list(mark.parent.iterdir())


def play(env: Any, form: str, texts: Sequence[str]) -> None:
    """Say each text in an environment whose actions have this form, in as many episodes as it takes."""
    config: ActionConfig = TypeAdapter(ActionConfig).validate_python({"kind": form, **ACTIONS[form]})
    env.reset(1)
    for text in texts:
        with suppress(InvalidAction):
            outcome = env.step(parse_action(text, config))
            if outcome.terminated or outcome.truncated:
                env.reset(1)


# Tools.

MCP_SERVER = """
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")

@server.tool()
def {name}(text: str) -> str:
    return text

server.run(*(["streamable-http"] if sys.argv[1:] else []), **({{"port": int(sys.argv[1])}} if sys.argv[1:] else {{}}))
"""


@pytest.fixture
def mcp_url(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("mcp.server.mcpserver", reason="needs mcp 2", exc_type=ImportError)
    script = tmp_path / "far.py"
    script.write_text(MCP_SERVER.format(name="far"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail("the server did not start")


def test_no_tool_runs_what_the_policy_writes_outside_the_sandbox(
    mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mcp_url: str
) -> None:
    (tmp_path / "planted_user.py").write_text(USER_MODULE)
    (tmp_path / "near.py").write_text(MCP_SERVER.format(name="near"))
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    tools: dict[str, tuple[dict[str, Any], str, str]] = {
        "python": ({}, "python", "code"),
        "import": ({"path": "planted_user:repeat"}, "repeat", "text"),
        "mcp_stdio": ({"command": sys.executable, "args": [str(tmp_path / "near.py")]}, "near", "text"),
        "mcp_http": ({"url": mcp_url}, "far", "text"),
    }
    assert set(tools) == kinds(ToolConfig)
    node = {
        "kind": "tools",
        "tasks": {"kind": "jsonl", "path": str(tmp_path / "tasks.jsonl")},
        "tools": [{"kind": kind, **options} for kind, (options, _, _) in tools.items()],
        "max_calls": 10_000,
        "call_timeout_s": 20.0,
    }
    env = HostedEnv(TypeAdapter(EnvConfig).validate_python(node), LoopThread(), max_message_chars=20_000)
    env.open(0)
    answers: list[Message] = []
    for text in planted.texts(mark).values():
        calls = "".join(write_call(name, {argument: text}) for _, name, argument in tools.values())
        answers += env.step(calls).messages
        env.step(f'<tool_call>{{"name": "{text}", "arguments": {text}}}</tool_call>')
    env.close()
    assert sum("does not answer" in answer["content"] or "no tool" in answer["content"] for answer in answers) == 0
    assert not list(mark.parent.iterdir())


# Agents: the endpoint reads what the policy writes before their programs do.

ASKS_ONCE = """
import json, os, sys, urllib.request
prompt = json.load(sys.stdin)
tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
body = {"model": "any", "messages": prompt["messages"], "tools": [tool], "logprobs": True}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
print(json.dumps({"reward": 1.0, "read": json.load(urllib.request.urlopen(asked))["choices"][0]}))
"""
ASKS_IN_A_FUNCTION = """
import subprocess, sys, json, os
def run(prompt, base_url, api_key):
    told = json.dumps({"messages": [dict(message) for message in prompt.messages]})
    env = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    subprocess.run([sys.executable, "-c", CODE], input=told, text=True, check=True, env=env, capture_output=True)
    return 1.0
"""


@pytest.mark.parametrize("kind", sorted(kinds(AgentConfig)))
async def test_no_agents_endpoint_runs_what_the_policy_writes(
    kind: str, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    from reroll_zoo.agents.agent import play_agent
    from reroll_zoo.agents.endpoint import Endpoint

    tokenizer = tiny_tokenizer(words=("ok",))
    renderer = Renderer(tokenizer)
    texts = list(planted.texts(mark).values())
    said_texts = ["\n".join([*texts, *(write_call("add", {"a": bare}) for bare in texts)])]
    said_texts += [f'<tool_call>{{"name": "{bare}", "arguments": {bare}}}</tool_call>' for bare in texts]
    (tmp_path / "planted_agent.py").write_text(f"CODE = {ASKS_ONCE!r}\n{ASKS_IN_A_FUNCTION}")
    monkeypatch.syspath_prepend(tmp_path)
    options: dict[str, Any] = {
        "function": {"path": "planted_agent:run"},
        "command": {"argv": [sys.executable, "-c", ASKS_ONCE]},
    }
    agent = TypeAdapter(AgentConfig).validate_python({"kind": kind, **options[kind]})
    prompt = Prompt(id="p/0", messages=({"role": "user", "content": "Say something."},), domain="d")

    async def play_one(endpoint: Endpoint, text: str) -> Trajectory:
        async def write(_: Any) -> Completion:
            ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], renderer.stop_token_ids[-1])
            return Completion(
                token_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason=FinishReason.STOP, versions=((0, len(ids)),)
            )

        sampling, limits = SamplingParams(max_tokens=20_000), {"timeout_s": 60.0, "max_turns": 2}
        return await play_agent(agent.make(), endpoint, prompt, write, renderer, sampling, id="1", **limits)

    async with Endpoint(EndpointConfig()) as endpoint:
        for text in said_texts:
            played = await play_one(endpoint, text)
            assert (played.status, played.turns[0].text) == (Status.COMPLETED, text)
    assert not list(mark.parent.iterdir())


# The page that says all this.


def test_the_security_page_names_everything_that_sees_the_policys_words() -> None:
    section = SECURITY_PAGE.read_text().partition("## Who sees what the policy writes")[2].partition("\n## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    named: dict[str, set[str]] = {}
    for part, subjects, *others in table[2:]:
        assert len(others) == 3, subjects
        assert all(others), f"{subjects} has an empty cell"
        named.setdefault(part, set()).update(re.findall(r"`(\w+)`", subjects))
    assert named == {
        "reward": kinds(RewardConfig) - {"judge"},
        "judge": kinds(JudgeModel),
        "environment": {kind for kind, node in EnvConfig.kinds().items() if not node.packages},
        "adapter": {kind for kind, node in EnvConfig.kinds().items() if node.packages},
        "tool": kinds(ToolConfig),
        "action": kinds(ActionConfig),
        "agent": kinds(AgentConfig),
    }
