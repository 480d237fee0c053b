"""Agents as a config names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from reroll.config.agents import AgentConfig
from reroll.config.base import ImportPath


class EndpointAgentConfig(AgentConfig):
    """One that takes a base URL and a key. What it `runs` is called with the node and gives an `agent.Agent`."""

    plays: ClassVar[str] = "reroll_zoo.agents.agent:open_agents"
    packages: ClassVar[Mapping[str, str]] = {"aiohttp": "reroll[agents]"}


class FunctionAgentConfig(EndpointAgentConfig):
    """Your own function: `(prompt, *, base_url, api_key, **options) -> reward`, a number, a Score or nothing.

    A plain function runs in a thread of its own, which nothing can stop: after its time its key is void. An async
    function runs in the run's event loop: it must await its requests, or everything waits for it.
    """

    runs: ClassVar[str] = "reroll_zoo.agents.agent:function_agent"

    kind: Literal["function"] = "function"
    path: ImportPath
    """`module:name`; the folder of the YAML and the working directory are importable."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    @property
    def code(self) -> str:
        return self.path


class CommandAgentConfig(EndpointAgentConfig):
    """A program, started once per episode with OPENAI_BASE_URL and OPENAI_API_KEY in its environment.

    The prompt is on its standard input: one JSON object of id, messages, domain, answer and extra. Exit code 0 is
    success; a reward is reported with POST $OPENAI_BASE_URL/reward, `{"reward": 0.5, "parts": {}}`.
    """

    runs: ClassVar[str] = "reroll_zoo.agents.agent:command_agent"

    kind: Literal["command"] = "command"
    argv: list[str] = Field(min_length=1)
    """The program and its arguments, run without a shell. `{prompt}` stands for the text of the prompt's last message."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of the run."""
