"""Pushes that break off: repeated in full, never half used, and given up with words that say what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reroll.config.parts import ModelConfig
from reroll.config.weights import WeightsConfig
from reroll.errors import WeightsError, WorkerDied, WorkerError
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.infer.worker import InferWorker
from reroll.pipeline.weight_sync import WeightSync
from reroll.runtime.base import Placement, Workers
from reroll.runtime.local import LocalRuntime
from reroll.training.cluster import TrainCluster, TrainWorker
from reroll.types import Request, SamplingParams
from reroll.weights.buckets import Bucket, Channel, Stored
from reroll.weights.sender import WeightSender


class MovingTrainer(TrainWorker):
    """A policy whose weights change without a batch, and whose sender may fail."""

    num_pushes, last_buckets_to_lose, is_gone = 0, 0, False

    def begin_push(self, *, version: int, base_version: int | None) -> Bucket | None:
        self.num_pushes += 1
        if self.is_gone:
            raise WorkerDied("worker policy[0] is gone")
        return super().begin_push(version=version, base_version=base_version)

    def next_bucket(self) -> Bucket | None:
        bucket = super().next_bucket()
        if bucket is None or not bucket.is_last or not self.last_buckets_to_lose:
            return bucket
        self.last_buckets_to_lose -= 1
        return None

    def lose_the_last_bucket(self) -> None:
        self.last_buckets_to_lose = 1

    def leave(self) -> None:
        self.is_gone = True

    def pushes(self) -> int:
        return self.num_pushes

    def nudge(self) -> None:
        with torch.no_grad():
            for parameter in self._strategy._parameters.values():  # type: ignore[attr-defined]
                parameter.view(-1)[::50] *= 1.5


class OpenEngine(InferWorker):
    """An engine that shows its weights."""

    def held(self) -> dict[str, Tensor]:
        engine = self._engine
        assert isinstance(engine, EmbeddedEngine)
        return {name: parameter.detach().clone() for name, parameter in engine._runner._parameters.items()}

    def addresses(self) -> dict[str, int]:
        engine = self._engine
        assert isinstance(engine, EmbeddedEngine)
        return {name: parameter.data_ptr() for name, parameter in engine._runner._parameters.items()}


Buckets = Mapping[int, Sequence[Bucket]]
Fault = Callable[[int, Buckets], Buckets]
"""(how many deliveries came before, pieces by engine) -> what is delivered instead."""


class FaultyCluster(InferCluster):
    """Engines on a road where things go wrong."""

    fault: Fault = staticmethod(lambda number, buckets: buckets)  # type: ignore[assignment]
    num_deliveries = 0

    async def take_weights(self, buckets: Buckets) -> None:
        delivered = self.fault(self.num_deliveries, buckets)
        self.num_deliveries += 1
        if delivered:
            await super().take_weights(delivered)


@dataclass
class Run:
    trainers: Workers[MovingTrainer]
    engines: Workers[OpenEngine]
    policy: TrainCluster
    cluster: FaultyCluster

    def shared(self, *, snapshot: bool) -> WeightSync:
        return WeightSync(self.policy, self.cluster, WeightsConfig(), share_memory=True, snapshot=snapshot)

    def sync(self, **options: Any) -> WeightSync:
        config = WeightsConfig(**{"kind": "store", "bucket_mb": 0.01, **options})
        return WeightSync(self.policy, self.cluster, config, share_memory=False, snapshot=False)

    async def assert_in_step(self) -> None:
        """Every engine holds the policy's weights, bit for bit."""
        want = await self.policy.weights()
        for held in await self.engines.broadcast(OpenEngine.held):
            assert held.keys() == want.keys()
            assert all(torch.equal(held[name], tensor) for name, tensor in want.items())


@pytest.fixture
async def run(tiny_model: Path) -> AsyncIterator[Run]:
    async with LocalRuntime() as runtime:
        config = ModelConfig(model=str(tiny_model), devices="cpu")
        trainers = await runtime.spawn(MovingTrainer, Placement("policy", ("cpu",)), config, total_steps=1)
        engines = await runtime.spawn(
            OpenEngine, Placement("engine", ("cpu", "cpu"), CONCURRENCY), model=str(tiny_model), precision="fp32", max_running=4
        )
        cluster = FaultyCluster(engines)  # type: ignore[arg-type]
        await trainers.broadcast(MovingTrainer.nudge)
        yield Run(trainers, engines, TrainCluster(trainers), cluster)  # type: ignore[arg-type]
        await cluster.close()


def ask(name: str, *, num_tokens: int, prompt: int = 5) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, seed=3)
    return Request(id=name, prompt_ids=(prompt, 9), sampling=sampling)


@pytest.mark.parametrize("snapshot", [True, False])
async def test_in_one_process_engines_adopt_the_weights_or_copy_them_into_their_own(run: Run, snapshot: bool) -> None:
    sync, locations = run.shared(snapshot=snapshot), []
    for version in (1, 2):
        await sync.push(version=version)
        await run.assert_in_step()
        held, given = (await run.engines.broadcast(OpenEngine.addresses))[0], await run.policy.weights()
        locations.append(held)
        shares = [address == given[name].data_ptr() for name, address in held.items()]
        assert not any(shares) if snapshot else all(shares)
        await run.trainers.broadcast(MovingTrainer.nudge)
    assert locations[0] == locations[1], "weights that move in memory would cost a GPU its graphs"


