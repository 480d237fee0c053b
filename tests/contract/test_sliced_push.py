"""Four ranks that share a model in each way there is, and four engines: each rank sends what it holds, once.

Real processes that meet by gloo. The policy's gathered weights are the oracle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from weights_probe import Pair, spawn_pair

from reroll.config.parts import ModelConfig
from reroll.config.weights import WeightsKind
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.fsdp2.layout import RankLayout
from reroll_zoo.tiny_models import make_tiny

BUCKET_MB = 0.08
LAYOUTS = {
    "shards": ("llama", {}),
    "shards × tp": ("llama", {"tp": 2}),
    "replicas × tp": ("llama", {"replicas": 2, "tp": 2}),
    "shards × ep": ("qwen3_moe", {"ep": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sizes that four ranks do not divide: some hold less than others, or nothing."""
    folder = tmp_path_factory.mktemp("models")
    made = {"llama": make_tiny(folder / "llama", hidden=36, heads=6, kv_heads=2, layers=2, tie_embeddings=False)}
    made["qwen3_moe"] = make_tiny(folder / "qwen3_moe", family="qwen3_moe", hidden=32, layers=1)
    return {family: str(path) for family, path in made.items()}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def pair(loop: asyncio.AbstractEventLoop) -> Iterator[Pair]:
    pair = loop.run_until_complete(spawn_pair(num_trainers=4, num_engines=4))
    yield pair
    loop.run_until_complete(pair.runtime.close())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_sends_its_part_once_and_holds_no_more_than_a_bucket_beside_it(
    loop: asyncio.AbstractEventLoop, pair: Pair, models: dict[str, str], tmp_path: Path, layout: str
) -> None:
    async def scenario() -> None:
        family, options = LAYOUTS[layout]
        strategy = Fsdp2StrategyConfig(kind="fsdp2", num_ranks=4, precision="bf16", **options)
        await pair.become(ModelConfig(model=models[family], strategy=strategy), engine_precision="bf16")
        weights = await pair.policy.weights()
        model_bytes = sum(tensor.nbytes for tensor in weights.values())
        rounded_up = 64 * 4 * len(weights)  # Where tensors start in a bucket.
        sync = pair.sync("broadcast", tmp_path, bucket_mb=BUCKET_MB)
        await sync.push(version=1)  # Members of the group greet each other.
        await pair.assert_in_step()
        await pair.move(scale=0.1)
        before = await pair.traffic()
        assert (await sync.push(version=2))["push/tries"].value == 1
        after = await pair.traffic()
        await pair.assert_in_step()

        sent = [now.num_sent - then.num_sent for then, now in zip(before[0], after[0], strict=True)]
        assert model_bytes <= sum(sent) <= model_bytes + rounded_up, "every part leaves the policy once"
        assert max(sent) - min(sent) < 0.1 * model_bytes, "ranks send as much as each other"
        taken = [now.num_taken - then.num_taken for then, now in zip(before[1], after[1], strict=True)]
        assert taken == [sum(sent)] * 4, "every engine takes the model in once"
        passed = [now.num_sent - then.num_sent for then, now in zip(before[1], after[1], strict=True)]
        assert sum(passed) == 3 * sum(sent), "the first of an engine's ring has it from a rank, each other from the one before"
        assert max(passed) <= sum(sent)
        assert all(2 * found.largest <= BUCKET_MB * 1e6 for found in after[0]), "two buffers, or a buffer and a part"

    loop.run_until_complete(scenario())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_planned_rank_would_hold_is_what_a_real_one_holds(
    loop: asyncio.AbstractEventLoop, pair: Pair, models: dict[str, str], layout: str
) -> None:
    async def scenario() -> None:
        family, options = LAYOUTS[layout]
        strategy = Fsdp2StrategyConfig(kind="fsdp2", num_ranks=4, **options)
        await pair.become(ModelConfig(model=models[family], strategy=strategy))
        planned = RankLayout(num_ranks=4, **options)
        for rank, held in enumerate(await pair.layouts()):
            assert held
            for name, part in held.items():
                assert planned.slice_of(rank, name, part.shape, dtype="float32") == part

    loop.run_until_complete(scenario())


@pytest.mark.parametrize("kind", ["broadcast", "store", "ipc"])
def test_ranks_that_send_their_own_parts_begin_again_when_an_engine_refuses_a_bucket(
    loop: asyncio.AbstractEventLoop, pair: Pair, models: dict[str, str], tmp_path: Path, kind: WeightsKind
) -> None:
    async def scenario() -> None:
        strategy = Fsdp2StrategyConfig(kind="fsdp2", num_ranks=4, ep=2)
        await pair.become(ModelConfig(model=models["qwen3_moe"], strategy=strategy))
        sync = pair.sync(kind, tmp_path, bucket_mb=BUCKET_MB, delta=True)
        await pair.refuse(1)
        assert (await sync.push(version=1))["push/tries"].value == 2
        await pair.assert_in_step()
        await pair.move(scale=0.01)
        assert (await sync.push(version=2))["push/tries"].value == 1
        await pair.assert_in_step()
        assert await pair.versions() == [2] * 4

    loop.run_until_complete(scenario())
