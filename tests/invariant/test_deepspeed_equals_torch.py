"""Under every stage of DeepSpeed, ranks together learn what one process learns: fp32, real processes, gloo, through Ray.

`parallel_bench` says how close they must come, and why no closer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_bench import (
    MICRO_BATCH_TOKENS,
    OPTIM,
    STEP,
    Outcome,
    Scenario,
    assert_same,
    batch,
    played_alone,
    said_together,
)
from transformers import AutoModelForCausalLM

from reroll.config.parts import LoraConfig, ModelConfig
from reroll.errors import TrainingDiverged
from reroll.models.tiny import make_tiny
from reroll.pipeline.spawn import spawn_fixed, spawn_model
from reroll.runtime.base import Placement, WorkerInfo, Workers
from reroll.training.base import Needs, required
from reroll.training.cluster import Rendezvous, TrainWorker
from reroll.training.loss import PolicyLoss, ValueLoss
from reroll_zoo.deepspeed.config import DeepspeedConfig
from reroll_zoo.ray.config import RayRuntimeConfig

pytest.importorskip("ray")
pytest.importorskip("deepspeed")
from reroll_zoo.ray.runtime import RayRuntime


class Bench:
    """A process that can be a rank of one model after the other: starting one that loads DeepSpeed is what takes time.

    It leaves the other ranks by DeepSpeed's own way, which forgets the groups that it has made of them. DeepSpeed numbers
    parameters as long as a process lives, so ranks must have held the same models before.
    """

    def __init__(self, info: WorkerInfo) -> None:
        self._rank = info.rank

    def play(self, scenario: Scenario, *, num_ranks: int, rendezvous: str | None) -> Outcome:
        info = WorkerInfo("policy", self._rank, num_ranks, "cpu")
        worker = TrainWorker(info, scenario.config, total_steps=6, head=scenario.head, rendezvous=rendezvous)
        try:
            outcome = scenario.play(worker)
            masters = worker._strategy._optimizer.state  # type: ignore[attr-defined]
            return replace(outcome, num_held=sum(master.numel() for master in masters))
        finally:
            import deepspeed

            deepspeed.comm.destroy_process_group()


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    runtime = RayRuntime(RayRuntimeConfig(kind="ray", num_cpus=16))
    yield runtime
    asyncio.run(runtime.close())


@pytest.fixture(scope="module")
def bench(runtime: RayRuntime) -> Workers[Bench]:
    return asyncio.run(runtime.spawn(Bench, Placement("bench", ("cpu",) * 2)))


def played_by_ranks(bench: Workers[Bench], scenario: Scenario, num_ranks: int) -> Outcome:
    rendezvous = Rendezvous("127.0.0.1")

    async def play() -> list[Outcome]:
        return await bench.broadcast(Bench.play, scenario, num_ranks=num_ranks, rendezvous=rendezvous.address)

    return said_together(asyncio.run(play()), scenario)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny(root / "llama", hidden=32),
        "qwen3": make_tiny(root / "qwen3", family="qwen3", hidden=32, tie_embeddings=False),
    }


def config_of(folder: Path, *, lora: bool = False, **options: Any) -> ModelConfig:
    strategy = DeepspeedConfig(micro_batch_tokens=MICRO_BATCH_TOKENS, logprob_chunk=7, **options)
    adapter = LoraConfig(rank=4) if lora else None
    return ModelConfig(model=str(folder), strategy=strategy, optim=OPTIM, lora=adapter, devices="cpu")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_together_learn_what_one_process_learns_under_every_stage(
    bench: Workers[Bench], models: dict[str, Path], stage: int
) -> None:
    config = config_of(models["qwen3" if stage == 3 else "llama"], stage=stage)
    ours, expected = played_by_ranks(bench, Scenario(config=config), 2), played_alone(config)
    assert_same(ours, expected)
    assert ours.num_held < 0.51 * expected.num_held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "family", "options"),
    [
        (3, "llama", {"stage": 3}),  # Few tensors divide by three: parts are padded.
        (3, "qwen3", {"stage": 2, "gradient_checkpointing": True}),
        (2, "qwen3", {"stage": 3, "gradient_checkpointing": True}),
        (2, "llama", {"stage": 3, "cpu_offload": True}),
        (2, "llama", {"stage": 2, "cpu_offload": True}),
        (2, "llama", {"stage": 1, "cpu_offload": True}),
    ],
)
def test_other_settings_do_too(
    runtime: RayRuntime, models: dict[str, Path], num_ranks: int, family: str, options: dict[str, Any]
) -> None:
    config = config_of(models[family], **options)
    fresh = asyncio.run(runtime.spawn(Bench, Placement("fresh", ("cpu",) * num_ranks)))
    ours, expected = played_by_ranks(fresh, Scenario(config=config), num_ranks), played_alone(config)
    if num_ranks == 3:  # No power of two: a gradient is rounded when it is made larger, and again when the mean is taken.
        for name, weight in expected.weights.items():
            torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=0.02 * STEP)
        ours = replace(ours, weights=expected.weights)
    assert_same(ours, expected)
    asyncio.run(fresh.stop())


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_is_trained_alike_by_two_ranks(bench: Workers[Bench], models: dict[str, Path], stage: int) -> None:
    config = config_of(models["llama"], stage=stage, lora=True)
    ours, expected = played_by_ranks(bench, Scenario(config=config), 2), played_alone(config)
    assert all("lora" in name for name in ours.weights)
    assert_same(ours, expected)


def test_a_critic_is_trained_alike_by_two_ranks(bench: Workers[Bench], models: dict[str, Path]) -> None:
    config, scenario = config_of(models["llama"], stage=3), {"head": "score", "loss": ValueLoss()}
    assert_same(played_by_ranks(bench, Scenario(config=config, **scenario), 2), played_alone(config, **scenario))


@pytest.mark.parametrize(("stage", "next_stage", "next_ranks"), [(3, 3, 1), (2, 3, 2), (3, 1, 2)])
def test_a_checkpoint_opens_with_plain_transformers_and_goes_on_with_other_ranks_and_stages(
    bench: Workers[Bench], models: dict[str, Path], tmp_path: Path, stage: int, next_stage: int, next_ranks: int
) -> None:
    first, then = (config_of(models["qwen3"], stage=number) for number in (stage, next_stage))
    saved = played_by_ranks(bench, Scenario(config=first, steps=range(2), save=tmp_path), 2)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(plain[name], weight) for name, weight in saved.weights.items())
    scenario = Scenario(config=then, steps=range(2, 3), load=tmp_path)
    if next_ranks == 1:
        resumed = Bench(WorkerInfo("bench", 0, 1, "cpu")).play(scenario, num_ranks=1, rendezvous=None)
    else:
        resumed = played_by_ranks(bench, scenario, next_ranks)
    whole = played_alone(then)
    assert_same(resumed, replace(whole, stats=whole.stats[2:], answers_at_start=resumed.answers_at_start))


@pytest.mark.slow  # Every strategy refuses such a gradient in tests/contract, and ranks are held to one process above.
def test_a_policy_and_its_reference_run_over_ray_and_a_gradient_that_is_not_finite_stops_the_policy(
    runtime: RayRuntime, models: dict[str, Path]
) -> None:
    config = config_of(models["llama"], stage=3, num_ranks=2)
    broken = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2}, kl_coef=float("nan"))

    async def run() -> None:
        policy = await spawn_model(runtime, config, role="policy", total_steps=6)
        reference = await spawn_fixed(runtime, config, role="reference")
        one_row = batch(0).select([1])  # Fewer rows than ranks.
        expected = required((await policy.predict(one_row, Needs())).logp)
        torch.testing.assert_close(required((await reference.predict(one_row, Needs())).logp), expected)
        before = await policy.weights()
        with pytest.raises(TrainingDiverged, match="step 0 is not finite"):
            await policy.train(batch(0), broken)
        after = await policy.weights()
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        await policy.close()
        await reference.close()

    asyncio.run(run())
