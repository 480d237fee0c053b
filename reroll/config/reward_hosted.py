"""Rewards that hold something or ask somebody: a service, or a model that the run hosts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.base import Node
from reroll.config.parts import Devices, FixedModelConfig
from reroll.config.reward_base import RewardConfig


def check_ascending(scale: tuple[float, float]) -> tuple[float, float]:
    """The two ends of a scale, if the first is the lower one; else ValueError."""
    if not scale[0] < scale[1]:
        raise ValueError("the scale must go from low to high, e.g. [0, 10]")
    return scale


class HostedJudgeConfig(Node):
    """A model that the run hosts itself, on engines of its own. Rewards that describe the same one share it."""

    kind: Literal["hosted"]
    model: str
    """A Hugging Face folder or hub id, or the name of a model that `reroll models fetch` stored."""
    devices: Devices = "auto"
    num_workers: int = Field(default=1, ge=1)
    """Independent engines; requests are spread over them by load."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of its weights."""
    max_running: int = Field(default=64, ge=1)
    """Sequences decoded together by one engine."""


class OpenedRewardConfig(RewardConfig):
    """A reward that lives as long as the run. What it `runs` is called with the node and a `reroll.rewards.base.RewardContext`,
    and gives something to await: `async (prompt, trajectory) -> Score`, with `close` and `stats` where it needs them."""

    hosts: ClassVar[str]
    """`module:function` that brings up the model that the run hosts for it: `async (node, name, runtime, stack) -> model`.
    `stack` closes the model; the reward finds it in its context (`RewardContext.host`)."""

    @property
    def hosted(self) -> tuple[str, FixedModelConfig | HostedJudgeConfig] | None:
        """The model that the run is to host for it, with its path below this node; None: it needs none."""
        return None

    @property
    def host_key(self) -> str:
        """Rewards whose keys are equal share the model."""
        assert self.hosted is not None
        return self.hosted[1].model_dump_json()
