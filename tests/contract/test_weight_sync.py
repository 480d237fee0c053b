"""Whatever way weights take between processes, engines end up with the policy's, bit for bit.

Real processes. What the trainer holds is the oracle: that is what the engine adopts where both share memory.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from weights_probe import Pair, spawn_pair

from reroll.config.parts import LoraConfig, ModelConfig
from reroll.config.strategy import StrategyConfig, TorchStrategyConfig
from reroll.config.weights import WeightsKind
from reroll.models.load import Precision
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.tiny_models import make_tiny

KINDS: list[WeightsKind] = ["ipc", "broadcast", "disk", "store"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=2, heads=4, kv_heads=2))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Of the whole module, as the processes are."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def pair(loop: asyncio.AbstractEventLoop) -> Iterator[Pair]:
    pair = loop.run_until_complete(spawn_pair(num_trainers=2, num_engines=2))
    yield pair
    loop.run_until_complete(pair.runtime.close())


@pytest.mark.parametrize(
    "strategy",
    [
        TorchStrategyConfig(),
        Fsdp2StrategyConfig(kind="fsdp2", num_ranks=2),
        Fsdp2StrategyConfig(kind="fsdp2", num_ranks=2, tp=2),
    ],
    ids=["torch", "fsdp2", "fsdp2 tp"],
)
def test_every_way_gives_the_engines_the_policys_weights_bit_for_bit(
    loop: asyncio.AbstractEventLoop, pair: Pair, folder: str, tmp_path: Path, strategy: StrategyConfig
) -> None:
    async def scenario() -> None:
        await pair.become(ModelConfig(model=folder, strategy=strategy))
        version = 0
        for delta, kind in itertools.product((False, True), KINDS):
            sync, sent = pair.sync(kind, tmp_path, delta=delta), []
            for _ in range(2):
                version += 1
                await pair.move(scale=0.01)
                stats = await sync.push(version=version)
                sent.append(stats["push/bytes"].value)
                assert stats["push/tries"].value == 1
                await pair.assert_in_step()
                assert await pair.versions() == [version] * 2
            assert (sent[1] < sent[0]) == delta

    loop.run_until_complete(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_policy_begins_again_when_an_engine_refuses_a_bucket(
    loop: asyncio.AbstractEventLoop, pair: Pair, folder: str, tmp_path: Path, kind: WeightsKind
) -> None:
    async def scenario() -> None:
        await pair.become(ModelConfig(model=folder, strategy=Fsdp2StrategyConfig(kind="fsdp2", num_ranks=2)))
        sync = pair.sync(kind, tmp_path)
        await pair.refuse(2)
        assert (await sync.push(version=1))["push/tries"].value == 2
        await pair.assert_in_step()
        await pair.move(scale=0.01)  # Shards: what was gathered for the push that broke off must not be sent again.
        assert (await sync.push(version=2))["push/tries"].value == 1
        await pair.assert_in_step()

    loop.run_until_complete(scenario())


@pytest.mark.parametrize("engine_precision", ["fp32", "bf16"])
def test_half_precision_weights_travel_as_such_to_engines_of_any_precision(
    loop: asyncio.AbstractEventLoop, pair: Pair, folder: str, tmp_path: Path, engine_precision: Precision
) -> None:
    async def scenario() -> None:
        config = ModelConfig(model=folder, strategy=TorchStrategyConfig(precision="bf16"))
        await pair.become(config, engine_precision=engine_precision)
        await pair.move(scale=0.1)
        stats = await pair.sync("auto", tmp_path).push(version=1)
        num_weights = sum(tensor.numel() for tensor in (await pair.policy.weights()).values())
        assert 2 * num_weights <= stats["push/bytes"].value < 2.1 * num_weights
        await pair.assert_in_step()

    loop.run_until_complete(scenario())


def test_of_a_policy_with_an_adapter_only_that_travels(
    loop: asyncio.AbstractEventLoop, pair: Pair, folder: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        await pair.become(ModelConfig(model=folder, lora=LoraConfig(rank=2)))
        frozen = await pair.policy.weights(frozen=True)
        for version, kind in enumerate(KINDS):
            await pair.move(scale=0.1)
            stats = await pair.sync(kind, tmp_path).push(version=version)
            assert stats["push/bytes"].value < sum(tensor.nbytes for tensor in frozen.values())
            await pair.assert_in_step()

    loop.run_until_complete(scenario())
