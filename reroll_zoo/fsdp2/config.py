"""The options of the fsdp2 strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from reroll.config.host import model_card
from reroll.errors import Violation
from reroll_zoo.ranks.config import GroupStrategyConfig


class Fsdp2StrategyConfig(GroupStrategyConfig):
    """PyTorch's fully sharded data parallelism over all devices of the role, with sequence and tensor parallelism inside it.

    Ranks are laid out as replicas × shards × sp × tp, neighbours sharing a tensor. Parameters are cut over shards and sp.
    Needs `runtime: {kind: processes}` or `ray`.
    """

    makes: ClassVar[str] = "reroll_zoo.fsdp2.strategy:make_fsdp2"
    scales_gradients: ClassVar[bool] = True

    kind: Literal["fsdp2"] = "fsdp2"
    tp: int = Field(default=1, ge=1)
    """So many neighbouring ranks split every layer's heads and columns among them (Llama, Mistral, Qwen2, Qwen3, SmolLM3)."""
    sp: int = Field(default=1, ge=1)
    """So many neighbouring ranks share the tokens of every sequence, for sequences that are too long for one of them. Each
    holds `micro_batch_tokens`, so together they take sequences `sp` times as long. Must divide the attention heads."""
    ep: int = Field(default=1, ge=1)
    """So many neighbouring ranks hold different experts of every layer, and tokens travel to them (Qwen3-MoE, without `tp`)."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the sharded model, e.g. one per node: weights are then gathered inside a copy only."""
    cpu_offload: bool = False
    """Weights, gradients and optimizer state live in host memory; a layer is on the GPU while it computes."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights between its forward and backward pass; false is faster and holds them all."""

    @property
    def ranks_per_share(self) -> int:
        return self.sp * self.tp

    @property
    def pass_tokens(self) -> int:
        return self.sp * self.micro_batch_tokens

    @property
    def shows_pictures(self) -> bool:
        return True

    def sight_violations(self, where: str, model: Any, *, family: str) -> Iterator[Violation]:
        yield from super().sight_violations(where, model, family=family)
        for name in ("sp", "tp", "ep"):
            if getattr(self, name) > 1:
                yield Violation(
                    f"{where}.strategy.{name}",
                    f"has ranks share what is shown as a whole, and models of family {family} see",
                    "set it to 1",
                )

    def violations(self, where: str, model: Any, *, num_ranks: int | None) -> Iterator[Violation]:
        yield from super().violations(where, model, num_ranks=num_ranks)
        yield from self._heads_violations(where, model.model)
        yield from self._experts_violations(where, model.model)
        if num_ranks is not None:
            yield from self._layout_violations(where, num_ranks=num_ranks)

    def _layout_violations(self, where: str, *, num_ranks: int) -> Iterator[Violation]:
        """Ranks that do not add up."""
        if num_ranks % (self.replicas * self.ranks_per_share):
            yield Violation(
                f"{where}.strategy",
                f"its ranks ({num_ranks}) do not divide into replicas {self.replicas} × sp {self.sp} × tp {self.tp}",
                "make replicas × sp × tp a divisor of the number of ranks: change them, the devices, or on the CPU num_ranks",
            )
            return
        num_shards = num_ranks // (self.replicas * self.tp)
        if num_shards % self.ep:
            yield Violation(
                f"{where}.strategy.ep",
                f"the {num_shards} ranks of a replica do not divide into groups of {self.ep}",
                f"make ep a divisor of {num_shards}",
            )

    def _heads_violations(self, where: str, model: str | None) -> Iterator[Violation]:
        """Ranks that share sequences compute whole attention heads. A model that is not on this disk is judged when it is."""
        num_heads = _stated(model, "num_attention_heads")
        if self.sp > 1 and num_heads is not None and num_heads % self.ranks_per_share:
            yield Violation(
                f"{where}.strategy.sp",
                f"the {num_heads} attention heads of {model} cannot be shared by sp {self.sp} × tp {self.tp} ranks",
                f"make sp × tp a divisor of {num_heads}",
            )

    def _experts_violations(self, where: str, model: str | None) -> Iterator[Violation]:
        """Each rank that shares out experts computes whole ones."""
        num_experts = _stated(model, "num_experts", "num_local_experts")
        if self.tp > 1 and (self.ep > 1 or num_experts):
            yield Violation(
                f"{where}.strategy.tp",
                "tp cuts the matrices of dense layers, and cannot cut experts",
                "set tp to 1: ep shares experts out, and sp long sequences",
            )
        if self.ep > 1 and num_experts is not None and (num_experts % self.ep or not num_experts):
            yield Violation(
                f"{where}.strategy.ep",
                f"the {num_experts} experts of {model} cannot be shared out to {self.ep} ranks",
                f"make ep a divisor of {num_experts}" if num_experts else "set ep to 1",
            )


def _stated(model: str | None, *names: str) -> int | None:
    """What the model's config.json says under the first of these names that it has; 0 if none: it has no such thing."""
    card = model_card(model) if model else None
    if card is None:
        return None
    found = next((card[name] for name in names if name in card), 0)
    return found if isinstance(found, int) else None
