"""Under every stage of DeepSpeed, ranks together learn what one process learns: fp32, real processes, gloo.

`parallel_bench` says how close they must come, and why no closer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
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
from warm import FORKS

from reroll.config.parts import LoraConfig, ModelConfig
from reroll.errors import TrainingDiverged
from reroll.pipeline.spawn import spawn_fixed, spawn_model
from reroll.runtime.base import WorkerInfo
from reroll.training.base import Needs, required
from reroll.training.cluster import Rendezvous, TrainWorker
from reroll.training.loss import PolicyLoss, ValueLoss
from reroll_zoo.deepspeed.config import DeepspeedConfig
from reroll_zoo.ray.config import RayRuntimeConfig
from reroll_zoo.tiny_models import make_tiny

pytest.importorskip("ray")
pytest.importorskip("deepspeed")
from reroll_zoo.ray.runtime import RayRuntime


def play_as_rank(scenario: Scenario, rank: int, num_ranks: int, rendezvous: str | None) -> Outcome:
    """It leaves the other ranks by DeepSpeed's own way, which forgets the groups that it has made of them."""
    info = WorkerInfo("policy", rank, num_ranks, "cpu")
    worker = TrainWorker(info, scenario.config, total_steps=6, head=scenario.head, rendezvous=rendezvous)
    try:
        outcome = scenario.play(worker)
        masters = worker._strategy._optimizer.state  # type: ignore[attr-defined]
        return replace(outcome, num_held=sum(master.numel() for master in masters))
    finally:
        import deepspeed

        deepspeed.comm.destroy_process_group()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Executor]:
    """Two processes that are the ranks of one model after the other: loading DeepSpeed is what takes time.

    DeepSpeed numbers parameters as long as a process lives, so ranks must have held the same models before.
    """
    with ProcessPoolExecutor(2, mp_context=FORKS) as pool:
        yield pool


def played_by_ranks(ranks: Executor, scenario: Scenario, num_ranks: int = 2) -> Outcome:
    """Nobody is a rank twice: each waits for the others."""
    rendezvous = Rendezvous("127.0.0.1")
    calls = [ranks.submit(play_as_rank, scenario, rank, num_ranks, rendezvous.address) for rank in range(num_ranks)]
    return said_together([call.result() for call in calls], scenario)


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    runtime = RayRuntime(RayRuntimeConfig(kind="ray", num_cpus=16))
    yield runtime
    asyncio.run(runtime.close())


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
    ranks: Executor, models: dict[str, Path], stage: int
) -> None:
    config = config_of(models["qwen3" if stage == 3 else "llama"], stage=stage)
    ours, expected = played_by_ranks(ranks, Scenario(config=config)), played_alone(config)
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
def test_other_settings_do_too(models: dict[str, Path], num_ranks: int, family: str, options: dict[str, Any]) -> None:
    config = config_of(models[family], **options)
    with ProcessPoolExecutor(num_ranks, mp_context=FORKS) as fresh:
        ours, expected = played_by_ranks(fresh, Scenario(config=config), num_ranks), played_alone(config)
    if num_ranks == 3:  # No power of two: a gradient is rounded when it is made larger, and again when the mean is taken.
        for name, weight in expected.weights.items():
            torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=0.02 * STEP)
        ours = replace(ours, weights=expected.weights)
    assert_same(ours, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_is_trained_alike_by_two_ranks(ranks: Executor, models: dict[str, Path], stage: int) -> None:
    config = config_of(models["llama"], stage=stage, lora=True)
    ours, expected = played_by_ranks(ranks, Scenario(config=config)), played_alone(config)
    assert all("lora" in name for name in ours.weights)
    assert_same(ours, expected)


def test_a_critic_is_trained_alike_by_two_ranks(ranks: Executor, models: dict[str, Path]) -> None:
    config, scenario = config_of(models["llama"], stage=3), {"head": "score", "loss": ValueLoss()}
    assert_same(played_by_ranks(ranks, Scenario(config=config, **scenario)), played_alone(config, **scenario))


@pytest.mark.parametrize(
    ("stage", "next_stage", "next_ranks"), [(3, 3, 1), pytest.param(2, 3, 2, marks=pytest.mark.slow), (3, 1, 2)]
)
def test_a_checkpoint_opens_with_plain_transformers_and_goes_on_with_other_ranks_and_stages(
    ranks: Executor, models: dict[str, Path], tmp_path: Path, stage: int, next_stage: int, next_ranks: int
) -> None:
    first, then = (config_of(models["qwen3"], stage=number) for number in (stage, next_stage))
    saved = played_by_ranks(ranks, Scenario(config=first, steps=range(1), save=tmp_path))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(plain[name], weight) for name, weight in saved.weights.items())
    scenario = Scenario(config=then, steps=range(1, 2), load=tmp_path)
    resumed = play_as_rank(scenario, 0, 1, None) if next_ranks == 1 else played_by_ranks(ranks, scenario)
    whole = played_alone(then)
    assert_same(resumed, replace(whole, stats=whole.stats[1:], answers_at_start=resumed.answers_at_start))


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
