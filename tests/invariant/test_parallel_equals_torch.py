"""However many ranks hold a model, it learns what one process learns: fp32, real processes, gloo, through Ray.

The sums behind a gradient are taken in another order, which shows in the seventh digit of losses and norms. Adam divides by
the size of a gradient, so for a weight whose gradient is nearly zero that digit becomes a visible part of a step: weights
are held to a hundredth of one step.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.config.parts import Fsdp2Strategy, LoraConfig, ModelConfig, OptimConfig, TorchStrategy
from reroll.config.parts import RayRuntime as RayConfig
from reroll.errors import WorkerDied, WorkerError
from reroll.models.load import Head
from reroll.models.tiny import make_tiny
from reroll.observe.metrics import Stats
from reroll.pipeline.run import train
from reroll.pipeline.spawn import spawn_model
from reroll.runtime.base import Placement, WorkerInfo, Workers
from reroll.tokens.batch import Batch, pack
from reroll.train import cluster as cluster_module
from reroll.train.base import Loss, LossOutput, Needs, Predictions, known
from reroll.train.loss import PolicyLoss, ValueLoss
from reroll.train.parallel.ranks import MeetingPoint
from reroll.train.worker import PredictJob, TrainJob, TrainWorker
from reroll.types import Sample

pytest.importorskip("ray")
from reroll.runtime.ray import RayRuntime

STEP = 1e-3
OPTIM = OptimConfig(lr=STEP, clip_norm=0.5, weight_decay=0.1)
GRPO = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2}, kl_coef=0.05)
MICRO_BATCH_TOKENS = 30


def batch(seed: int) -> Batch:
    """Three prompts with siblings. One row fills a rank by itself, so ranks have unequal numbers of micro-batches; one long
    row has no token in the loss, so that a micro-batch never reaches the head."""
    rng = np.random.default_rng(seed)
    samples, advantages = [], []
    for lengths in [(60, 9, 14), (8, 11, 7), (33, 10)]:
        prompt = rng.integers(4, 90, size=4)
        rewards = rng.normal(size=len(lengths)).astype(np.float32)
        for length, reward in zip(lengths, rewards - rewards.mean(), strict=True):
            mask = (np.arange(length) >= 4) & (length != 33)
            ids = np.concatenate([prompt, rng.integers(4, 90, size=length - 4)])
            logp = np.where(mask, rng.normal(-4.5, 0.1, size=length), 0).astype(np.float32)
            samples.append(Sample(ids=ids, loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
            advantages.append(np.where(mask, reward, 0).astype(np.float32))
    packed = pack(samples).replace(advantage=torch.from_numpy(np.concatenate(advantages)))
    noise = torch.from_numpy(rng.normal(0, 0.1, size=packed.num_tokens).astype(np.float32)) * packed.loss_mask
    return packed.replace(ref_logp=packed.logp + noise, value=noise, returns=packed.advantage)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a model is put through."""

    config: ModelConfig
    steps: range = range(3)
    head: Head = "language"
    loss: Loss = GRPO
    load: Path | None = None
    save: Path | None = None

    def play(self, worker: TrainWorker) -> Outcome:
        if self.load:
            worker.load(self.load)
        num_weights = len(worker.weights())  # Before the first pass: an engine gets its weights then.
        # The first pass may be about the model without its adapter, as a reference.
        start = worker.predict(PredictJob(batch(8), replace(self.loss.needs, adapter=False)))
        stats = [worker.train(TrainJob(batch=batch(step), loss=self.loss, mini_batches=2)) for step in self.steps]
        if self.save:
            worker.save(self.save)
        end = worker.predict(PredictJob(batch(9), self.loss.needs))
        weights = {name: weight.clone() for name, weight in worker.weights().items()}
        groups = worker._strategy._optimizer.param_groups  # type: ignore[attr-defined]
        num_held = sum(parameter.numel() for group in groups for parameter in group["params"])
        return Outcome(stats, weights, num_weights, num_held, answer_of(start), answer_of(end))


def answer_of(predictions: Predictions) -> Tensor:
    return known(predictions.value if predictions.logp is None else predictions.logp)


@dataclass(frozen=True)
class Outcome:
    stats: list[Stats]
    weights: dict[str, Tensor]
    num_weights_at_start: int
    num_held: int
    """Numbers in this process that the optimizer works on."""
    answer_at_start: Tensor
    answer: Tensor


