"""However many ranks share the experts of a model, it learns what one process learns: fp32, real processes, gloo.

Sums in another order show in the seventh digit of losses and norms: these are held to a relative 1e-4. Adam divides by the
size of a gradient; its eps is a thousand times what rounding leaves of a gradient that is nearly zero, so weights are held
to a hundredth of one step. A router could turn such a digit into another choice of experts, and then nothing would agree:
the routers here decide by far wider margins.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from warm import FORKS

from reroll.config.parts import LoraConfig, ModelConfig, OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.models.load import load_model, load_tokenizer, save_model
from reroll.observe.metrics import Stats
from reroll.runtime.base import WorkerInfo
from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import micro_batches
from reroll.training.base import Needs, Strategy, ZeroLoss, required
from reroll.training.cluster import Rendezvous
from reroll.training.loss import PolicyLoss
from reroll.training.make import make_strategy
from reroll.types import Sample
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.tiny_models import make_tiny

STEP = 1e-3
OPTIM = OptimConfig(lr=STEP, clip_norm=0.5, weight_decay=0.1, eps=1e-6)
GRPO = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2}, kl_coef=0.05)
MICRO_BATCH_TOKENS = 30
NUM_EXPERTS = 8


def batch(seed: int) -> Batch:
    """Three prompts with siblings, of lengths that give ranks unequal numbers of micro-batches."""
    rng = np.random.default_rng(seed)
    samples, advantages = [], []
    for lengths in [(60, 9, 14), (8, 11, 7), (33, 10)]:
        prompt = rng.integers(4, 90, size=4)
        rewards = rng.normal(size=len(lengths)).astype(np.float32)
        for length, reward in zip(lengths, rewards - rewards.mean(), strict=True):
            mask = np.arange(length) >= 4
            ids = np.concatenate([prompt, rng.integers(4, 90, size=length - 4)])
            logp = np.where(mask, rng.normal(-4.5, 0.1, size=length), 0).astype(np.float32)
            samples.append(Sample(ids=ids, loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
            advantages.append(np.where(mask, reward, 0).astype(np.float32))
    packed = pack(samples).replace(advantage=torch.from_numpy(np.concatenate(advantages)))
    noise = torch.from_numpy(rng.normal(0, 0.1, size=packed.num_tokens).astype(np.float32)) * packed.loss_mask
    return packed.replace(ref_logp=packed.logp + noise)


def routed(rows: Batch, num_layers: int) -> Batch:
    """With experts that each token is to take: the same ones for tokens that rows begin with alike."""
    hashed = (rows.ids * 7919 + rows.positions * 104729)[:, None] + torch.arange(num_layers)
    first = hashed % NUM_EXPERTS
    second = (first + 1 + hashed // NUM_EXPERTS % (NUM_EXPERTS - 1)) % NUM_EXPERTS
    return rows.replace(routes=torch.stack([first, second], -1).to(torch.uint8))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a model is put through: steps of GRPO, the micro-batches dealt out over the ranks."""

    config: ModelConfig
    steps: range = range(3)
    num_routed_layers: int = 0
    """Where there are any, experts are replayed."""
    load: Path | None = None
    save: Path | None = None

    def play(self, info: WorkerInfo, rendezvous: str | None = None) -> Outcome:
        strategy = make_strategy(info, self.config, total_steps=3, rendezvous=rendezvous)
        if self.load:
            strategy.load(self.load)
        stats = [self._step(strategy, GRPO.prepare(self._batch(step))) for step in self.steps]
        if self.save:
            strategy.save(self.save)
        answer = required(strategy.forward(self._batch(9), Needs()).logp)
        weights = {name: weight.clone() for name, weight in strategy.weights().items()}
        groups = strategy._optimizer.param_groups  # type: ignore[attr-defined]
        return Outcome(stats, weights, answer, sum(part.numel() for group in groups for part in group["params"]))

    def _batch(self, seed: int) -> Batch:
        return routed(batch(seed), self.num_routed_layers) if self.num_routed_layers else batch(seed)

    def _step(self, strategy: Strategy, rows: Batch) -> Stats:
        rank, size = strategy.data_parallel.rank, strategy.data_parallel.size
        parts = micro_batches(rows, max_tokens=MICRO_BATCH_TOKENS)
        stats = Stats()
        for part in parts[rank::size]:
            stats += strategy.forward_backward(part, GRPO)
        if len(parts[rank::size]) < len(parts[::size]):
            strategy.forward_backward(parts[0], ZeroLoss(needs=GRPO.needs))
        return stats + strategy.optim_step()


@dataclass(frozen=True)
class Outcome:
    stats: list[Stats]
    weights: dict[str, Tensor]
    answer: Tensor
    num_held: int
    """Numbers in this process that the optimizer works on."""


def play_as_rank(scenario: Scenario, rank: int, num_ranks: int, rendezvous: str) -> Outcome:
    try:
        return scenario.play(WorkerInfo("policy", rank, num_ranks, "cpu"), rendezvous)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe(tmp_path_factory.mktemp("models") / "moe")


def tiny_moe(folder: Path, **config: Any) -> Path:
    sizes = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.2}
    return make_tiny(folder, family="qwen3_moe", hidden=32, tie_embeddings=False, **sizes | config)


def model_config(folder: Path, *, lora: bool = False, **options: Any) -> ModelConfig:
    strategy = Fsdp2StrategyConfig(kind="fsdp2", micro_batch_tokens=MICRO_BATCH_TOKENS, **options)
    adapter = LoraConfig(rank=4) if lora else None
    return ModelConfig(model=str(folder), strategy=strategy, optim=OPTIM, lora=adapter, devices="cpu")


