"""How answers are judged."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from reroll.config.base import ImportPath, Node
from reroll.config.imports import import_object
from reroll.config.reward_base import AnswerRewardConfig, InProcessRewardConfig
from reroll.config.reward_base import RewardConfig as RewardConfig
from reroll.config.reward_hosted import OpenedRewardConfig


class ImportRewardConfig(InProcessRewardConfig):
    """Your own function: `(prompt, trajectory, **options) -> float | Score`, plain or async, run in worker processes."""

    kind: Literal["import"] = "import"
    path: ImportPath
    """`module:name`; the folder of the YAML and the working directory are importable."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    memory_mb: int | None = Field(default=4096, ge=16)
    """What its process may allocate beyond what importing took; null: no limit. A call that wants more fails its sample."""

    @property
    def part_names(self) -> set[str] | None:
        return None

    def make(self) -> Any:
        function = import_object(self.path)
        if not callable(function):
            raise TypeError(f"{self.path} is {type(function).__name__}, not a function")
        try:
            inspect.signature(function).bind(None, None, **self.options)
        except TypeError as error:
            raise TypeError(f"{self.path} cannot be called with (prompt, trajectory) and its options: {error}") from None
        except ValueError:  # Some functions written in C do not tell what they take.
            pass
        return lambda prompt, trajectory: function(prompt, trajectory, **self.options)


class EnvRewardConfig(RewardConfig):
    """What the episode earned by itself: the sum of its environment's rewards, or what its agent reported."""

    runs: ClassVar[str] = "reroll.rewards.base:EnvReward"

    kind: Literal["env_reward"] = "env_reward"


class RewardWorkersConfig(Node):
    """Where rewards run that need processes of their own: verifiers that may hang, and your code."""

    num_workers: int = Field(default=1, ge=1)
    """Groups of processes. On Ray a group takes one CPU of a node, and groups may live on nodes of their own; its processes are
    actors. On one machine it only multiplies `num_processes`."""
    num_processes: int | None = Field(default=None, ge=1)
    """Processes that one domain may use at once in each group; default: one per core. Each further domain that is judged
    in processes adds one, so that no domain waits for another."""


def walk(configs: Mapping[str, RewardConfig]) -> Iterator[tuple[str, RewardConfig]]:
    """Every reward node with its name path, nested ones included: `math`, `math.parts.answer`, `math.steps.0`."""
    for name, node in configs.items():
        yield name, node
        for part, nested in walk(node.nested):
            yield f"{name}.{part}", nested


def wants_host(node: RewardConfig) -> bool:
    """Whether it asks a model that the run must host."""
    return isinstance(node, OpenedRewardConfig) and node.hosted is not None


def needs_process(node: RewardConfig) -> bool:
    """Whether it runs in worker processes: its kind does, or it searches by a pattern, which may take for ever."""
    return node.in_process or (isinstance(node, AnswerRewardConfig) and node.pattern is not None)
