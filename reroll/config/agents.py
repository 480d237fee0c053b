"""Programs that talk to the policy as they would talk to any OpenAI-compatible server, and where they reach it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from reroll.config.base import ImportPath, Node


class EndpointConfig(Node):
    """The server that agents talk to. It lives in the run itself; one API key is one episode."""

    host: str = "127.0.0.1"
    """`0.0.0.0` lets agents on other machines in: whoever has a key can then spend the run's GPUs."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Larger requests are refused."""


class LimitedAgentConfig(Node):
    """What all agents share."""

    timeout_s: float = Field(default=600.0, gt=0)
    """An agent that takes longer is stopped and its sample fails."""
    max_turns: int = Field(default=32, ge=1)
    """Completions that one episode may ask for; a request beyond them is refused and the sample counts as truncated."""


class FunctionAgentConfig(LimitedAgentConfig):
    """Your own function: `(prompt, *, base_url, api_key, **options) -> reward`, a number, a Score or nothing.

    A plain function runs in a thread of its own, which nothing can stop: after its time its key is void. An async
    function runs in the run's event loop: it must await its requests, or everything waits for it.
    """

    kind: Literal["function"]
    path: ImportPath
    """`module:name`; the folder of the YAML and the working directory are importable."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


class CommandAgentConfig(LimitedAgentConfig):
    """A program, started once per episode with OPENAI_BASE_URL and OPENAI_API_KEY in its environment.

    The prompt is on its standard input: one JSON object of id, messages, domain, answer and extra. Exit code 0 is
    success; a reward is reported with POST $OPENAI_BASE_URL/reward, `{"reward": 0.5, "parts": {}}`.
    """

    kind: Literal["command"]
    argv: list[str] = Field(min_length=1)
    """The program and its arguments, run without a shell. `{prompt}` stands for the text of the prompt's last message."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of the run."""


AgentConfig = Annotated[FunctionAgentConfig | CommandAgentConfig, Field(discriminator="kind")]
