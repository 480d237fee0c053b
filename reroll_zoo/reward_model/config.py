"""A reward model as a config names it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from reroll.config.parts import FixedModelConfig
from reroll.config.reward_hosted import OpenedRewardConfig, check_ascending


class ModelRewardConfig(OpenedRewardConfig, FixedModelConfig):
    """A reward model: a decoder with one scalar head, as the `reward_model` pipeline trains it or Hugging Face stores it."""

    runs: ClassVar[str] = "reroll_zoo.reward_model.reward:open_reward_model"
    hosts: ClassVar[str] = "reroll_zoo.reward_model.host:host_reward_model"

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

    @property
    def hosted(self) -> tuple[str, FixedModelConfig]:
        return "", self

    @property
    def host_key(self) -> str:
        return self.model_dump_json(include={"model", "strategy", "devices", "score_at"})
