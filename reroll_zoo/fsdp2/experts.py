"""Expert parallelism: each of `ep` neighbouring ranks holds its share of the experts of every layer.

A token is sent to the ranks of the experts that its router chose, is computed there by the modules that one process would
run, and comes back to be weighed and added up. Who holds an expert also collects its gradient from all `ep` ranks; what is
left of the sum is FSDP's, over the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from transformers import PretrainedConfig, PreTrainedModel

from reroll.errors import ModelError
from reroll_zoo.fsdp2.layout import STACKED_EXPERTS
from reroll_zoo.fsdp2.mesh import REPLICA, SHARD

FAMILIES = ("qwen3_moe",)
"""Those whose experts are the two stacks below, called with what the router chose."""

EP = "ep"
"""The axis along which ranks hold different experts."""


def lay_out_experts(mesh: DeviceMesh, *, ep: int) -> DeviceMesh:
    """The ranks of `mesh`, which has no tensor parallelism, as replicas × shards of the same experts × ep."""
    shards = mesh[SHARD].size()
    if shards % ep:
        raise ValueError(f"{shards} shards do not divide into groups of ep {ep}: change strategy.ep or devices")
    shape = (mesh[REPLICA].size(), shards // ep, ep)
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=(REPLICA, SHARD, EP))


def check_experts(model: PreTrainedModel, *, ep: int, shards: int) -> None:
    """Raise ModelError if this model has no experts that `ep` ranks could share evenly, each cut over `shards` ranks."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"expert parallelism knows the families {', '.join(FAMILIES)}, not {config.model_type}: set strategy.ep to 1"
        )
    if config.num_experts % ep:
        raise ModelError(
            f"{config.num_experts} experts cannot be shared by {ep} ranks: set strategy.ep to a divisor of {config.num_experts}"
        )
    for what, size in {"hidden": config.hidden_size, "inner": 2 * config.moe_intermediate_size}.items():
        if size % shards:
            raise ModelError(
                f"{size} {what} columns of an expert cannot be cut over {shards} ranks: raise strategy.ep or replicas, "
                "or take fewer devices"
            )


def split_experts(layer: nn.Module, config: PretrainedConfig, mesh: DeviceMesh) -> Iterator[nn.Module]:
    """Keep this rank's experts of a decoder layer, in place, and yield the module that holds them; nothing of a dense layer.

    Every rank brings the whole layer. `mesh` has the one axis `ep`.
    """
    for name, experts in layer.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        for key in STACKED_EXPERTS:
            whole = experts.get_parameter(key)
            mine = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            part = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
            experts.register_parameter(key, nn.Parameter(part, requires_grad=whole.requires_grad))
        experts.forward = SharedExperts(experts, config, mesh)
        yield experts


class SharedExperts:
    """The forward pass of a layer's experts when each rank of a group holds some. All ranks of the group call it together."""

    def __init__(self, experts: nn.Module, config: PretrainedConfig, mesh: DeviceMesh) -> None:
        self._experts, self._group, self._num_ranks = experts, mesh.get_group(), mesh.size()
        self._num_here = config.num_experts // mesh.size()
        with torch.device("meta"):
            self._stand_in: nn.Module = type(experts)(config)  # Lends its code: it is called with this rank's weights.
        self._stand_in.num_experts = self._num_here

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H], and for each token the experts it chose and their weights, [T, k] -> [T, H]."""
        num_chosen = chosen.shape[1]
        by_expert = chosen.flatten().argsort(stable=True)  # Of the T · k visits; and so by rank.
        counts, counts_here = self._swap_counts(chosen)
        num_sent, num_received = torch.stack([counts.sum(1), counts_here.sum(1)]).tolist()
        rows = _exchange(hidden[by_expert // num_chosen], num_received, num_sent, self._group)
        local_ids = torch.arange(self._num_here, device=hidden.device).repeat(self._num_ranks)
        local_ids = local_ids.repeat_interleave(counts_here.flatten(), output_size=len(rows))
        answers = _exchange(self._compute(rows, local_ids), num_sent, num_received, self._group)
        visits = answers[by_expert.argsort()].view(*chosen.shape, -1)  # [T, k, H]
        return (visits * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _swap_counts(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Visits that go from here to each expert of each rank, and that come from each rank to each expert here."""
        counts = torch.bincount(chosen.flatten(), minlength=self._num_ranks * self._num_here)
        counts_here = torch.empty_like(counts)
        dist.all_to_all_single(counts_here, counts, group=self._group)
        return counts.view(self._num_ranks, -1), counts_here.view(self._num_ranks, -1)

    def _compute(self, rows: Tensor, local_ids: Tensor) -> Tensor:
        """What the experts `local_ids` [R] of this rank make of `rows` [R, H], grouped by expert inside."""
        num_rows = len(rows)
        if not num_rows:
            # One row of zeros: without any, autograd would leave this rank out of the exchanges of the backward pass.
            rows, local_ids = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), local_ids.new_zeros(1)
        parts = {key: self._experts.get_parameter(key) for key in STACKED_EXPERTS}
        mine = {key: part.to_local() if isinstance(part, DTensor) else part for key, part in parts.items()}
        answers: Tensor = functional_call(self._stand_in, mine, (rows, local_ids[:, None], rows.new_ones(len(rows), 1)))
        return answers[:num_rows]


def _exchange(rows: Tensor, num_received: list[int], num_sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """The first rows to the first rank, and so on; what comes back is in the order of the ranks it comes from."""
    exchanged: Tensor = _ExchangeRows.apply(rows, num_received, num_sent, group)  # type: ignore[no-untyped-call]
    return exchanged


class _ExchangeRows(torch.autograd.Function):
    """All-to-all of rows; their gradients go the way back."""

    @staticmethod
    def forward(ctx, rows: Tensor, num_received: list[int], num_sent: list[int], group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.way_back = (num_sent, num_received, group)
        received = rows.new_empty(sum(num_received), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), num_received, num_sent, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        num_received, num_sent, group = ctx.way_back
        returned = gradient.new_empty(sum(num_received), *gradient.shape[1:])
        dist.all_to_all_single(returned, gradient.contiguous(), num_received, num_sent, group=group)
        return returned, None, None, None
