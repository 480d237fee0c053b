"""Where untrusted programs run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reroll.config.base import Node
from reroll.config.reward_base import RewardConfig

SandboxLevel = Literal["rlimits", "landlock", "namespaces"]


class LocalSandboxConfig(Node):
    """On this machine, which must run Linux. `docs/security.md` says what each level contains and what it does not."""

    kind: Literal["local"] = "local"
    level: Literal["auto"] | SandboxLevel = "auto"
    """`namespaces`: no sight of your files, no network. `landlock`: the same without child processes, for containers.
    `rlimits`: no network and no child processes, but files are read as your user reads them. `auto` takes the first of these
    that the kernel gives, and warns if that is `rlimits`. A level that is asked for and not given is an error."""
    site_packages: bool = False
    """Let programs import what is installed beside reroll (NumPy, …), read-only."""


class RemoteSandboxConfig(Node):
    """A service with the HTTP interface of SandboxFusion (`POST /run_code`). It answers for what its programs can do."""

    kind: Literal["remote"]
    url: str = Field(pattern=r"^https?://", examples=["http://localhost:8080"])
    """URL of the service, e.g. `http://sandbox:8080`."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long an answer may take beyond the program's own time."""
    retries: int = Field(default=3, ge=0)
    """How often a request is sent again that the service did not answer or could not run."""
    max_in_flight: int = Field(default=64, ge=1)
    """Requests at a time."""


SandboxConfig = Annotated[LocalSandboxConfig | RemoteSandboxConfig, Field(discriminator="kind")]


class SandboxedRewardConfig(RewardConfig):
    """A reward that runs what the policy wrote, in a sandbox that it takes from `reroll_zoo.sandbox.make.join_sandbox`."""

    sandbox: SandboxConfig = LocalSandboxConfig()
    """Where programs run."""
