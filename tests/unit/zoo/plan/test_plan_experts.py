"""What the planner knows of mixtures of experts, and of ranks that share experts out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reroll.config.load import load_config
from reroll.config.parts import LoraConfig
from reroll.models.attention import PackedAttention, hidden_states
from reroll.models.load import load_model
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.memory import Training, activation_bytes, train_memory
from reroll_zoo.plan.search import candidates
from reroll_zoo.plan.shape import shape_of
from reroll_zoo.tiny_models import make_tiny

EXAMPLE = Path(__file__).parents[4] / "examples/clusters/qwen3_30b_a3b_ep.yaml"
HOW = Training(value_bytes=2, micro_batch_tokens=8192, checkpointing=True, shards=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    folder = tmp_path_factory.mktemp("moe")
    return str(make_tiny(folder, family="qwen3_moe", hidden=96, layers=2, heads=6, kv_heads=2, **sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_experts_are_what_autograd_saves(folder: str, dtype: torch.dtype) -> None:
    network = load_model(folder, dtype=dtype, device="cpu")
    parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    saved: dict[int, tuple[Tensor, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = (tensor, storage.nbytes())  # The tensor too, or its address would be used again.
        return tensor

    num_tokens = 256
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention = PackedAttention(torch.tensor([0, 128, 256]))
        hidden_states(network, torch.randint(4, 90, (num_tokens,)), torch.arange(128).repeat(2), attention)
    shape = shape_of(folder)
    how = Training(value_bytes=dtype.itemsize, micro_batch_tokens=num_tokens, on_cpu=True)
    predicted = activation_bytes(shape, how) - num_tokens * 2 * dtype.itemsize * shape.hidden  # The rows for the head.
    assert predicted == pytest.approx(sum(size for _, size in saved.values()), rel=0.05)


def test_an_adapter_is_on_attention_alone_even_where_some_layers_are_dense(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path, family="qwen3_moe", hidden=32, mlp_only_layers=[1]))
    adapted = load_model(folder, dtype=torch.float32, device="cpu", lora=LoraConfig(rank=4))
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert all(".self_attn." in name for name in trained)
    assert shape_of(folder).lora_parameters(4, "all-linear") == sum(parameter.numel() for parameter in trained.values())


def test_ranks_that_share_experts_out_gather_fewer_and_hold_as_many() -> None:
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    apart, together = train_memory(shape, replace(HOW, ep=8)), train_memory(shape, HOW)
    assert apart.held == together.held
    others = 2 * 112 * shape.expert_parameters * 2  # Two layers of 112 experts that other ranks hold, in bf16.
    assert together.working["gathered layers"] - apart.working["gathered layers"] == others
    assert shape.met_parameters(ep=1) == shape.num_parameters


def test_the_planner_never_cuts_experts_by_tp() -> None:
    config = load_config(EXAMPLE, runs_here=False)
    free = config.policy.model_copy(update={"devices": "auto"})
    plans = list(candidates(config.model_copy(update={"policy": free}), ClusterConfig(device="h200", num=8, nodes=2)))
    assert plans
    for plan in plans:
        strategy = plan.policy.strategy
        assert (strategy.kind, strategy.tp) == ("fsdp2", 1)