class Bench:
    """A process that can be a rank of one model after the other: starting processes is what takes time."""

    def __init__(self, info: WorkerInfo) -> None:
        self._rank = info.rank

    def play(self, scenario: Scenario, *, num_ranks: int, meeting: str) -> Outcome | None:
        if self._rank >= num_ranks:
            return None
        info = WorkerInfo("policy", self._rank, num_ranks, "cpu")
        try:
            worker = TrainWorker(info, scenario.config, total_steps=6, head=scenario.head, meeting=meeting)
            return scenario.play(worker)
        finally:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    runtime = RayRuntime(RayConfig(kind="ray", num_cpus=16))
    yield runtime
    asyncio.run(runtime.close())


@pytest.fixture(scope="module")
def bench(runtime: RayRuntime) -> Workers[Bench]:
    return asyncio.run(runtime.spawn(Bench, Placement("bench", ("cpu",) * 4)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny(root / "llama", hidden=32),
        "qwen3": make_tiny(root / "qwen3", family="qwen3", hidden=32, tie_embeddings=False),
        "qwen2": make_tiny(root / "qwen2", family="qwen2", hidden=32),
    }


def model_config(folder: Path, strategy: TorchStrategy | Fsdp2Strategy, *, lora: bool = False) -> ModelConfig:
    adapter = LoraConfig(rank=4) if lora else None
    return ModelConfig(model=str(folder), strategy=strategy, optim=OPTIM, lora=adapter, devices="cpu")


def fsdp2(**options: Any) -> Fsdp2Strategy:
    return Fsdp2Strategy(kind="fsdp2", micro_batch_tokens=MICRO_BATCH_TOKENS, logprob_chunk=7, **options)


def played_by_ranks(bench: Workers[Bench], scenario: Scenario, num_ranks: int) -> Outcome:
    """What the ranks say together."""
    meeting = MeetingPoint("127.0.0.1")
    outcomes = asyncio.run(bench.all(Bench.play, scenario, num_ranks=num_ranks, meeting=meeting.address))
    strategy = scenario.config.strategy
    told = [outcome for outcome in outcomes if outcome][:: strategy.tp if isinstance(strategy, Fsdp2Strategy) else 1]
    stats = [sum(parts, Stats()) for parts in zip(*(outcome.stats for outcome in told), strict=True)]
    return replace(told[0], stats=stats, num_held=max(outcome.num_held for outcome in told))


def played_alone(config: ModelConfig, **scenario: Any) -> Outcome:
    plain = config.model_copy(update={"strategy": TorchStrategy(micro_batch_tokens=MICRO_BATCH_TOKENS)})
    worker = TrainWorker(WorkerInfo("policy", 0, 1, "cpu"), plain, total_steps=6, head=scenario.get("head", "language"))
    return Scenario(config=plain, **scenario).play(worker)


def assert_same(ours: Outcome, expected: Outcome) -> None:
    for mine, theirs in zip(ours.stats, expected.stats, strict=True):
        assert without_time(mine) == pytest.approx(without_time(theirs), rel=1e-4, abs=1e-6)
    assert ours.weights.keys() == expected.weights.keys()
    assert ours.num_weights_at_start == len(expected.weights)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=0.01 * STEP)
    torch.testing.assert_close(ours.answer_at_start, expected.answer_at_start, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.answer, expected.answer, rtol=1e-5, atol=2e-5)


def without_time(stats: Stats) -> dict[str, float]:
    return {name: value for name, value in stats.values_by_name().items() if name != "tokens_per_s"}


