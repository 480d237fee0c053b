"""From a Hugging Face folder to a model of which each rank holds its shards.

The first rank reads the folder, whose files are mapped and not held (see `stored_dtype`). Layer by layer, every rank receives
the weights, keeps its share and drops the rest: no device ever holds more of the whole than one layer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from reroll.config.parts import ModelConfig
from reroll.config.strategy import Fsdp2StrategyConfig
from reroll.models.attention import IMPLEMENTATION, check_supported
from reroll.models.fused import fuse
from reroll.models.heads import add_score_head, keep_padding_apart
from reroll.models.load import DTYPES, Head, resolve_base
from reroll.tokens.batch import Batch
from reroll.training.base import Needs
from reroll.training.parallel.experts import CUT_DIM, EP, check_experts, lay_out_experts, split_experts
from reroll.training.parallel.ranks import REPLICA, SHARD, TP, sequence_group
from reroll.training.parallel.sequence import SequenceShare, check_shares
from reroll.training.parallel.tensor import check_splits, split_layer
from reroll.training.predict import apply_heads
from reroll.training.shared_prefix import batch_hidden_states


def skeleton(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, head: Head) -> PreTrainedModel:
    """The model that `load_model` gives, without its weights: it lives on no device."""
    source = resolve_base(config.model)
    auto = AutoModelForSequenceClassification if head == "score" else AutoModelForCausalLM
    options = {"num_labels": 1} if head == "score" else {}
    shape = AutoConfig.from_pretrained(source, **options)
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(  # type: ignore[no-untyped-call]
            shape, dtype=DTYPES[config.strategy.precision], attn_implementation=IMPLEMENTATION
        )
        if head == "language+score":
            add_score_head(model, source)
        if config.lora is not None:
            from reroll.models.lora import add_lora

            add_lora(model, config.lora, base=config.model)
    if head == "score":
        keep_padding_apart(model, tokenizer)
    check_supported(model)
    return model.eval()  # type: ignore[no-any-return, no-untyped-call]


class PredictingModel(nn.Module):
    """A model with what it is asked inside its forward pass, so that FSDP has the heads gathered when they are used."""

    def __init__(self, model: PreTrainedModel, *, chunk: int, sequence_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.model, self._chunk, self._sequence_group = model, chunk, sequence_group

    def forward(self, batch: Batch, needs: Needs) -> dict[str, Tensor]:
        """The fields of Predictions: a plain dict, in which FSDP finds the tensors whose gradients it waits for."""
        if self._sequence_group is None:
            return self._apply_heads(batch_hidden_states(self.model, batch), batch, needs)
        share = SequenceShare(batch, self._sequence_group)
        return share.whole(self._apply_heads(share.hidden_states(self.model), share.batch, needs))

    def _apply_heads(self, hidden: Tensor, batch: Batch, needs: Needs) -> dict[str, Tensor]:
        answers = apply_heads(self.model, hidden, batch, needs, chunk=self._chunk)
        if needs.logp and torch.is_grad_enabled() and not batch.loss_mask.any():
            # No row reached the head, but the other ranks wait for this one's part of the head's gradient: zero.
            head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
            answers["logp"] = answers["logp"] + 0.0 * head.weight.sum()
        return answers


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
    group = sequence_group(config, device=device)
    root = PredictingModel(model, chunk=config.logprob_chunk, sequence_group=group)
    units: dict[FSDPModule, list[str]] = {}
    for layer in model.base_model.get_submodule("layers").children():
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
    # The heads are used last and their gradients come first: gathered once for both passes.
    units[_fully_shard(root, config, mesh, device=device, reshard_after_forward=False)] = named.of(root)
    return root, units


def _fully_shard(
    module: nn.Module,
    config: Fsdp2StrategyConfig,
    mesh: DeviceMesh,
    *,
    device: str,
    reshard_after_forward: bool,
    cut_dim: int = 0,
) -> FSDPModule:
    on_gpu = torch.device(device).type == "cuda"
    unit = fully_shard(
        module,
        mesh=mesh[REPLICA, SHARD] if config.replicas > 1 else mesh[SHARD],
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=lambda _: Shard(cut_dim),
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
