"""Shards in checkpoints, by one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from reroll.config.parts import ModelConfig
from reroll.errors import RunFolderError
from reroll.models.load import load_model, stored_dtype
from reroll.runtime.base import WorkerInfo
from reroll.training.cluster import TrainWorker
from reroll.training.offload import HostCopies
from reroll_zoo.fsdp2.checkpoint import as_shard_of, load_shards, save_shards
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.ranks.group import join_process_group
from reroll_zoo.tiny_models import make_tiny


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    join_process_group(None, rank=0, world_size=1, device="cpu")
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_shard_that_an_offloaded_model_keeps_on_the_host_is_read_in_place(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # Nothing is computed there, so there need be no GPU.
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        gpus = init_device_mesh("cuda", (1,))
    parameter = DTensor.from_local(torch.empty(3, 4, device="meta"), gpus, [Shard(0)])
    moments, fresh = torch.randn(3, 4), torch.zeros(3, 4)
    save_shards(
        HostCopies(torch.device("cpu")).of_state({"step": 7, "moments": as_shard_of(parameter, moments)}), tmp_path, group=group
    )
    assert load_shards({"step": 0, "moments": as_shard_of(parameter, fresh)}, tmp_path) == 7
    assert torch.equal(fresh, moments)


def test_a_state_on_the_host_does_not_follow_what_it_was_copied_from() -> None:
    state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    copied = HostCopies(torch.device("cpu")).of_state(state)
    state["state"][0]["exp_avg"].add_(1)  # type: ignore[index, call-overload]
    state["param_groups"][0]["lr"] = 0.2  # type: ignore[call-overload]
    assert copied["state"][0]["exp_avg"].tolist() == [1, 1]
    assert copied["param_groups"] == [{"lr": 0.1, "params": [0]}]


def test_a_folder_of_another_strategy_is_named(group: dist.ProcessGroup, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not written by strategy fsdp2"):
        load_shards({}, tmp_path)


def test_a_model_that_is_read_as_it_lies_on_disk_has_the_weights_of_one_read_in_its_precision(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "tiny"))
    config = ModelConfig(model=folder, strategy=Fsdp2StrategyConfig(kind="fsdp2", precision="bf16"), devices="cpu")
    try:
        weights = TrainWorker(WorkerInfo("policy", 0, 1, "cpu"), config, total_steps=1).weights()
    finally:
        dist.destroy_process_group()
    assert stored_dtype(folder) == torch.float32
    plain = dict(load_model(folder, dtype=torch.bfloat16, device="cpu").named_parameters())
    assert all(torch.equal(weight, plain[name]) for name, weight in weights.items())