def played_by(num_ranks: int, scenario: Scenario) -> Outcome:
    """What the ranks say together."""
    rendezvous = Rendezvous("127.0.0.1")
    with ProcessPoolExecutor(num_ranks, mp_context=FORKS) as pool:
        calls = [pool.submit(play_as_rank, scenario, rank, num_ranks, rendezvous.address) for rank in range(num_ranks)]
        outcomes = [call.result() for call in calls]
    told = outcomes[:: scenario.config.strategy.ranks_per_share]
    stats = [sum(parts, Stats()) for parts in zip(*(outcome.stats for outcome in told), strict=True)]
    return replace(outcomes[0], stats=stats, num_held=max(outcome.num_held for outcome in outcomes))


def played_alone(config: ModelConfig, **scenario: Any) -> Outcome:
    plain = config.model_copy(update={"strategy": TorchStrategyConfig(micro_batch_tokens=MICRO_BATCH_TOKENS)})
    return Scenario(config=plain, **scenario).play(WorkerInfo("policy", 0, 1, "cpu"))


def assert_same(ours: Outcome, expected: Outcome) -> None:
    for mine, theirs in zip(ours.stats, expected.stats, strict=True):
        assert mine.values_by_name() == pytest.approx(theirs.values_by_name(), rel=1e-4, abs=1e-6)
    assert ours.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=0.01 * STEP)
    torch.testing.assert_close(ours.answer, expected.answer, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_that_share_experts_learn_what_one_process_learns(model: Path, num_ranks: int, ep: int) -> None:
    config = model_config(model, ep=ep)
    ours, expected = played_by(num_ranks, Scenario(config=config)), played_alone(config)
    assert_same(ours, expected)
    assert ours.num_held < 1.01 / num_ranks * expected.num_held


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"ep": 2, "replicas": 2, "gradient_checkpointing": True}, id="two replicas"),
        pytest.param({"ep": 2, "sp": 2}, id="shared sequences", marks=pytest.mark.slow),
        pytest.param({"ep": 4, "gradient_checkpointing": True}, id="two experts each", marks=pytest.mark.slow),
        pytest.param({"ep": 2, "reshard_after_forward": False}, id="layers stay gathered", marks=pytest.mark.slow),
    ],
)
def test_other_layouts_do_too(tmp_path: Path, options: dict[str, Any]) -> None:
    config = model_config(tiny_moe(tmp_path, layers=3, mlp_only_layers=[1]), **options)  # One layer has no experts.
    assert_same(played_by(4, Scenario(config=config)), played_alone(config))


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        pytest.param(2, {"ep": 2, "gradient_checkpointing": True}, id="shared experts"),
        pytest.param(2, {"sp": 2}, id="shared sequences"),
        pytest.param(4, {"ep": 2, "sp": 2}, id="both", marks=pytest.mark.slow),
    ],
)
def test_experts_are_replayed_over_ranks(model: Path, num_ranks: int, options: dict[str, Any]) -> None:
    config = model_config(model, **options)
    expected = played_alone(config, num_routed_layers=2)
    assert expected.stats[0].values_by_name()["routes_differ"] > 0.5
    assert_same(played_by(num_ranks, Scenario(config=config, num_routed_layers=2)), expected)


def test_an_adapter_on_attention_is_trained_over_shared_experts(model: Path) -> None:
    config = model_config(model, lora=True, ep=2)
    ours, expected = played_by(2, Scenario(config=config)), played_alone(config)
    assert all(".self_attn." in name for name in ours.weights)
    assert_same(ours, expected)


def test_a_rank_whose_experts_nobody_chooses_takes_part(tmp_path: Path) -> None:
    config = model_config(with_idle_experts(tiny_moe(tmp_path / "model"), tmp_path / "idle"), ep=2)
    before = load_model(config.model, dtype=torch.float32, device="cpu").state_dict()
    ours, expected = played_by(2, Scenario(config=config)), played_alone(config)
    assert_same(ours, expected)
    decay = (1 - OPTIM.lr * OPTIM.weight_decay) ** 3
    for name, weight in ours.weights.items():
        if ".experts." in name:
            of_second_rank = slice(NUM_EXPERTS // 2, None)
            torch.testing.assert_close(weight[of_second_rank], before[name][of_second_rank] * decay)
            assert not torch.allclose(weight, before[name] * decay, rtol=0, atol=0.1 * STEP)


def with_idle_experts(source: Path, folder: Path) -> Path:
    """A copy whose routers choose among the first experts only: of the rows w, 2w, -w, -2w, 0, … two always come first."""
    model = load_model(str(source), dtype=torch.float32, device="cpu")
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            row = 5 * parameter.data[0]
            parameter.data = torch.stack([row, 2 * row, -row, -2 * row] + [0 * row] * (NUM_EXPERTS - 4))
    save_model(model, load_tokenizer(str(source)), folder)
    return folder


def test_a_checkpoint_goes_on_without_expert_parallelism_and_opens_with_plain_transformers(model: Path, tmp_path: Path) -> None:
    shared, plain = (model_config(model, ep=ep) for ep in (2, 1))
    saved = played_by(4, Scenario(config=shared, steps=range(2), save=tmp_path))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(opened[name], weight) for name, weight in saved.weights.items())
    resumed = played_by(2, Scenario(config=plain, steps=range(2, 3), load=tmp_path))
    whole = played_alone(plain)
    assert_same(resumed, replace(whole, stats=whole.stats[2:]))
