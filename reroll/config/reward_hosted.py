"""Rewards that hold something or ask somebody: a service, a language model or a reward model that the run hosts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

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

    @property
    def hosted(self) -> HostedJudgeConfig | None:
        """The language model that the run is to host for it, if there is one."""
        return None


class ModelRewardConfig(OpenedRewardConfig, FixedModelConfig):
    """A reward model: a decoder with one scalar head, as the `reward_model` pipeline trains it or Hugging Face stores it."""

    runs: ClassVar[str] = "reroll.rewards.reward_model:open_reward_model"

    kind: Literal["reward_model"] = "reward_model"
    output: Literal["raw", "sigmoid"] = "raw"
    """What becomes of the head's number first; sigmoid puts it between 0 and 1."""
    scale: float = 1.0
    """It is multiplied by this."""
    clip: Annotated[tuple[float, float], AfterValidator(check_ascending)] | None = None
    """Then kept between these."""
    score_at: Literal["turn", "template"] = "turn"
    """Where the head is read: at the token that ends the answer, as reroll trains it, or where the chat template ends, often
    a newline later, as many published models were trained."""
    max_tokens: int = Field(default=4096, ge=2)
    """A longer conversation is cut at its end."""
