"""Checkpoints of a model that two processes hold, written while they train."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from reroll.config.parts import CheckpointConfig, ModelConfig, OptimConfig, RunConfig
from reroll.errors import RunFolderError, WorkerDied
from reroll.observe import manifest
from reroll.observe.manifest import FileSum, Sums, find_damage, sums_of
from reroll.observe.run_folder import RunFolder
from reroll.pipeline.checkpoints import Checkpoints
from reroll.runtime.base import Placement, Runtime, Workers
from reroll.runtime.processes import ProcessRuntime
from reroll.tokens.batch import Batch, pack
from reroll.training import cluster as cluster_module
from reroll.training.cluster import Rendezvous, TrainCluster, TrainWorker
from reroll.training.loss import SFT_LOSS
from reroll.training.offload import in_background
from reroll.types import Sample
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.tiny_models import make_tiny

pytestmark = pytest.mark.asyncio(loop_scope="module")  # Two ranks serve most tests.


class WaitingWorker(TrainWorker):
    """Writes nothing while there is a file `wait` beside the checkpoint."""

    def stage(self, folder: Path) -> None:
        write = self._strategy.stage(folder)

        def write_when_told() -> Sums:
            while (folder.parent / "wait").exists():
                time.sleep(0.01)
            return sums_of(folder, write())

        self._writing = in_background(write_when_told, name="checkpoint")

    def process_id(self) -> int:
        return os.getpid()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime() -> AsyncIterator[Runtime]:
    async with ProcessRuntime() as runtime:
        yield runtime


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(runtime: Runtime, model: Path) -> TrainCluster:
    return (await ranks(runtime, model, role="policy"))[0]


async def ranks(runtime: Runtime, model: Path, *, role: str) -> tuple[TrainCluster, Workers[WaitingWorker]]:
    strategy = Fsdp2StrategyConfig(kind="fsdp2", num_ranks=2)
    config = ModelConfig(model=str(model), strategy=strategy, optim=OptimConfig(lr=1e-2), devices="cpu")
    rendezvous = Rendezvous(runtime.host)
    placement = Placement(role, ("cpu", "cpu"))
    workers = await runtime.spawn(WaitingWorker, placement, config, total_steps=20, rendezvous=rendezvous.address)
    return TrainCluster(workers, rendezvous=rendezvous), workers  # type: ignore[arg-type]


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    mask, zeros = np.arange(12) >= 3, np.zeros(12, dtype=np.float32)
    rows = [Sample(ids=rng.integers(4, 90, size=12), loss_mask=mask, logp=zeros, turn=np.where(mask, 0, -1)) for _ in range(4)]
    return pack(rows)


async def losses(policy: TrainCluster, seeds: range) -> list[float]:
    return [(await policy.train(batch(seed), SFT_LOSS)).values_by_name()["train/loss"] for seed in seeds]


async def test_ranks_write_while_they_train_and_go_on_from_the_moment_it_was_taken(
    policy: TrainCluster, tmp_path: Path
) -> None:
    await losses(policy, range(2))
    (tmp_path / "wait").touch()
    taken = {name: tensor.clone() for name, tensor in (await policy.weights()).items()}
    await policy.stage(tmp_path / "checkpoint")
    after = await losses(policy, range(2, 4))
    writing = asyncio.create_task(policy.written())
    (tmp_path / "wait").unlink()
    after += await losses(policy, range(4, 8))  # Two threads of each rank now meet those of the other.
    await writing
    await policy.load(tmp_path / "checkpoint")
    assert all(torch.equal(tensor, taken[name]) for name, tensor in (await policy.weights()).items())
    assert await losses(policy, range(2, 8)) == after


async def test_every_rank_vouches_for_what_it_wrote_and_damage_to_any_part_is_named(
    policy: TrainCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(RunConfig(name="demo", runs_dir=tmp_path), resolved={})
    read_here: list[str] = []

    def note(path: Path) -> FileSum:
        read_here.append(path.name)
        return sum_of(path)

    sum_of = manifest._sum
    monkeypatch.setattr(manifest, "_sum", note)
    ours = Checkpoints(folder, CheckpointConfig())
    await ours.take(1, {"": policy}, {})
    await ours.finish()
    assert read_here == []  # The ranks have read all of it, in their own processes.
    latest = folder.latest_checkpoint()
    assert latest is not None
    known = json.loads((latest.path / "manifest.json").read_text())["files"]
    parts = {"shards/__0_0.distcp", "shards/__1_0.distcp", "shards/.metadata", "model.safetensors"}
    assert {*parts, "state.json"} <= known.keys()
    assert find_damage(latest.path) == []
    shard = latest.path / "shards/__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert find_damage(latest.path) == ["shards/__1_0.distcp holds other bytes than were written"]


async def test_a_rank_lost_while_it_writes_is_named_and_the_earlier_checkpoint_stands(
    runtime: Runtime, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "GRACE_S", 3.0)
    folder = RunFolder.create(RunConfig(name="demo", runs_dir=tmp_path), resolved={})
    policy, workers = await ranks(runtime, model, role="lost")
    ours = Checkpoints(folder, CheckpointConfig())
    await ours.take(1, {"": policy}, {})
    await ours.finish()
    (folder.checkpoints_path / "wait").touch()
    await ours.take(2, {"": policy}, {})
    os.kill(await workers.one(1, WaitingWorker.process_id), signal.SIGKILL)
    (folder.checkpoints_path / "wait").unlink()
    with pytest.raises(WorkerDied, match="--resume"):
        await ours.finish()
    await policy.close()
    assert [checkpoint.step for checkpoint in folder.all_checkpoints()] == [1]
    assert not list(folder.checkpoints_path.glob(".unfinished*"))


async def test_a_disk_that_is_full_is_told_with_the_path_and_the_fix_and_the_ranks_stay_whole(
    policy: TrainCluster, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        folder = RunFolder.create(RunConfig(name="demo", runs_dir=disk), resolved={})
        ours = Checkpoints(folder, CheckpointConfig())
        await ours.take(1, {"": policy}, {})
        with pytest.raises(RunFolderError, match=r"cannot write .*step-000001: No space left .*free some space"):
            await ours.finish()
        assert len(await losses(policy, range(2))) == 2
        assert not folder.all_checkpoints()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
