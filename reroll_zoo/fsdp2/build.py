"""From a Hugging Face folder to a model of which each rank holds its shards.

The first rank reads the folder, whose files are mapped and not held (see `stored_dtype`). Layer by layer, every rank receives
the weights, keeps its share and drops the rest: no device ever holds more of the whole than one layer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from reroll.models.fused import fuse
from reroll.models.load import DTYPES
from reroll.models.sight import eye_of
from reroll.tokens.batch import Batch
from reroll.training.base import Needs
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.fsdp2.experts import EP, check_experts, lay_out_experts, split_experts
from reroll_zoo.fsdp2.layout import CUT_DIM
from reroll_zoo.fsdp2.mesh import REPLICA, SHARD, TP, sequence_group
from reroll_zoo.fsdp2.sequence import SequenceShare, check_shares
from reroll_zoo.fsdp2.tensor import check_splits, split_layer
from reroll_zoo.ranks.empty_model import PredictingModel

if TYPE_CHECKING:
    from reroll_zoo.vision.eye import PackedEye


class SequenceParallelModel(PredictingModel):
    """A model whose ranks share the tokens of every sequence."""

    def __init__(self, model: PreTrainedModel, *, chunk: int, group: dist.ProcessGroup) -> None:
        super().__init__(model, chunk=chunk)
        self._group = group

    def forward(self, batch: Batch, needs: Needs) -> dict[str, Tensor]:
        share = SequenceShare(batch, self._group)
        return share.whole(self.apply_heads(share.states(self.model), share.batch, needs))


def shard(
    model: PreTrainedModel, full: PreTrainedModel | None, config: Fsdp2StrategyConfig, mesh: DeviceMesh, *, device: str
) -> tuple[PredictingModel, dict[FSDPModule, list[str]]]:
    """Fill a skeleton from `full`, which the first rank alone brings, and spread it over the mesh.

    Returns the model to call, and the units that are gathered together with the names of their parameters.
    """
    if config.tp > 1:
        check_splits(model, tp=config.tp)
    if config.sp > 1:
        check_shares(model, sp=config.sp, tp=config.tp)
    if torch.device(device).type == "cuda":
        fuse(model)
    experts_mesh = lay_out_experts(mesh, ep=config.ep) if config.ep > 1 else None
    if experts_mesh is not None:
        check_experts(model, ep=config.ep, shards=experts_mesh[SHARD].size())
    filler, named = _Filler(model, full, device=device), _ParameterNames(model)
    group, chunk = sequence_group(config, device=device), config.logprob_chunk
    root = SequenceParallelModel(model, chunk=chunk, group=group) if group else PredictingModel(model, chunk=chunk)
    units: dict[FSDPModule, list[str]] = {}
    eye = cast("PackedEye | None", eye_of(model))
    for layer in (eye.decoder if eye else model.base_model).get_submodule("layers").children():
        filler.fill(layer)
        if config.tp > 1:
            split_layer(layer, mesh[TP])
        reshard = config.reshard_after_forward
        if experts_mesh is not None:
            for part in split_experts(layer, model.config.get_text_config(), experts_mesh[EP]):
                unit = _fully_shard(part, config, experts_mesh, device=device, reshard_after_forward=reshard, cut_dim=CUT_DIM)
                units[unit] = named.of(part)
        units[_fully_shard(layer, config, mesh, device=device, reshard_after_forward=reshard)] = named.of(layer)
    filler.fill(root)
    # A tower is frozen. Every rank holds it whole, so that what it said of a picture is good until it is replaced.
    whole = {parameter for part in (eye.tower if eye else ()) for parameter in part.parameters()}
    # The heads are used last and their gradients come first: gathered once for both passes.
    units[_fully_shard(root, config, mesh, device=device, reshard_after_forward=False, whole=whole)] = named.of(root)
    return root, units


def _fully_shard(
    module: nn.Module,
    config: Fsdp2StrategyConfig,
    mesh: DeviceMesh,
    *,
    device: str,
    reshard_after_forward: bool,
    cut_dim: int = 0,
    whole: Collection[nn.Parameter] = (),
) -> FSDPModule:
    on_gpu = torch.device(device).type == "cuda"
    unit = fully_shard(
        module,
        mesh=mesh[REPLICA, SHARD] if config.replicas > 1 else mesh[SHARD],
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=lambda _: Shard(cut_dim),
        ignored_params=set(whole),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=CPUOffloadPolicy() if config.cpu_offload and on_gpu else OffloadPolicy(),
    )
    # A loss is divided by the whole batch's denominator before its gradient is taken: the ranks' gradients add up.
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)
    return unit


class _ParameterNames:
    """Which parameters belong to a unit: those of its modules that no earlier unit took."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._left = list(dict(model.named_parameters()))
        self._model = model

    def of(self, module: nn.Module) -> list[str]:
        parts = {id(part) for part in module.modules()}
        names = [name for name in self._left if id(self._model.get_submodule(name.rpartition(".")[0])) in parts]
        self._left = [name for name in self._left if name not in set(names)]
        return names


class _Filler:
    """Puts real tensors in the place of a skeleton's, the same on every rank. What is trained is held in fp32."""

    def __init__(self, model: PreTrainedModel, full: PreTrainedModel | None, *, device: str) -> None:
        self._device = device
        self._names = {tensor: name for name, tensor in _tensors(model).items()}
        self._full = None if full is None else _tensors(full)

    def fill(self, module: nn.Module) -> None:
        """Fill what is still empty in this module. Tied weights stay tied: they are filled in one call."""
        filled: dict[Tensor, Tensor] = {}
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for key, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        if tensor not in filled:
                            filled[tensor] = self._real(tensor)
                        table[key] = filled[tensor]  # type: ignore[assignment]

    def _real(self, empty: Tensor) -> Tensor:
        data = torch.empty(empty.shape, dtype=empty.dtype, device=self._device)
        if self._full is not None:
            data.copy_(self._full[self._names[empty]].detach())
        dist.broadcast(data, src=0)
        if not isinstance(empty, nn.Parameter):
            return data
        return nn.Parameter(data.float() if empty.requires_grad else data, requires_grad=empty.requires_grad)


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
