"""Programs that talk to the policy as they would talk to any OpenAI-compatible server, and where they reach it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from reroll.config.base import Node
from reroll.config.registry import KindConfig


class EndpointConfig(Node):
    """The server that agents talk to. It lives in the run itself; one API key is one episode."""

    host: str = "127.0.0.1"
    """`0.0.0.0` lets agents on other machines in: whoever has a key can then spend the run's GPUs."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Larger requests are refused."""


class AgentConfig(KindConfig):
    """What all agents share. Kinds are found by their entry points, group `reroll.agents`."""

    group: ClassVar[str] = "reroll.agents"
    plays: ClassVar[str]
    """`module:function` that has agents of such kinds play: an async context manager, given {domain: agent} and the endpoint's
    config, that yields {domain: `reroll.rollout.play.AgentEpisode`}. It is imported no sooner."""

    timeout_s: float = Field(default=600.0, gt=0)
    """An agent that takes longer is stopped and its sample fails."""
    max_turns: int = Field(default=32, ge=1)
    """Completions that one episode may ask for; a request beyond them is refused and the sample counts as truncated."""

    @property
    def code(self) -> str | None:
        """`module:name` of the user's code that its field `path` names; it is tried before a run. None: it has none."""
        return None
