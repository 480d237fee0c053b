"""How a model is held and trained: in one process, or by many ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from reroll.config.base import Node


class StrategyBase(Node):
    """What every way to hold and train a model has."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes in bf16 and keeps fp32 master weights for the optimizer."""
    gradient_checkpointing: bool = False
    """Keep one activation per layer and make the others again in the backward pass: less memory, a third more time."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens that one forward and backward pass may hold, on each rank. Raise it on a GPU that has room (`reroll plan` says
    how much): small passes leave it waiting for the host."""
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


class TorchStrategy(StrategyBase):
    """One process, one device, plain PyTorch: the oracle of every other kind."""

    kind: Literal["torch"] = "torch"


class Fsdp2Strategy(StrategyBase):
    """PyTorch's fully sharded data parallelism over all devices of the role, with sequence and tensor parallelism inside it.

    Ranks are laid out as replicas × shards × sp × tp, neighbours sharing a tensor. Parameters are cut over shards and sp.
    Needs `runtime: {kind: ray}`.
    """

    kind: Literal["fsdp2"]
    num_ranks: int | None = Field(default=None, ge=1)
    """Processes that hold the model together; null: one per device. On the CPU, which is one device, so many share it."""
    tp: int = Field(default=1, ge=1)
    """So many neighbouring ranks split every layer's heads and columns among them (Llama, Mistral, Qwen2, Qwen3, SmolLM3)."""
    sp: int = Field(default=1, ge=1)
    """So many neighbouring ranks share the tokens of every sequence, for sequences that are too long for one of them. Each
    holds `micro_batch_tokens`, so together they take sequences `sp` times as long. Must divide the attention heads."""
    ep: int = Field(default=1, ge=1)
    """So many neighbouring ranks hold different experts of every layer, and tokens travel to them (Qwen3-MoE, without `tp`)."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the sharded model, e.g. one per node: weights are then gathered inside a copy only."""
    offload: bool = False
    """Weights, gradients and optimizer state live in host memory; a layer is on the GPU while it computes."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights between its forward and backward pass; false is faster and holds them all."""

    @property
    def ranks_per_share(self) -> int:
        return self.sp * self.tp

    @property
    def pass_tokens(self) -> int:
        return self.sp * self.micro_batch_tokens


class DeepspeedStrategy(StrategyBase):
    """DeepSpeed's ZeRO over all devices of the role. Needs the extra `deepspeed` and `runtime: {kind: ray}`."""

    kind: Literal["deepspeed"]
    stage: Literal[1, 2, 3] = 3
    """What ranks cut up among them. 1: masters and optimizer state; 2: gradients too; 3: the weights as well."""
    num_ranks: int | None = Field(default=None, ge=1)
    """Processes that train the model together; null: one per device. On the CPU, which is one device, so many share it."""
    offload: bool = False
    """Masters, gradients and optimizer state live in host memory, where the optimizer steps; under stage 3 weights do too."""


def _strategy_kind(value: object) -> str | None:
    """A strategy that names no kind is `torch`."""
    if isinstance(value, TorchStrategy | Fsdp2Strategy | DeepspeedStrategy):
        return value.kind
    return str(value.get("kind", "torch")) if isinstance(value, dict) else None


StrategyConfig = Annotated[
    Annotated[TorchStrategy, Tag("torch")]
    | Annotated[Fsdp2Strategy, Tag("fsdp2")]
    | Annotated[DeepspeedStrategy, Tag("deepspeed")],
    Discriminator(_strategy_kind),
]