async def test_a_push_gives_every_engine_the_policys_weights_in_many_buckets(run: Run) -> None:
    stats = await run.sync().push(version=1)
    assert run.cluster.num_deliveries > 3
    assert stats["push/tries"].value == 1
    assert stats["push/bytes"].value >= sum(tensor.nbytes for tensor in (await run.policy.weights()).values())
    assert 0 < stats["time/gather_s"].value <= stats["time/push_s"].value
    await run.assert_in_step()


async def test_a_lost_bucket_is_sent_again_and_no_token_is_from_a_mix(run: Run) -> None:
    sync = run.sync()
    await sync.push(version=1)
    writing = [asyncio.create_task(run.cluster.generate(ask(f"{i}", num_tokens=120, prompt=5 + i))) for i in range(4)]
    while sum(status.num_tokens for status in await run.engines.broadcast(OpenEngine.stats)) < 20:
        await asyncio.sleep(0.001)
    during: list[int] = []
    first = run.cluster.num_deliveries

    def fault(number: int, buckets: Buckets) -> Buckets:
        if number > first:
            during.append(sum(worker._worker._engine.counts.num_tokens for worker in run.engines._hosts))  # type: ignore[attr-defined]
        return {} if number == first + 2 else buckets

    run.cluster.fault = fault
    await run.trainers.broadcast(MovingTrainer.nudge)
    stats = await sync.push(version=2)
    assert stats["push/tries"].value == 2
    assert len(set(during)) == 1, "between the first bucket and the last no engine writes a token"
    await run.assert_in_step()
    for completion in await asyncio.gather(*writing):
        assert [version for version, _ in completion.versions] in ([1, 2], [1], [2])
    assert (await run.cluster.generate(ask("after", num_tokens=5))).versions == ((2, 5),)


async def test_a_sender_that_ends_before_its_last_bucket_has_not_pushed(run: Run) -> None:
    await run.trainers.broadcast(MovingTrainer.lose_the_last_bucket)
    assert (await run.sync().push(version=1))["push/tries"].value == 2
    await run.assert_in_step()


async def test_an_engine_whose_push_broke_off_writes_nothing_until_one_has_gone_through(run: Run) -> None:
    sync = run.sync(retries=1)
    run.cluster.fault = lambda number, buckets: {} if number % 4 == 1 else buckets
    with pytest.raises(WeightsError, match=r"version 1 .* in 2 tries.*--resume") as caught:
        await sync.push(version=1)
    assert "came where" in str(caught.value), "the cause is told"
    waiting = asyncio.create_task(run.cluster.generate(ask("waits", num_tokens=5)))
    await run.cluster.pause()
    await run.cluster.resume()  # A lease that ends is no reason to step.
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    run.cluster.fault = lambda number, buckets: buckets
    await sync.push(version=2)
    assert (await waiting).versions == ((2, 5),)
    await run.assert_in_step()


async def test_changes_travel_alone_and_damaged_ones_are_replaced_by_whole_weights(run: Run) -> None:
    sync = run.sync(delta=True)
    whole = (await sync.push(version=1))["push/bytes"].value
    await run.trainers.broadcast(MovingTrainer.nudge)
    assert (await sync.push(version=2))["push/bytes"].value < whole / 4
    await run.assert_in_step()

    damaged_at = run.cluster.num_deliveries + 1

    def fault(number: int, buckets: Buckets) -> Buckets:
        if number != damaged_at:
            return buckets
        [piece] = next(iter(buckets.values()))
        payload = piece.payload
        assert isinstance(payload, Stored)
        data = payload.data.copy()
        data[30] ^= 1
        return {engine: [replace(piece, payload=Stored(data))] for engine in buckets}

    run.cluster.fault = fault
    await run.trainers.broadcast(MovingTrainer.nudge)
    stats = await sync.push(version=3)
    assert (stats["push/tries"].value, stats["push/bytes"].value) == (2, whole)
    await run.assert_in_step()
    await run.trainers.broadcast(MovingTrainer.nudge)
    assert (await sync.push(version=4))["push/bytes"].value < whole / 4
    await run.assert_in_step()


async def test_a_policy_that_is_gone_is_not_asked_again(run: Run) -> None:
    await run.trainers.broadcast(MovingTrainer.leave)
    with pytest.raises(WorkerDied, match=r"policy\[0\]"):
        await run.sync().push(version=1)
    assert await run.trainers.broadcast(MovingTrainer.pushes) == [1]


async def test_an_engine_without_a_channel_says_so(run: Run) -> None:
    await run.cluster.locations()
    sender = WeightSender(Channel(kind="store", bucket_bytes=1, delta=False), rank=0, device="cpu")
    bucket = next(sender.buckets((), version=1, base_version=None))
    assert bucket is not None
    with pytest.raises(WorkerError, match="call open_receiver first"):
        await run.cluster.take_weights({engine: [bucket] for engine in range(8)})
