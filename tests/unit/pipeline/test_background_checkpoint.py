"""Checkpoints that are written while the run goes on, with a disk that is as slow as a test wants it to be."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from reroll.config.parts import CheckpointConfig, OptimConfig, PolicyConfig, RunConfig
from reroll.errors import RunFolderError, WorkerError
from reroll.observe.run_folder import RunFolder
from reroll.pipeline.checkpoints import Checkpoints
from reroll.runtime.base import Placement
from reroll.runtime.local import LocalRuntime
from reroll.tokens.batch import Batch, pack
from reroll.training import torch_strategy
from reroll.training.cluster import TrainCluster, TrainWorker
from reroll.training.loss import SFT_LOSS
from reroll.types import Sample
from reroll_zoo.tiny_models import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(RunConfig(name="demo", runs_dir=tmp_path), resolved={})


class SlowDisk:
    """Lets nobody write until it is told to, and fails whoever writes into the folders it is told."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.broken: set[str] = set()

    def write(self, save: Callable[..., None], model: object, tokenizer: object, folder: Path) -> None:
        assert self.is_open.wait(60)
        if folder.name in self.broken:
            raise OSError(28, "No space left on device")
        save(model, tokenizer, folder)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr(torch_strategy, "save_model", partial(disk.write, torch_strategy.save_model))
    yield disk
    disk.is_open.set()  # Whatever a failed test left behind may end.


@asynccontextmanager
async def clusters(model: Path, *roles: str) -> AsyncIterator[list[TrainCluster]]:
    async with LocalRuntime() as runtime:
        config = PolicyConfig(model=str(model), optim=OptimConfig(lr=1e-2))
        yield [
            TrainCluster(await runtime.spawn(TrainWorker, Placement(role, ("cpu",)), config, total_steps=10)) for role in roles
        ]


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    mask, zeros = np.arange(12) >= 3, np.zeros(12, dtype=np.float32)
    return pack([Sample(ids=rng.integers(4, 90, size=12), loss_mask=mask, logp=zeros, turn=np.where(mask, 0, -1))])


async def loss_of(policy: TrainCluster, seed: int) -> float:
    return (await policy.train(batch(seed), SFT_LOSS)).values_by_name()["train/loss"]


async def weights_of(policy: TrainCluster) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in (await policy.weights()).items()}


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints_path.iterdir())


def checkpoints(folder: RunFolder, **options: bool | int) -> Checkpoints:
    return Checkpoints(folder, CheckpointConfig(**options))  # type: ignore[arg-type]


async def test_training_goes_on_while_a_checkpoint_of_the_moment_it_was_taken_is_written(
    model: Path, folder: RunFolder, disk: SlowDisk
) -> None:
    async with clusters(model, "policy", "later") as [policy, later], checkpoints(folder) as ours:
        await loss_of(policy, 0)
        taken = await weights_of(policy)
        await ours.take(1, {"": policy}, {"steps": 1})
        after = [await loss_of(policy, seed) for seed in (1, 2)]
        await ours.raise_if_failed()
        assert names(folder) == [".unfinished-000001"]
        disk.is_open.set()
        await ours.finish()
        assert names(folder) == ["step-000001"]
        await later.load(folder.checkpoints_path / "step-000001")
        assert all(torch.equal(tensor, taken[name]) for name, tensor in (await later.weights()).items())
        assert [await loss_of(later, seed) for seed in (1, 2)] == after


async def test_the_next_checkpoint_waits_for_the_one_being_written_and_says_how_long(
    model: Path, folder: RunFolder, disk: SlowDisk
) -> None:
    async with clusters(model, "policy") as [policy], checkpoints(folder, keep=1) as ours:
        await ours.take(1, {"": policy}, {})
        second = asyncio.create_task(ours.take(2, {"": policy}, {}))
        await asyncio.sleep(0)  # From now on it waits.
        begun_s = time.monotonic()
        await asyncio.sleep(0.2)
        held_s = time.monotonic() - begun_s
        assert names(folder) == [".unfinished-000001"]
        disk.is_open.set()
        waited_s = (await second)["time/checkpoint_wait_s"]
        await ours.finish()
    assert waited_s >= held_s
    assert names(folder) == ["step-000002"]


async def test_in_the_foreground_a_checkpoint_is_on_disk_when_it_was_taken(model: Path, folder: RunFolder) -> None:
    async with clusters(model, "policy") as [policy], checkpoints(folder, background=False) as ours:
        times = await ours.take(1, {"": policy}, {})
        assert names(folder) == ["step-000001"]
    assert times.keys() == {"time/checkpoint_wait_s", "time/checkpoint_s"}


