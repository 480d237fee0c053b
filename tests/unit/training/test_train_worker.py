from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reroll.config.parts import OptimConfig, PolicyConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.models.load import load_tokenizer
from reroll.observe.metrics import Stats
from reroll.runtime.base import Placement, WorkerInfo
from reroll.runtime.local import LocalRuntime
from reroll.tokens.batch import Batch, pack
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.training.base import Needs, required
from reroll.training.cluster import PredictJob, TrainCluster, TrainWorker, train_jobs
from reroll.training.loss import SFT_LOSS, PolicyLoss
from reroll.types import Sample
from reroll_zoo.tiny_models import make_tiny

PPO = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def config(folder: Path, *, lr: float = 1e-2, micro_batch_tokens: int = 40) -> PolicyConfig:
    strategy = TorchStrategyConfig(micro_batch_tokens=micro_batch_tokens)
    return PolicyConfig(model=str(folder), strategy=strategy, optim=OptimConfig(lr=lr))


def worker(folder: Path, **options: Any) -> TrainWorker:
    info = WorkerInfo(role="policy", rank=0, world_size=1, device="cpu")
    return TrainWorker(info, config(folder, **options), total_steps=10)


def batch(num_sequences: int = 6, *, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    samples, advantages = [], []
    for _ in range(num_sequences):
        length = int(rng.integers(6, 20))
        mask = np.arange(length) >= 3
        advantages.append(np.where(mask, rng.normal(), 0).astype(np.float32))
        logp = np.where(mask, -4.0, 0.0).astype(np.float32)
        samples.append(Sample(ids=rng.integers(4, 90, size=length), loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
    return pack(samples).replace(advantage=torch.from_numpy(np.concatenate(advantages)))


def logprobs(worker: TrainWorker, packed: Batch) -> torch.Tensor:
    return required(worker.predict(PredictJob(packed, Needs())).logp)


def update(worker: TrainWorker, packed: Batch, loss: PolicyLoss = PPO, **options: Any) -> Stats:
    """One update by a worker that is alone."""
    [job] = train_jobs(packed, loss, **options)
    return worker.train(job)


@asynccontextmanager
async def policy_of(folder: Path) -> AsyncIterator[tuple[TrainCluster, TrainWorker]]:
    """A cluster of one, and its worker."""
    made: list[TrainWorker] = []

    def make(*args: Any, **kwargs: Any) -> TrainWorker:
        made.append(TrainWorker(*args, **kwargs))
        return made[0]

    async with LocalRuntime() as runtime:
        workers = await runtime.spawn(make, Placement("policy", ("cpu",)), config(folder), total_steps=10)
        yield TrainCluster(workers), made[0]


class Calls:
    """Counts the calls of the strategy's verbs, which go on working."""

    def __init__(self, worker: TrainWorker) -> None:
        self.counts = {"forward": 0, "forward_backward": 0, "optim_step": 0}
        for verb in self.counts:
            setattr(worker._strategy, verb, self._counted(verb, getattr(worker._strategy, verb)))

    def _counted(self, verb: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.counts[verb] += 1
            return method(*args)

        return call


def test_logprobs_come_back_in_the_batchs_order_whatever_the_micro_batches(folder: Path) -> None:
    packed = batch()
    cut, whole = (logprobs(worker(folder, micro_batch_tokens=tokens), packed) for tokens in (1, 10_000))
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)
    assert whole[packed.loss_mask].abs().min() > 0


def test_one_step_per_batch_needs_no_extra_forward_pass(folder: Path) -> None:
    policy = worker(folder)
    calls = Calls(policy)
    stats = update(policy, batch())
    assert calls.counts["forward"] == 0
    assert calls.counts["optim_step"] == 1
    assert calls.counts["forward_backward"] > 1
    assert stats["ratio"].value == 1.0


async def test_several_steps_measure_the_ratio_against_the_policy_before_the_first(folder: Path) -> None:
    async with policy_of(folder) as (policy, its_worker):
        calls = Calls(its_worker)
        stats = await policy.train(batch(), PPO, epochs=2, mini_batches=3)
    assert calls.counts["optim_step"] == 6
    assert calls.counts["forward"] > 0
    assert stats["train/ratio_max"].value > 1.001


async def test_old_logprobs_that_the_batch_brings_are_used(folder: Path) -> None:
    packed = batch()
    async with policy_of(folder) as (policy, its_worker):
        brought = packed.replace(old_logp=await policy.logprobs(packed) - 0.1 * packed.loss_mask)
        calls = Calls(its_worker)
        stats = await policy.train(brought, PPO, epochs=2)
    assert calls.counts["forward"] == 0
    assert stats["train/ratio"].value > 1.0


def test_the_reported_loss_is_the_mean_over_optimizer_steps(folder: Path) -> None:
    packed = batch()
    frozen = worker(folder, lr=1e-30)
    once = update(frozen, packed, SFT_LOSS)["loss"].value
    thrice = update(frozen, packed, SFT_LOSS, epochs=3)["loss"].value
    assert thrice == pytest.approx(once, rel=1e-5)


def test_the_same_job_gives_the_same_weights_and_another_seed_others(folder: Path) -> None:
    def trained(seed: int) -> torch.Tensor:
        policy = worker(folder)
        update(policy, batch(), steps_per_epoch=3, seed=seed)
        return torch.cat([weight.flatten() for weight in policy.weights().values()])

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


async def test_stats_tell_the_whole_story_of_an_update(folder: Path) -> None:
    packed = batch()
    async with policy_of(folder) as (policy, _):
        stats = await policy.train(packed, PPO, epochs=2)
    values = {name.rpartition("/")[2]: value for name, value in stats.values_by_name().items()}
    assert values.keys() == {
        "train_s", "loss", "grad_norm", "grad_norm_max", "lr", "clip_fraction", "ratio", "ratio_max", "kl_old", "sampler_gap",
        "sampler_gap_max", "entropy", "tokens", "loss_tokens", "tokens_per_s", "padding_avoided",
    }  # fmt: skip
    assert values["tokens"] == 2 * packed.num_tokens
    assert values["loss_tokens"] == 2 * packed.num_loss_tokens
    assert values["tokens_per_s"] > 0
    assert values["padding_avoided"] == pytest.approx(1 - packed.num_tokens / (len(packed) * max(packed.lengths)))
    assert all(np.isfinite(value) for value in values.values())


def test_a_few_sft_steps_teach_an_answer(folder: Path) -> None:
    renderer = Renderer(load_tokenizer(str(folder)))
    rows = [
        sft_sample(*renderer.training_row([{"role": "user", "content": question}, {"role": "assistant", "content": answer}]))
        for question, answer in (("one", "1"), ("two", "2"), ("three", "3"))
    ]
    policy, packed = worker(folder), pack(rows)
    losses = [update(policy, packed, SFT_LOSS)["loss"].value for _ in range(40)]
    assert losses[-1] < 0.1 < losses[0]


async def test_the_cluster_shares_out_logprobs_and_trains_like_its_worker(folder: Path, tmp_path: Path) -> None:
    packed = batch()
    alone = worker(folder)
    async with LocalRuntime() as runtime:
        options = {"total_steps": 10}
        pair = TrainCluster(
            await runtime.spawn(TrainWorker, Placement(role="reference", devices=("cpu", "cpu")), config(folder), **options)
        )
        torch.testing.assert_close(await pair.logprobs(packed), logprobs(alone, packed), atol=1e-6, rtol=1e-5)

        policy = TrainCluster(
            await runtime.spawn(TrainWorker, Placement(role="policy", devices=("cpu",)), config(folder), **options)
        )
        stats = await policy.train(packed, PPO, epochs=2, mini_batches=2, seed=3)
        old = packed.replace(old_logp=logprobs(alone, packed))
        expected = without_time(update(alone, old, epochs=2, steps_per_epoch=2, seed=3))
        assert without_time(stats).items() > expected.items()

        await policy.save(tmp_path / "checkpoint")
        await pair.load(tmp_path / "checkpoint")
        assert torch.equal(await policy.logprobs(packed), logprobs(alone, packed))
        torch.testing.assert_close(await pair.logprobs(packed), logprobs(alone, packed), atol=1e-6, rtol=1e-5)
        assert (await policy.weights()).keys() == alone.weights().keys()
        await policy.close()


def without_time(stats: Stats) -> dict[str, float]:
    """By the last part of the name: the cluster says where its metrics come from, the worker does not."""
    plain = {name.rpartition("/")[2]: value for name, value in stats.values_by_name().items()}
    return {name: value for name, value in plain.items() if name not in ("tokens_per_s", "train_s")}


def test_a_model_for_zero_steps_answers_and_holds_nothing_but_its_weights(folder: Path) -> None:
    config = PolicyConfig(model=str(folder), devices="cpu", strategy=TorchStrategyConfig(precision="bf16"))
    info = WorkerInfo(role="policy", rank=0, world_size=1, device="cpu")
    fixed, trained = (TrainWorker(info, config, total_steps=steps) for steps in (0, 1))
    assert torch.equal(logprobs(fixed, batch()), logprobs(trained, batch()))
    assert not fixed._strategy._masters
    assert trained._strategy._masters
