"""How a model is held and trained: in one process, or by many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from reroll.config.registry import KindConfig
from reroll.errors import Violation


class StrategyConfig(KindConfig):
    """A way to hold and train a model. One that names no kind is `torch`.

    What it `runs` is called with a `training.make.RankModel`, and gives the `training.base.Strategy` of one worker.
    """

    group: ClassVar[str] = "reroll.strategies"
    default_kind: ClassVar[str | None] = "torch"
    can_follow: ClassVar[bool] = True
    """Whether a model that it only holds can be moved towards another, as a reference that follows the policy is."""
    scales_gradients: ClassVar[bool] = False
    """Whether its `Strategy` has `scale_gradients`, which `train.stream` needs."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes in bf16 and keeps fp32 master weights for the optimizer."""
    gradient_checkpointing: bool = False
    """Keep one activation per layer and make the others again in the backward pass: less memory, a third more time."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens that one forward and backward pass may hold, on each rank. What its rows share (the prompt of siblings, the
    context of an episode) counts once, and each repetition an eighth of that for its keys and values (a quarter but in bf16
    on a GPU). Raise it on a GPU that has room (`reroll plan` says how much): small passes leave it waiting for the host."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Rows of logits held at once: [chunk x vocabulary] is the largest tensor of the head. Where one chunk holds a whole
    micro-batch, the backward pass need not make them again."""

    @property
    def ranks_per_share(self) -> int:
        """Neighbouring ranks that are given the same rows: they compute them together."""
        return 1

    @property
    def pass_tokens(self) -> int:
        """Tokens that the ranks of one share take through the model at once."""
        return self.micro_batch_tokens


class RanksStrategyConfig(StrategyConfig):
    """A model that many processes hold together: what it `runs` is called on all of them at once."""

    num_ranks: int | None = Field(default=None, ge=1)
    """Processes that hold the model together; null: one per device. On the CPU, which is one device, so many share it."""
    cpu_offload: bool = False
    """What training adds to a model lives in host memory."""

    @property
    def zero_stage(self) -> int | None:
        """What ranks cut up among them, by ZeRO's count; None: a layout of its own."""
        return None

    def violations(self, where: str, model: Any, *, num_ranks: int | None) -> Iterator[Violation]:
        """What keeps this kind from holding the model (`ModelConfig`, or `FixedModelConfig`) whose node is at `where`.

        `num_ranks` is None where only the cluster knows.
        """
        yield from ()


class TorchStrategyConfig(StrategyConfig):
    """One process, one device, plain PyTorch: the oracle of every other kind."""

    runs: ClassVar[str] = "reroll.training.make:make_torch"
    scales_gradients: ClassVar[bool] = True

    kind: Literal["torch"] = "torch"
    optimizer: Literal["auto", "gpu", "host"] = "auto"
    """Where AdamW's moments and fp32 masters lie: on the model's device, or in page-locked host memory, from where each step
    takes them through the device piece by piece, to the same bits. `auto`: on the device if the plan of the run fits it so."""
