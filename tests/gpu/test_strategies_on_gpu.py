"""Strategies on a GPU: what tests on the CPU cannot see (bf16 kernels, offload, moving out and back)."""

from __future__ import annotations

import gc
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


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that slots are used again and again."""
    monkeypatch.setattr("reroll_zoo.host_optimizer.strategy.PIECE_VALUES", 4096)


def held_by(policy: TrainWorker) -> dict[str, torch.Tensor]:
    """Weights, masters and moments, on the host."""
    state = policy._strategy._state()  # type: ignore[attr-defined]
    found = {name: weight.cpu() for name, weight in policy._strategy.parts().items()}
    found |= {f"{name} master": master.detach().cpu() for name, master in state["masters"].items()}
    for number, moments in state["optimizer"]["state"].items():
        found |= {f"{number} {key}": value.cpu() for key, value in moments.items()}
    return found


def assert_equal(one: TrainWorker, other: TrainWorker) -> None:
    mine, theirs = held_by(one), held_by(other)
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        assert torch.equal(values, theirs[name]), name


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_optimizer_on_the_host_takes_the_steps_of_one_on_the_gpu_to_the_bit(folder: Path, precision: str) -> None:
    beside = worker(folder, kind="torch", precision=precision, optimizer="gpu")
    expected = losses(beside, range(4))
    streamed = worker(folder, kind="torch", precision=precision, optimizer="host")
    assert all(tensor.is_pinned() for tensor in streamed._strategy._host.values())  # type: ignore[attr-defined]
    told = losses(streamed, range(2))
    for weights in (False, True):
        streamed.to("cpu", weights=weights)
        streamed.to(DEVICE, weights=weights)
    assert told + losses(streamed, range(2, 4)) == expected
    assert_equal(streamed, beside)


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("first", ["gpu", "host"])
def test_on_a_gpu_either_place_of_the_optimizer_goes_on_from_the_others_checkpoint(
    folder: Path, tmp_path: Path, first: str
) -> None:
    writer = worker(folder, kind="torch", precision="bf16", optimizer=first)
    losses(writer, range(2))
    writer.save(tmp_path)
    expected = losses(writer, range(2, 4))
    for where in ("gpu", "host"):
        reader = worker(folder, kind="torch", precision="bf16", optimizer=where)
        reader.load(tmp_path)
        assert losses(reader, range(2, 4)) == expected
        assert_equal(reader, writer)


def test_an_optimizer_on_the_host_leaves_the_gpu_to_weights_and_gradients(folder: Path) -> None:
    losses(worker(folder, kind="torch", precision="bf16"), range(1))  # Libraries keep memory from their first use.
    held = {}
    for where in ("gpu", "host"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        policy = worker(folder, kind="torch", precision="bf16", optimizer=where)
        losses(policy, range(1))
        held[where] = torch.cuda.memory_allocated() - before
        weights = sum(weight.nbytes for weight in policy._strategy.parts().values())
        del policy
    # bf16 weights alone; and beside them masters and moments, twelve bytes to a parameter's two.
    assert held["host"] < 2 * weights
    assert held["gpu"] > 6 * weights
