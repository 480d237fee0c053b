"""The options that vLLM and sglang have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from reroll.config.host import parse_devices
from reroll.config.parts import ELASTIC, Devices, DeviceSelectionConfig, EngineConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation
from reroll_zoo.vision.kinds import seeing_family


class ExternalEngineConfig(EngineConfig):
    """What vLLM and sglang have in common: a pool of GPU memory, and GPUs that share each layer. Both draw tokens as the
    embedded engine does: seeds, log-probs and stops mean the same.
    """

    precision: Literal["same", "fp32", "bf16"] = "same"
    """`same` follows the policy's precision."""
    num_workers: int = Field(default=1, ge=1)
    """Independent engines; samples are spread over them by load. More than one needs `runtime: {kind: ray}`."""
    tp: int = Field(default=1, ge=1)
    """GPUs that share each layer of one engine: so many neighbours of `devices`."""
    max_running: int = Field(default=256, ge=1)
    """Sequences decoded together."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest context; null: as long as the model takes."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of each GPU that the engine may fill with weights and cache. A trainer on the same GPU needs the rest."""
    enforce_eager: bool = False
    """Neither compile the model nor capture CUDA graphs: slower, and ready at once."""
    sleep: bool = False
    """While another role holds its device: true frees KV cache and weights, and requests in flight are prefilled again when the
    engine is back; false only pauses."""

    @property
    def gpus_per_worker(self) -> int:
        return self.tp

    @property
    def cpu_pool_gib(self) -> float:
        """Memory for the KV cache where the engine runs on the CPU."""
        return 0.0

    def violations(self, config: RlvrConfig) -> Iterator[Violation]:
        num_gpus = _num_named(self.devices)
        if num_gpus is not None and num_gpus < self.tp:
            yield Violation(
                "engine.devices",
                f"names {num_gpus} GPU{'s' if num_gpus > 1 else ''}, and each worker is spread over {self.tp}",
                f"name at least {self.tp} of one node, or lower engine.tp",
            )
        if family := seeing_family(config.policy.model):
            yield Violation(
                "engine.kind",
                f"is {self.kind}, which reroll shows no pictures, and models of family {family} see",
                "set it to embedded",
            )
        longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
        if self.max_model_len is not None and self.max_model_len < longest:
            yield Violation(
                "engine.max_model_len",
                f"{self.max_model_len} is less than max_prompt_tokens + max_tokens = {longest}",
                f"set it to at least {longest}, or leave it out",
            )


def _num_named(devices: Devices) -> int | None:
    """GPUs that are named; None where they are not: `auto`, the CPU, or what is no device at all."""
    if isinstance(devices, DeviceSelectionConfig):
        return devices.gpus
    if devices in ("auto", "cpu", ELASTIC):
        return None
    try:
        return len(parse_devices(devices))
    except ValueError:
        return None  # Reported as such.
