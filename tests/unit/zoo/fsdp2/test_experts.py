"""Experts that ranks share out: what needs no second process. tests/invariant/test_moe_equals_torch.py has several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from reroll.config.load import parse_config
from reroll.config.parts import LoraConfig
from reroll.errors import ConfigError, ModelError
from reroll.models.load import load_model
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.fsdp2.experts import EP, check_experts, lay_out_experts, split_experts
from reroll_zoo.fsdp2.mesh import build_mesh
from reroll_zoo.ranks.group import join_process_group
from reroll_zoo.tiny_models import make_tiny

NUM_TOKENS, NUM_EXPERTS, HIDDEN = 21, 8, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("moe"), family="qwen3_moe", hidden=HIDDEN, initializer_range=0.2)


@pytest.fixture
def _one_rank() -> Iterator[None]:
    join_process_group(None, rank=0, world_size=1, device="cpu")
    yield
    dist.destroy_process_group()


def load(folder: Path) -> PreTrainedModel:
    return load_model(str(folder), dtype=torch.float32, device="cpu")


def layer_of(model: PreTrainedModel) -> nn.Module:
    return model.get_submodule("model.layers.0")


def run(experts: nn.Module, chosen: Tensor) -> list[Tensor]:
    """What the experts answer, and the gradients of all that they read."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).requires_grad_()
    weights = torch.rand(chosen.shape, generator=generator).requires_grad_()
    answer = experts(hidden, chosen, weights)
    (answer * torch.randn(answer.shape, generator=generator)).sum().backward()
    gradients = [part.grad for part in (hidden, weights, *experts.parameters())]
    return [answer, *(part.to_local() if isinstance(part, DTensor) else part for part in gradients)]


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("num_experts", [NUM_EXPERTS, 2])
def test_tokens_that_travel_to_their_experts_come_back_as_the_plain_module_computes_them(
    folder: Path, num_experts: int
) -> None:
    rows = [torch.randperm(num_experts, generator=torch.Generator().manual_seed(row))[:2] for row in range(NUM_TOKENS)]
    model, plain = load(folder), load(folder)
    (experts,) = split_experts(layer_of(model), model.config, init_device_mesh("cpu", (1,), mesh_dim_names=(EP,)))
    expected = run(layer_of(plain).get_submodule("mlp.experts"), torch.stack(rows))
    for ours, theirs in zip(run(experts, torch.stack(rows)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_one_rank")
def test_shards_that_do_not_divide_into_groups_of_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="1 shards do not divide into groups of ep 2"):
        lay_out_experts(build_mesh(Fsdp2StrategyConfig(kind="fsdp2"), device="cpu"), ep=2)


def test_experts_that_cannot_be_shared_evenly_are_refused_with_the_fix(folder: Path) -> None:
    model = load(folder)
    check_experts(model, ep=2, shards=4)
    with pytest.raises(ModelError, match=r"8 experts cannot be shared by 3 ranks: set strategy\.ep to a divisor of 8"):
        check_experts(model, ep=3, shards=1)
    with pytest.raises(ModelError, match=r"32 hidden columns of an expert cannot be cut over 3 ranks: raise strategy\.ep"):
        check_experts(model, ep=2, shards=3)


def test_a_model_without_experts_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"not llama: set strategy\.ep to 1"):
        check_experts(load(tiny_model), ep=2, shards=1)


def test_an_adapter_on_stacked_experts_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"gate_up_proj.*name no linear layer"):
        load_model(str(folder), dtype=torch.float32, device="cpu", lora=LoraConfig(targets=["gate_up_proj"]))


@pytest.mark.parametrize(
    ("options", "where", "fix"),
    [
        ({"num_ranks": 4, "ep": 2, "tp": 2}, "tp", "set tp to 1"),
        ({"num_ranks": 4, "tp": 2}, "tp", "ep shares experts out"),
        ({"num_ranks": 4, "ep": 8}, "ep", "make ep a divisor of 4"),
        ({"num_ranks": 4, "replicas": 2, "ep": 4}, "ep", "make ep a divisor of 2"),
        ({"num_ranks": 3, "ep": 3}, "ep", "make ep a divisor of 8"),
    ],
)
def test_check_refuses_experts_that_cannot_be_shared_out_and_names_the_fix(
    rlvr_tree: dict[str, Any], folder: Path, tmp_path: Path, options: dict[str, Any], where: str, fix: str
) -> None:
    rlvr_tree["runtime"] = {"kind": "ray"}
    rlvr_tree["policy"] |= {"model": str(folder), "strategy": {"kind": "fsdp2", **options}}
    with pytest.raises(ConfigError) as caught:
        parse_config(rlvr_tree, folder=tmp_path)
    assert [violation.path for violation in caught.value.violations] == [f"policy.strategy.{where}"]
    assert fix in caught.value.violations[0].fix


def test_check_refuses_ep_for_a_model_without_experts_and_accepts_it_for_one_with_them(
    rlvr_tree: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    rlvr_tree["runtime"] = {"kind": "ray"}
    rlvr_tree["policy"]["strategy"] = {"kind": "fsdp2", "num_ranks": 4, "ep": 2}
    with pytest.raises(ConfigError, match="the 0 experts of"):
        parse_config(rlvr_tree, folder=tmp_path)
    rlvr_tree["policy"]["model"] = str(folder)
    assert parse_config(rlvr_tree, folder=tmp_path).policy.strategy.kind == "fsdp2"
