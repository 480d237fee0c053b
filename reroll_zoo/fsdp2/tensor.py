"""Tensor parallelism: each of `tp` neighbouring ranks computes its share of the heads and of the inner width of a layer.

What goes into a block and comes out of it is whole on every rank, and so are embedding, norms and heads: all ranks of one
group compute the same log-probs from the same numbers.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from reroll.errors import ModelError
from reroll_zoo.fsdp2.layout import FROM_SHARES, INTO_SHARES

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Those whose layers have the parts below and no others that would need a split."""

_ON_SHARES = ("q_norm", "k_norm")
"""Whole on every rank, but applied to its own heads: their gradients are parts of a sum."""


def check_splits(model: PreTrainedModel, *, tp: int) -> None:
    """Raise ModelError if `tp` ranks cannot share the layers of this model evenly."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"tensor parallelism knows the families {', '.join(FAMILIES)}, not {config.model_type}: set strategy.tp to 1"
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "inner columns": config.intermediate_size,
    }
    for what, size in sizes.items():
        if size % tp:
            raise ModelError(f"{size} {what} cannot be shared by {tp} ranks: set strategy.tp to a divisor of {size}")


def split_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's share of a decoder layer's matrices, in place. Every rank brings the whole layer."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        kind = name.rpartition(".")[2]
        if kind in INTO_SHARES:
            plan |= {part: ColwiseParallel() for part in _matrices(name, module, split_adapter="lora_B")}
        elif kind in FROM_SHARES:
            plan |= {part: RowwiseParallel() for part in _matrices(name, module, split_adapter="lora_A")}
    parallelize_module(layer, mesh, plan, src_data_rank=None)


def _matrices(name: str, module: nn.Module, *, split_adapter: str) -> list[str]:
    """The matrices to split: the layer itself; or its base and that half of its adapter which touches the split side."""
    if isinstance(module, nn.Linear):
        return [name]
    adapters = [f"{name}.{path}" for path, _ in module.named_modules() if path.startswith(f"{split_adapter}.")]
    return [f"{name}.base_layer", *adapters]


def has_partial_gradient(parameter_name: str) -> bool:
    """Whether each rank of a tensor-parallel group holds only a part of this parameter's gradient."""
    return parameter_name.split(".")[-2] in _ON_SHARES
