"""The options of the deepspeed strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from reroll.config.parts import ModelConfig
from reroll.errors import Violation
from reroll_zoo.ranks.config import GroupStrategyConfig


class DeepspeedConfig(GroupStrategyConfig):
    """DeepSpeed's ZeRO over all devices of the role. Needs the extra `deepspeed`, and `runtime: {kind: processes}` or `ray`."""

    makes: ClassVar[str] = "reroll_zoo.deepspeed.make:make_deepspeed"
    packages: ClassVar[Mapping[str, str]] = {"deepspeed": "reroll[deepspeed]"}
    can_follow: ClassVar[bool] = False

    kind: Literal["deepspeed"] = "deepspeed"
    stage: Literal[1, 2, 3] = 3
    """What ranks cut up among them. 1: masters and optimizer state; 2: gradients too; 3: the weights as well."""
    cpu_offload: bool = False
    """Masters, gradients and optimizer state live in host memory, where the optimizer steps; under stage 3 weights do too."""

    @property
    def zero_stage(self) -> int | None:
        return self.stage

    def violations(self, where: str, model: Any, *, num_ranks: int | None) -> Iterator[Violation]:
        yield from super().violations(where, model, num_ranks=num_ranks)
        if isinstance(model, ModelConfig) and model.swap != "none":
            yield Violation(
                f"{where}.swap",
                "DeepSpeed's state cannot leave a device and come back",
                f"set it to none, and {where}.strategy.cpu_offload to true to keep it on the host; or use strategy fsdp2",
            )
