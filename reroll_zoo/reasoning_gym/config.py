"""The options of all that reasoning-gym gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from reroll.config.base import Pattern
from reroll.config.data_base import RowSourceConfig
from reroll.config.env_base import EnvConfig
from reroll.config.reward_base import InProcessRewardConfig
from reroll_zoo.sandbox.config import LocalSandboxConfig

PACKAGES = {"reasoning_gym": "reroll[data]"}


class ReasoningGymSourceConfig(RowSourceConfig):
    """A reasoning-gym generator: endless verifiable tasks, scored by its own verifier (reward kind `reasoning_gym`)."""

    runs: ClassVar[str] = "reroll_zoo.reasoning_gym.rows:task_rows"
    packages: ClassVar[Mapping[str, str]] = PACKAGES

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """Of the generator, e.g. chain_sum."""
    size: int = Field(default=1000, ge=1)
    """How many tasks to generate."""
    seed: int = 0
    """Different seeds give different tasks: use another one for held-out data."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator, e.g. `{max_digits: 2}`."""

    @property
    def title(self) -> str:
        return f"reasoning-gym {self.name}"


class ReasoningGymEnvConfig(EnvConfig):
    """Tasks of one reasoning-gym generator, a task an episode, judged by its own verifier."""

    runs: ClassVar[str] = "reroll_zoo.reasoning_gym.env:ReasoningGymEnv"
    packages: ClassVar[Mapping[str, str]] = PACKAGES

    kind: Literal["reasoning_gym_env"] = "reasoning_gym_env"
    name: str
    """Of the generator, e.g. chain_sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator, e.g. `{max_digits: 2}`."""
    max_attempts: int = Field(default=1, ge=1)
    """Answers until the episode ends. The last one counts; a perfect one ends it early."""
    sandbox: LocalSandboxConfig = LocalSandboxConfig()
    """Where an answer is scored that its scorer runs as code. reasoning-gym is importable there, whatever is set here."""

    def prepare(self) -> None:
        self.make().close()  # It opens the sandbox, or says what the machine lacks.


class ReasoningGymRewardConfig(InProcessRewardConfig):
    """The verifier of the reasoning-gym task that the prompt came from."""

    runs: ClassVar[str] = "reroll_zoo.reasoning_gym.reward:ReasoningGymVerifier"
    packages: ClassVar[Mapping[str, str]] = PACKAGES
    only_rows_of: ClassVar[str | None] = "reasoning_gym"

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    pattern: Pattern | None = None
    """As in the other kinds: what part of the text is the answer."""
    sandbox: LocalSandboxConfig = LocalSandboxConfig()
    """Where an answer is scored that its scorer runs as code. reasoning-gym is importable there, whatever is set here."""

    @property
    def score_on_timeout(self) -> float | None:
        return 0.0
