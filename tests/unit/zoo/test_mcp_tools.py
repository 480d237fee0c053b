from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp.server.mcpserver", reason="needs mcp 2", exc_type=ImportError)

from reroll.errors import EnvError
from reroll.tokens.tool_calls import write_call
from reroll_zoo.tool_use.config import McpHttpConfig, McpStdioConfig, ToolEnvConfig
from reroll_zoo.tool_use.mcp import McpServer
from reroll_zoo.tool_use.tasks import ToolTasks
from reroll_zoo.tool_use.tool import Tool, ToolError

SERVER = '''
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
notes = []

@server.tool()
def add(a: int, b: int) -> int:
    """Add two
    numbers."""
    return a + b

@server.tool()
def note(text: str) -> list[str]:
    """Keep a note; returns all."""
    notes.append(text)
    return notes

@server.tool()
def secret() -> str:
    return os.environ.get("SECRET", "none")

@server.tool()
def fail() -> str:
    raise ToolError("out of luck")

@server.tool()
def hang() -> str:
    time.sleep(600)
    return ""

@server.tool()
def die() -> str:
    os._exit(3)

if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''
PLENTY_S = 60.0


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture
def stdio(script: str) -> McpStdioConfig:
    return McpStdioConfig(kind="mcp_stdio", command=sys.executable, args=[script], env={"SECRET": "sesame"})


def by_name(server: McpServer) -> dict[str, Tool]:
    return {tool.name: tool for tool in server.tools}


def mcp_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mcp ")]


def test_a_server_over_stdio_offers_tools_that_are_called_like_any_other(stdio: McpStdioConfig) -> None:
    with McpServer(stdio) as server:
        tools = by_name(server)
        assert tools["add"].description == "Add two numbers."
        assert tools["add"].parameters["required"] == ["a", "b"]
        assert tools["add"].run({"a": 2, "b": 3}, PLENTY_S) == "5"
        assert tools["secret"].run({}, PLENTY_S) == "sesame"
        assert tools["note"].run({"text": "one"}, PLENTY_S) == "one"
        assert tools["note"].run({"text": "two"}, PLENTY_S) == "one\ntwo"
        with pytest.raises(ToolError, match="out of luck"):
            tools["fail"].run({}, PLENTY_S)
    assert mcp_threads() == []
    with pytest.raises(ToolError, match="server of add does not answer"):
        tools["add"].run({"a": 2, "b": 3}, PLENTY_S)


def test_a_server_that_hangs_and_then_dies_only_fails_its_calls(stdio: McpStdioConfig) -> None:
    with McpServer(stdio) as server:
        tools = by_name(server)
        with pytest.raises(ToolError, match=r"hang took more than 0.2 s"):
            tools["hang"].run({}, 0.2)
        with pytest.raises(ToolError, match="server of die does not answer"):
            tools["die"].run({}, PLENTY_S)
        with pytest.raises(ToolError, match="server of add does not answer"):
            tools["add"].run({"a": 2, "b": 3}, PLENTY_S)
    assert mcp_threads() == []


@pytest.mark.parametrize(
    ("command", "args", "problem"),
    [
        ("no-such-program", [], "no-such-program did not start"),
        (sys.executable, ["-c", "raise SystemExit('no licence')"], "no licence"),
    ],
)
def test_a_server_that_does_not_start_fails_the_episode_with_its_words(command: str, args: list[str], problem: str) -> None:
    with pytest.raises(EnvError, match=problem), McpServer(McpStdioConfig(kind="mcp_stdio", command=command, args=args)):
        pass
    assert mcp_threads() == []


@pytest.fixture
def http(script: str) -> Iterator[McpHttpConfig]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield McpHttpConfig(kind="mcp_http", url=f"http://127.0.0.1:{port}/mcp", headers={"X-Who": "a test"})
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + PLENTY_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError("the server does not listen")


def test_a_server_that_never_answers_fails_the_episode_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reroll_zoo.tool_use.mcp._START_S", 0.2)
    silent = McpStdioConfig(kind="mcp_stdio", command="sleep", args=["600"])
    with pytest.raises(EnvError, match=r"sleep did not start: it took more than 0.2 s"), McpServer(silent):
        pass
    assert mcp_threads() == []


def test_a_server_over_http_offers_the_same_and_its_death_fails_calls(http: McpHttpConfig) -> None:
    with McpServer(http) as server:
        tools = by_name(server)
        assert tools["add"].run({"a": 2, "b": 3}, PLENTY_S) == "5"
        with pytest.raises(ToolError, match="out of luck"):
            tools["fail"].run({}, PLENTY_S)
        with pytest.raises(ToolError, match="die"):
            tools["die"].run({}, PLENTY_S)
    assert mcp_threads() == []
    with pytest.raises(EnvError, match="did not start"), McpServer(http):
        pass


def test_an_episode_has_a_server_of_its_own_and_ends_it(stdio: McpStdioConfig, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "2 + 3?", "answer": 5}))
    node: dict[str, Any] = {
        "kind": "tools",
        "tasks": {"kind": "jsonl", "path": str(tmp_path / "tasks.jsonl")},
        "tools": [stdio.model_dump(), {"kind": "python"}],
        "call_timeout_s": PLENTY_S,
    }
    config = ToolEnvConfig.model_validate(node)
    env = ToolTasks(config)
    first, _ = env.reset(0)
    assert {"python", "add", "note"} <= {tool["function"]["name"] for tool in first["tools"]}
    bad, good, kept = env.step(
        write_call("add", {"a": "2", "b": 3}) + write_call("add", {"a": 2, "b": 3}) + write_call("note", {"text": "x"})
    ).messages
    assert bad["content"] == 'Error: The arguments of add do not fit: a is "2", but must be integer.'
    assert (good["content"], kept["content"]) == ("5", "x")
    assert env.step("<answer>5</answer>").reward == 1.0
    env.reset(0)
    assert env.step(write_call("note", {"text": "y"})).messages[0]["content"] == "y"
    env.close()
    env.close()
    assert mcp_threads() == []
