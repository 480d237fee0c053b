"""The options of environments of other libraries. Their adapters, which load the libraries, are modules of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from reroll.config.env_base import EnvConfig
from reroll_zoo.sandbox.config import LocalSandboxConfig


class GymnasiumConfig(EnvConfig):
    """A Gymnasium environment with Discrete, MultiDiscrete or Box actions. What it shows is written out as text."""

    runs: ClassVar[str] = "reroll_zoo.adapters.gymnasium:Gymnasium"
    packages: ClassVar[Mapping[str, str]] = {"gymnasium": "reroll[gymnasium]"}

    kind: Literal["gymnasium"] = "gymnasium"
    env_id: str
    """Its registered name, e.g. `FrozenLake-v1`; `module:Name-v0` imports the module that registers it first."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to `gymnasium.make`, e.g. `{is_slippery: false}`."""
    rules: str | None = None
    """What the policy is told about the task. How to act is added to it. Default: only the environment's name."""
    action_names: list[str] | None = None
    """Words for discrete actions 0, 1, …; without them an action is its number."""
    observation_names: list[str] | None = None
    """Words for the numbers of an array, or for the states of a discrete observation."""
    digits: int = Field(default=2, ge=0)
    """Numbers are shown rounded to so many decimal places."""
    ansi: bool = False
    """Show the environment's own text picture (`render_mode: ansi`) instead of its observation."""
    rgb_array: bool = False
    """Show the environment's own picture (`render_mode: rgb_array`) instead of its observation, to models that see. Many
    environments need pygame for it."""
    repeat: int = Field(default=1, ge=1)
    """One decision is repeated for so many steps of the environment."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps of the environment until the episode is cut. Default: its own limit."""
    success_at: float | None = None
    """Sum of rewards from which an episode is a success. Default: the environment's reward threshold, else an end that pays."""
    fresh: bool = False
    """Make a new environment for every episode. By default one serves again after `reset(seed=…)`, which Gymnasium promises to
    be the same; `reroll envs check` tells whether yours keeps the promise."""

    @model_validator(mode="after")
    def _one_picture(self) -> Self:
        if self.ansi and self.rgb_array:
            raise ValueError("ansi and rgb_array are two ways to show it: set one of them")
        return self


class TextArenaConfig(EnvConfig):
    """A single-player game of TextArena."""

    runs: ClassVar[str] = "reroll_zoo.adapters.textarena:TextArena"
    packages: ClassVar[Mapping[str, str]] = {"textarena": "reroll[textarena]"}

    kind: Literal["textarena"] = "textarena"
    env_id: str
    """E.g. `GuessTheNumber-v0`. Games of words (Wordle, Hangman, …) need NLTK's word lists on this machine."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the game, e.g. `{max_number: 50}`."""


class GemConfig(EnvConfig):
    """An environment of GEM (`gem-llm`)."""

    runs: ClassVar[str] = "reroll_zoo.adapters.gem:Gem"
    packages: ClassVar[Mapping[str, str]] = {"gem": "reroll[gem]"}

    kind: Literal["gem"] = "gem"
    env_id: str
    """E.g. `game:GuessTheNumber-v0-easy` or `rg:chain_sum`. Those built on a dataset download it from the Hugging Face Hub."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to `gem.make`."""
    boxed: bool = True
    """Put an action into `\\boxed{…}`, where GEM's games and maths look for it, unless the policy did. Turn off for code."""
    sandbox: LocalSandboxConfig = LocalSandboxConfig()
    """Where programs run, and answers that GEM's judges run as code. Installed packages are importable there in any case."""


class OpenEnvConfig(EnvConfig):
    """A session with an OpenEnv server."""

    runs: ClassVar[str] = "reroll_zoo.adapters.openenv:OpenEnv"
    packages: ClassVar[Mapping[str, str]] = {"openenv": "reroll[openenv]"}

    kind: Literal["openenv"] = "openenv"
    base_url: str = Field(pattern=r"^(https?|wss?)://", examples=["http://localhost:8000"])
    """E.g. `http://localhost:8000`. The server must allow as many sessions as episodes are played at once."""
    rules: str | None = None
    """What the policy is told about the task: a server sends observations only."""
    action_field: str | None = None
    """The field of the server's action that takes the policy's words. Default: they are a JSON object with all fields."""
    observation_field: str | None = None
    """The field of an observation that the policy sees. Default: all but `metadata`, one a line."""
    reset_options: dict[str, Any] = Field(default_factory=dict)
    """Sent with every reset, beside the seed."""
    success_at: float | None = None
    """Sum of rewards from which an episode is a success. Default: its last reward is positive."""
    timeout_s: float = Field(default=60.0, gt=0)
    """How long a connection or an answer may take."""

    @property
    def is_remote(self) -> bool:
        return True


class VerifiersConfig(EnvConfig):
    """An environment of verifiers (`SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv`, …), scored by its rubric.

    The seed names a row of its dataset, counted round: seeds beyond the last row begin again with the first.
    """

    runs: ClassVar[str] = "reroll_zoo.adapters.verifiers:Verifiers"
    packages: ClassVar[Mapping[str, str]] = {"verifiers": "reroll[verifiers]"}

    kind: Literal["verifiers"] = "verifiers"
    env_id: str
    """The installed module with `load_environment`, as `vf.load_environment` takes it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to `load_environment`."""
    split: Literal["train", "eval"] = "train"
    """Which of its datasets the rows are from."""
