"""A model that follows another: in how many buckets its parts travel, and what is refused before any has moved."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from reroll.config.parts import ModelConfig
from reroll.errors import ModelError
from reroll.pipeline.spawn import reference_of, spawn_model
from reroll.runtime.local import LocalRuntime
from reroll.training import cluster as cluster_module
from reroll.training.cluster import PartShape, TrainCluster, _buckets
from reroll_zoo.tiny_models import make_tiny


def test_buckets_keep_the_order_and_hold_the_parts_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "BUCKET_BYTES", 100)
    first = {"a": (10,), "b": (2, 3), "c": (4,), "d": (100,), "e": (0,), "f": (1,)}
    second = first | {"b": (3, 3)}
    shapes = [{name: PartShape(shape, torch.float32) for name, shape in held.items()} for held in (first, second)]
    assert list(_buckets(shapes)) == [["a"], ["b", "c"], ["d"], ["e", "f"]]


@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 2**30])
def test_every_weight_moves_once_however_many_buckets_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    monkeypatch.setattr(cluster_module, "BUCKET_BYTES", bucket_bytes)
    start, other = (make_tiny(tmp_path / str(seed), seed=seed) for seed in (1, 2))

    async def play() -> None:
        policy, reference = await both(start, other)
        goal, before = await weights(policy), await weights(reference)
        await reference.follow(policy, share=0.25)
        after = await weights(reference)
        assert reference.num_updates == 1
        for name, weight in after.items():
            assert torch.equal(weight, torch.lerp(before[name], goal[name], 0.25))
            assert torch.equal((await weights(policy))[name], goal[name])
        assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])

    asyncio.run(play())


def test_a_model_of_another_shape_is_refused_before_anything_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "BUCKET_BYTES", 1)
    start, deeper = make_tiny(tmp_path / "start", seed=1, layers=1), make_tiny(tmp_path / "deeper", seed=2, layers=2)

    async def play() -> None:
        policy, reference = await both(start, deeper)
        before = await weights(reference)
        with pytest.raises(ModelError, match=r"model\.layers\.1\..* differs .*set reference.sync_every to 0"):
            await reference.follow(policy, share=0.5)
        assert reference.num_updates == 0
        assert all(torch.equal(weight, before[name]) for name, weight in (await weights(reference)).items())

    asyncio.run(play())


async def both(start: Path, other: Path) -> tuple[TrainCluster, TrainCluster]:
    runtime, config = LocalRuntime(), ModelConfig(model=str(start), devices="cpu")
    policy = await spawn_model(runtime, config, role="policy", total_steps=1)
    return policy, await reference_of(runtime, config, policy, model=str(other))


async def weights(model: TrainCluster) -> dict[str, torch.Tensor]:
    found = {**await model.weights(), **await model.weights(frozen=True)}
    return {name: weight.clone() for name, weight in found.items()}
