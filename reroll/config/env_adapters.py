"""Environments of other libraries: their options, which are also the keyword arguments of the classes in `envs/adapters`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from reroll.config.base import Node


class GymnasiumEnv(Node):
    """A Gymnasium environment with Discrete, MultiDiscrete or Box actions. What it shows is written out as text."""

    kind: Literal["gymnasium"]
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
    repeat: int = Field(default=1, ge=1)
    """One decision is repeated for so many steps of the environment."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps of the environment until the episode is cut. Default: its own limit."""
    success_at: float | None = None
    """Sum of rewards from which an episode is a success. Default: the environment's reward threshold, else an end that pays."""
    fresh: bool = False
    """Make a new environment for every episode. By default one serves again after `reset(seed=…)`, which Gymnasium promises to
    be the same; `reroll envs check` tells whether yours keeps the promise."""


class TextArenaEnv(Node):
    """A single-player game of TextArena."""

    kind: Literal["textarena"]
    env_id: str
    """E.g. `GuessTheNumber-v0`. Games of words (Wordle, Hangman, …) need NLTK's word lists on this machine."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the game, e.g. `{max_number: 50}`."""


class ReasoningGymEnv(Node):
    """Tasks of one reasoning-gym generator, a task an episode, judged by its own verifier."""

    kind: Literal["reasoning_gym_env"]
    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator, e.g. `{max_digits: 2}`."""
    max_attempts: int = Field(default=1, ge=1)
    """Answers until the episode ends. The last one counts; a perfect one ends it early."""


class GemEnv(Node):
    """An environment of GEM (`gem-llm`)."""

    kind: Literal["gem"]
    env_id: str
    """E.g. `game:GuessTheNumber-v0-easy` or `rg:chain_sum`. Those built on a dataset download it from the Hugging Face Hub."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to `gem.make`."""
    boxed: bool = True
    """Put an action into `\\boxed{…}`, where GEM's games and maths look for it, unless the policy did. Turn off for code."""


class OpenEnvEnv(Node):
    """A session with an OpenEnv server."""

    kind: Literal["openenv"]
    base_url: str = Field(pattern=r"^(https?|wss?)://")
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


class VerifiersEnv(Node):
    """An environment of verifiers (`SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv`, …), scored by its rubric.

    The seed names a row of its dataset, counted round: seeds beyond the last row begin again with the first.
    """

    kind: Literal["verifiers"]
    env_id: str
    """The installed module with `load_environment`, as `vf.load_environment` takes it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to `load_environment`."""
    split: Literal["train", "eval"] = "train"
    """Which of its datasets the rows are from."""


AdapterConfig = Annotated[
    GymnasiumEnv | TextArenaEnv | ReasoningGymEnv | GemEnv | OpenEnvEnv | VerifiersEnv, Field(discriminator="kind")
]