LAYOUTS: dict[str, tuple[int, str, dict[str, int]]] = {
    "two shards": (2, "llama", {}),
    "two replicas of two shards": (4, "qwen3", {"replicas": 2}),
    "two split layers": (2, "qwen3", {"tp": 2}),
    "two shards of two split layers": (4, "qwen3", {"tp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_together_learn_what_one_process_learns(bench: Workers[Bench], models: dict[str, Path], layout: str) -> None:
    num_ranks, family, options = LAYOUTS[layout]
    config = model_config(models[family], fsdp2(**options))
    ours, expected = played_by_ranks(bench, Scenario(config=config), num_ranks), played_alone(config)
    assert_same(ours, expected)
    # Only embedding and heads are not split by two ranks that split every layer, and norms are tiny.
    assert ours.num_held < (0.75 if layout == "two split layers" else 0.51) * expected.num_held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "family", "options"),
    [
        (3, "qwen2", {}),
        (4, "llama", {"gradient_checkpointing": True, "reshard_after_forward": False}),
        (4, "qwen2", {"tp": 2, "replicas": 2, "gradient_checkpointing": True}),
        (2, "llama", {"tp": 2}),
    ],
)
def test_other_layouts_do_too(
    bench: Workers[Bench], models: dict[str, Path], num_ranks: int, family: str, options: dict[str, Any]
) -> None:
    config = model_config(models[family], fsdp2(**options))
    assert_same(played_by_ranks(bench, Scenario(config=config), num_ranks), played_alone(config))


def test_an_adapter_is_trained_alike_by_split_and_sharded_layers(bench: Workers[Bench], models: dict[str, Path]) -> None:
    config = model_config(models["llama"], fsdp2(tp=2), lora=True)
    ours, expected = played_by_ranks(bench, Scenario(config=config), 4), played_alone(config)
    assert all("lora" in name for name in ours.weights)
    assert_same(ours, expected)


def test_a_critic_is_trained_alike_by_two_ranks(bench: Workers[Bench], models: dict[str, Path]) -> None:
    config, scenario = model_config(models["llama"], fsdp2()), {"head": "score", "loss": ValueLoss()}
    assert_same(played_by_ranks(bench, Scenario(config=config, **scenario), 2), played_alone(config, **scenario))


def test_a_checkpoint_of_four_ranks_goes_on_with_two_and_opens_with_plain_transformers(
    bench: Workers[Bench], models: dict[str, Path], tmp_path: Path
) -> None:
    four, two = (model_config(models["qwen3"], fsdp2(tp=tp)) for tp in (2, 1))
    saved = played_by_ranks(bench, Scenario(config=four, steps=range(2), save=tmp_path), 4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(plain[name], weight) for name, weight in saved.weights.items())
    resumed = played_by_ranks(bench, Scenario(config=two, steps=range(2, 3), load=tmp_path), 2)
    whole = played_alone(two)
    assert_same(resumed, replace(whole, stats=whole.stats[2:], answer_at_start=resumed.answer_at_start))


@dataclass(frozen=True)
class OneRankFails:
    """A loss that works on all ranks but the second."""

    how: str
    needs: Needs = field(default_factory=Needs)
    compares_with_old_policy: bool = False

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        if dist.get_rank() == 1 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the second rank cannot go on")
        return GRPO(batch, model)


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_failed_rank_ends_the_cluster_with_its_error_within_half_a_minute(
    runtime: RayRuntime, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(cluster_module, "GRACE_S", 3.0)
    config = model_config(models["llama"], fsdp2(num_ranks=2))

    async def run() -> float:
        policy = await spawn_model(runtime, config, role=f"policy-{how}", total_steps=6)
        one_row = batch(0).select([1])
        assert known((await policy.predict(one_row, Needs())).logp)[one_row.loss_mask].lt(0).all()  # Fewer rows than ranks.
        stats = (await policy.train(batch(0), GRPO, mini_batches=2)).values_by_name()
        assert stats["train/loss"] == pytest.approx(played_alone(config, steps=range(1)).stats[0]["loss"].value, abs=1e-6)
        started_s = time.perf_counter()
        error, says = (WorkerDied, "--resume") if how == "killed" else (WorkerError, r"(?s)policy-raises\[1\].*second rank")
        with pytest.raises(error, match=says):
            await policy.train(batch(0), OneRankFails(how))
        seconds = time.perf_counter() - started_s
        await policy.close()
        return seconds

    assert asyncio.run(run()) < 30


@pytest.mark.slow
def test_a_whole_run_with_two_ranks_has_the_curve_of_the_local_run(runtime: RayRuntime, rlvr_tree: dict[str, Any]) -> None:
    def curve(name: str, kind: str, strategy: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
        rlvr_tree["run"]["name"], rlvr_tree["runtime"] = name, {"kind": kind}
        rlvr_tree["policy"]["strategy"] = strategy
        folder = Path(rlvr_tree["run"]["runs_dir"]).parent
        outcome = train(parse_config(rlvr_tree, folder=folder), code_folder=folder)
        rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
        weights = AutoModelForCausalLM.from_pretrained(outcome.checkpoint).state_dict()
        return [row["reward/mean"] for row in rows if "reward/mean" in row], weights

    (local, expected), (ranks, weights) = (
        curve("local", "local", {"kind": "torch"}),
        curve("ranks", "ray", {"kind": "fsdp2", "num_ranks": 2}),
    )
    assert ranks == pytest.approx(local, abs=1e-6)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-4)