async def test_a_failed_write_is_raised_when_next_looked_at_and_the_earlier_checkpoint_stands(
    model: Path, folder: RunFolder, disk: SlowDisk
) -> None:
    disk.is_open.set()
    disk.broken = {".unfinished-000002"}
    async with clusters(model, "policy") as [policy]:
        ours = checkpoints(folder, keep=1)
        await ours.take(1, {"": policy}, {})
        await ours.take(2, {"": policy}, {})
        with pytest.raises(RunFolderError, match=r"cannot write .*step-000002: No space left on device .free some space"):
            await until_raised(ours.raise_if_failed)
        await ours.raise_if_failed()  # It is raised once.
    assert names(folder) == ["step-000001"]


async def until_raised(check: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while True:
            await check()  # type: ignore[misc]
            await asyncio.sleep(0.01)


async def test_models_beside_the_policy_are_part_of_it_and_one_that_fails_fails_all(
    model: Path, folder: RunFolder, disk: SlowDisk
) -> None:
    disk.is_open.set()
    async with clusters(model, "policy", "critic") as [policy, critic]:
        ours = checkpoints(folder)
        await ours.take(1, {"": policy, "critic": critic}, {})
        await ours.finish()
        assert (folder.checkpoints_path / "step-000001" / "critic" / "trainer.pt").is_file()
        disk.broken = {"critic"}
        await ours.take(2, {"": policy, "critic": critic}, {})
        with pytest.raises(RunFolderError, match="step-000002"):
            await ours.finish()
    assert names(folder) == ["step-000001"]


async def test_a_model_that_cannot_be_copied_fails_the_checkpoint_after_the_others_are_written(
    model: Path, folder: RunFolder, disk: SlowDisk
) -> None:
    async with clusters(model, "policy", "critic") as [policy, critic]:
        await critic.close()
        taking = asyncio.create_task(checkpoints(folder).take(1, {"": policy, "critic": critic}, {}))
        while not names(folder):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert names(folder) == [".unfinished-000001"]  # Not taken from under the policy.
        disk.is_open.set()
        with pytest.raises(WorkerError, match="was stopped"):
            await taking
    assert names(folder) == []


@contextmanager
def opened_soon(disk: SlowDisk) -> Iterator[None]:
    timer = threading.Timer(0.2, disk.is_open.set)
    timer.start()
    yield
    timer.join()


async def test_a_run_that_fails_meanwhile_still_gets_its_checkpoint(model: Path, folder: RunFolder, disk: SlowDisk) -> None:
    async with clusters(model, "policy") as [policy]:
        with opened_soon(disk), pytest.raises(ZeroDivisionError):
            await take_and_fail(policy, folder)
    assert names(folder) == ["step-000001"]


async def take_and_fail(policy: TrainCluster, folder: RunFolder) -> None:
    async with checkpoints(folder) as ours:
        await ours.take(1, {"": policy}, {})
        raise ZeroDivisionError


async def test_a_lost_checkpoint_of_a_failing_run_does_not_hide_why_it_failed(
    model: Path, folder: RunFolder, disk: SlowDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.broken = {".unfinished-000001"}
    async with clusters(model, "policy") as [policy]:
        with opened_soon(disk), pytest.raises(ZeroDivisionError):
            await take_and_fail(policy, folder)
    assert "checkpoint of step 1 was lost: cannot write" in caplog.text


@pytest.mark.parametrize("is_taken", [True, False])
async def test_quitting_does_not_wait_for_the_disk(
    model: Path, folder: RunFolder, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """Neither while the checkpoint is written nor while its second model is being copied."""
    reached = asyncio.Event()

    async def copy_for_ever(folder: Path) -> None:
        reached.set()
        await asyncio.Event().wait()

    async def run(policy: TrainCluster, critic: TrainCluster) -> None:
        async with checkpoints(folder) as ours:
            await ours.take(1, {"": policy, "critic": critic}, {})
            reached.set()
            await asyncio.Event().wait()

    async with clusters(model, "policy", "critic") as [policy, critic]:
        if not is_taken:
            monkeypatch.setattr(critic, "stage", copy_for_ever)
        running = asyncio.create_task(run(policy, critic))
        await reached.wait()
        running.cancel()
        await asyncio.wait([running], timeout=120)
        has_quit, left = running.cancelled(), names(folder)
        disk.is_open.set()  # Its workers may end, and write what nobody waits for.
        assert has_quit
        assert left == []
