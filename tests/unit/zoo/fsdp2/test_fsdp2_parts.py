"""The parts of fsdp2 that need no second process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from reroll.config.load import parse_config
from reroll.config.parts import FixedModelConfig, LoraConfig, ModelConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import ConfigError, ModelError
from reroll.models.load import load_model, load_tokenizer
from reroll.pipeline.spawn import train_devices
from reroll.runtime.base import WorkerInfo
from reroll.runtime.local import LocalRuntime
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Needs, Predictions, ZeroLoss
from reroll.training.cluster import TrainWorker
from reroll.types import Sample
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.fsdp2.mesh import build_mesh
from reroll_zoo.fsdp2.tensor import check_splits, has_partial_gradient
from reroll_zoo.ranks.empty_model import skeleton
from reroll_zoo.ranks.group import join_process_group, only_first
from reroll_zoo.tiny_models import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=4, kv_heads=2)


@pytest.fixture
def _one_rank() -> Iterator[None]:
    join_process_group(None, rank=0, world_size=1, device="cpu")
    yield
    dist.destroy_process_group()


def fsdp2(**options: Any) -> Fsdp2StrategyConfig:
    return Fsdp2StrategyConfig(kind="fsdp2", **options)


def row() -> Batch:
    zeros, mask = np.zeros(5, dtype=np.float32), np.arange(5) > 1
    return pack([Sample(ids=np.arange(4, 9), loss_mask=mask, logp=zeros, turn=np.where(mask, 0, -1))])


def test_a_pass_that_keeps_step_has_a_gradient_of_zeros_and_tells_nothing() -> None:
    logp, value = (torch.randn(5, requires_grad=True) for _ in range(2))
    loss, stats = ZeroLoss(needs=Needs())(row(), Predictions(logp=logp, value=value, entropy=torch.ones(5)))
    loss.backward()
    assert (loss.item(), len(stats)) == (0.0, 0)
    assert torch.equal(logp.grad, torch.zeros(5))
    assert torch.equal(value.grad, torch.zeros(5))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("head", ["language", "score", "language+score"])
def test_a_skeleton_has_the_parameters_of_the_loaded_model_and_no_memory(folder: Path, lora: Any, head: Any) -> None:
    config = ModelConfig(model=str(folder), lora=lora)
    empty = skeleton(config, load_tokenizer(str(folder)), head=head)
    full = load_model(str(folder), dtype=torch.float32, device="cpu", head=head, lora=lora)

    def shapes(model: torch.nn.Module) -> dict[str, Any]:
        return {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in model.named_parameters()}

    assert shapes(empty) == shapes(full)
    assert dict(empty.named_buffers()).keys() == dict(full.named_buffers()).keys()
    assert all(tensor.is_meta for tensor in [*empty.parameters(), *empty.buffers()])


def test_heads_that_cannot_be_shared_evenly_are_refused_with_the_fix(folder: Path) -> None:
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    check_splits(model, tp=2)
    with pytest.raises(ModelError, match=r"2 key-value heads cannot be shared by 4 ranks: set strategy.tp to a divisor of 2"):
        check_splits(model, tp=4)


def test_a_family_that_nobody_split_yet_is_refused(tmp_path: Path) -> None:
    model = load_model(str(make_tiny(tmp_path, family="gemma2")), dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match=r"not gemma2: set strategy\.tp to 1"):
        check_splits(model, tp=2)


def test_norms_of_single_heads_have_parts_of_a_gradient_and_other_norms_have_all_of_it() -> None:
    assert has_partial_gradient("model.layers.0.self_attn.q_norm.weight")
    assert not has_partial_gradient("model.layers.0.input_layernorm.weight")
    assert not has_partial_gradient("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.usefixtures("_one_rank")
def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="1 ranks do not divide into replicas 1 × sp 1 × tp 2"):
        build_mesh(fsdp2(tp=2), device="cpu")


@pytest.mark.usefixtures("_one_rank")
def test_what_the_first_rank_cannot_make_is_its_own_error() -> None:
    assert only_first(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        only_first(lambda: 1 // 0)


def test_several_ranks_without_a_rendezvous_are_refused() -> None:
    with pytest.raises(ValueError, match="no rendezvous"):
        join_process_group(None, rank=0, world_size=2, device="cpu")


def test_a_worker_that_cannot_be_built_leaves_its_group(folder: Path) -> None:
    config = ModelConfig(model=str(folder), strategy=fsdp2(tp=2))
    with pytest.raises(ValueError, match="do not divide"):
        TrainWorker(WorkerInfo("policy", 0, 1, "cpu"), config, total_steps=1)
    assert not dist.is_initialized()


def test_a_strategy_without_a_kind_is_torch() -> None:
    assert isinstance(FixedModelConfig(model="m", strategy={"precision": "bf16"}).strategy, TorchStrategyConfig)  # type: ignore[arg-type]
    assert isinstance(FixedModelConfig(model="m", strategy={"kind": "fsdp2", "tp": 2}).strategy, Fsdp2StrategyConfig)  # type: ignore[arg-type]


def test_on_the_cpu_the_config_says_how_many_ranks_there_are() -> None:
    runtime = LocalRuntime()
    assert train_devices(runtime, FixedModelConfig(model="m", devices="cpu", strategy=fsdp2(num_ranks=3))) == ("cpu",) * 3
    assert train_devices(runtime, FixedModelConfig(model="m", devices="0-3", strategy=fsdp2())) == ("0", "1", "2", "3")
    assert train_devices(runtime, FixedModelConfig(model="m", devices="0-3", strategy=fsdp2(num_ranks=2))) == ("0", "1")
    assert train_devices(runtime, FixedModelConfig(model="m", devices="0-3")) == ("0",)
    with pytest.raises(ValueError, match="devices names 2 GPUs"):
        train_devices(runtime, FixedModelConfig(model="m", devices="0-1", strategy=fsdp2(num_ranks=3)))


@pytest.mark.parametrize(
    ("runtime", "policy", "where", "says"),
    [
        ({"kind": "local"}, {"devices": "cpu"}, "policy.strategy.kind", "set runtime: {kind: processes}"),
        ({"kind": "ray"}, {"devices": "cpu", "num_ranks": 3, "tp": 2}, "policy.strategy", "divisor of the number of ranks"),
        ({"kind": "processes"}, {"devices": "cpu", "num_ranks": 3, "tp": 2}, "policy.strategy", "divisor of the number"),
        ({"kind": "ray", "num_gpus": 4}, {"devices": "0-3", "tp": 3}, "policy.strategy", "divisor"),
        ({"kind": "ray", "num_gpus": 4}, {"devices": "0-3", "num_ranks": 8}, "policy.strategy.num_ranks", "at most 4"),
        ({"kind": "ray", "num_gpus": 4}, {"devices": "0-7"}, "policy.devices", "use 0 to 3"),
    ],
)
def test_check_refuses_ranks_that_cannot_run_and_names_the_fix(
    rlvr_tree: dict[str, Any], tmp_path: Path, runtime: dict[str, Any], policy: dict[str, Any], where: str, says: str
) -> None:
    rlvr_tree["runtime"] = runtime
    rlvr_tree["policy"]["devices"] = policy.pop("devices")
    rlvr_tree["policy"]["strategy"] = {"kind": "fsdp2", **policy}
    with pytest.raises(ConfigError) as caught:
        parse_config(rlvr_tree, folder=tmp_path)
    assert [violation.path for violation in caught.value.violations] == [where]
    assert says in caught.value.violations[0].fix


def test_check_accepts_ranks_that_divide(rlvr_tree: dict[str, Any], tmp_path: Path) -> None:
    rlvr_tree["runtime"] = {"kind": "ray", "num_gpus": 8}
    rlvr_tree["policy"] |= {"devices": "0-7", "strategy": {"kind": "fsdp2", "tp": 2, "replicas": 2}}
    assert parse_config(rlvr_tree, folder=tmp_path).policy.strategy.kind == "fsdp2"
