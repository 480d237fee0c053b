"""Strategies on a GPU: what tests on the CPU cannot see (bf16 kernels, offload, moving out and back)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from reroll.config.parts import ModelConfig, OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.runtime.base import WorkerInfo
from reroll.tokens.batch import Batch, pack
from reroll.training.cluster import TrainWorker, train_jobs
from reroll.training.loss import SFT_LOSS
from reroll.types import Sample
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.tiny_models import make_tiny

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


@pytest.fixture
def _alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), family="qwen3", hidden=128)


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    samples = []
    for length in (30, 41, 22):
        mask = np.arange(length) >= 4
        zeros = np.zeros(length, dtype=np.float32)
        samples.append(Sample(ids=rng.integers(4, 90, size=length), loss_mask=mask, logp=zeros, turn=np.where(mask, 0, -1)))
    return pack(samples)


def worker(folder: Path, **strategy: Any) -> TrainWorker:
    if dist.is_initialized():
        dist.destroy_process_group()
    kind = Fsdp2StrategyConfig if strategy["kind"] == "fsdp2" else TorchStrategyConfig
    config = ModelConfig(model=str(folder), strategy=kind(micro_batch_tokens=60, **strategy), optim=OptimConfig(lr=1e-3))
    return TrainWorker(WorkerInfo("policy", 0, 1, DEVICE), config, total_steps=10)


def losses(policy: TrainWorker, steps: range) -> list[float]:
    return [policy.train(train_jobs(batch(step), SFT_LOSS)[0])["loss"].value for step in steps]


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    "options", [{}, {"cpu_offload": True}, {"gradient_checkpointing": True, "reshard_after_forward": False}]
)
def test_bf16_learns_what_plain_pytorch_learns_on_the_same_gpu(folder: Path, options: dict[str, Any]) -> None:
    expected = losses(worker(folder, kind="torch", precision="bf16"), range(4))
    assert losses(worker(folder, kind="fsdp2", precision="bf16", **options), range(4)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("kind", ["torch", "fsdp2"])
@pytest.mark.parametrize("weights", [True, False])
def test_a_model_that_left_the_gpu_and_came_back_goes_on_as_if_it_had_stayed(folder: Path, kind: str, weights: bool) -> None:
    expected = losses(worker(folder, kind=kind, precision="bf16"), range(4))
    others = torch.cuda.memory_allocated()
    policy = worker(folder, kind=kind, precision="bf16")
    told: list[float] = []
    for step in range(4):
        told += losses(policy, range(step, step + 1))
        held = torch.cuda.memory_allocated() - others
        policy.to("cpu", weights=weights)
        assert torch.cuda.memory_allocated() - others < held / (2 if weights else 1.4)
        policy.to(DEVICE, weights=weights)
    assert told == expected


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("kind", ["torch", "fsdp2"])
def test_a_checkpoint_holds_optimizer_state_that_is_away_or_on_its_way_back(folder: Path, tmp_path: Path, kind: str) -> None:
    policy = worker(folder, kind=kind, precision="bf16")
    losses(policy, range(2))
    policy.to("cpu", weights=False)
    policy.save(tmp_path / "away")
    policy.to(DEVICE, weights=False)
    policy.save(tmp_path / "back")
    expected = losses(policy, range(2, 4))
    for where in ("away", "back"):
        resumed = worker(folder, kind=kind, precision="bf16")
        resumed.load(tmp_path / where)
        assert losses(resumed, range(2, 4)) == expected


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_written_on_the_gpu_goes_on(folder: Path, tmp_path: Path, offload: bool) -> None:
    policy = worker(folder, kind="fsdp2", precision="bf16", cpu_offload=offload)
    losses(policy, range(2))
    policy.save(tmp_path)
    expected = losses(policy, range(2, 4))
    resumed = worker(folder, kind="fsdp2", precision="bf16", cpu_offload=offload)
    resumed.load(tmp_path)
    assert losses(resumed, range(2, 4)) == expected


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("kind", ["torch", "fsdp2"])
def test_staged_checkpoints_hold_the_state_of_their_time_though_they_share_memory(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    policy = worker(folder, kind=kind, precision="bf16")
    losses(policy, range(1))
    expected = []
    for number in range(3):
        policy.stage(tmp_path / str(number))
        expected.append(losses(policy, range(1, 3)))
        while policy.written() is None:
            time.sleep(0.01)
    for number in range(3):
        resumed = worker(folder, kind=kind, precision="bf16")
        resumed.load(tmp_path / str(number))
        assert losses(resumed, range(1, 3)) == expected[number]
