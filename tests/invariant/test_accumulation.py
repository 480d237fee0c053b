"""However a batch is cut into micro-batches, its gradient is the same: 1 x 8 = 8 x 1."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from reroll.config.losses import Aggregation
from reroll.config.parts import OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import balance, micro_batches, order_of
from reroll.training.base import Needs, Weighting, required
from reroll.training.loss import PolicyLoss
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Sample
from reroll_zoo.tiny_models import make_tiny

LENGTHS = (5, 21, 9, 13, 30, 4, 17, 8)


@pytest.fixture(scope="module")
def strategy(tmp_path_factory: pytest.TempPathFactory) -> TorchStrategy:
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    return strategy_of(folder)


def strategy_of(folder: Path) -> TorchStrategy:
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    return TorchStrategy(
        model, load_tokenizer(str(folder)), TorchStrategyConfig(logprob_chunk=6), OptimConfig(), total_steps=10
    )


@pytest.fixture(scope="module")
def batch(strategy: TorchStrategy) -> Batch:
    """Ragged rows with gaps in their masks, old and reference log-probs, and ratios on both sides of the clip."""
    rng = np.random.default_rng(0)
    samples, advantages = [], []
    for length in LENGTHS:
        mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
        mask[-1] = True
        advantages.append(np.where(mask, rng.normal(), 0).astype(np.float32))
        ids = rng.integers(4, 90, size=length)
        logp = np.zeros(length, dtype=np.float32)
        samples.append(Sample(ids=ids, loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
    packed = pack(samples).replace(advantage=torch.from_numpy(np.concatenate(advantages)))
    noise = torch.randn(2, packed.num_tokens, generator=torch.Generator().manual_seed(0)) * 0.3
    logp = required(strategy.forward(packed, Needs()).logp)
    return packed.replace(old_logp=logp + noise[0], ref_logp=logp + noise[1])


def loss_of(aggregation: Aggregation) -> PolicyLoss:
    options = {"clip_low": 0.2, "clip_high": 0.2}
    return PolicyLoss(kind="ppo", options=options, aggregation=aggregation, length=40, kl_coef=0.1, kl_estimator="k3")


def gradient(strategy: TorchStrategy, parts: list[Batch], loss: PolicyLoss) -> tuple[dict[str, Tensor], float]:
    strategy._optimizer.zero_grad()
    total = sum(strategy.forward_backward(part, loss)["loss"].value for part in parts)
    return {
        name: parameter.grad.clone() for name, parameter in strategy._parameters.items() if parameter.grad is not None
    }, total


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("max_tokens", [1, 25, 60])
def test_micro_batches_of_any_size_give_the_gradient_of_the_whole(
    strategy: TorchStrategy, batch: Batch, aggregation: Aggregation, max_tokens: int
) -> None:
    loss = loss_of(aggregation)
    expected, expected_loss = gradient(strategy, [batch], loss)
    parts = micro_batches(batch, max_tokens=max_tokens)
    assert len(parts) > 1
    ours, total = gradient(strategy, parts, loss)
    assert total == pytest.approx(expected_loss, abs=1e-6)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-5)
    assert max(value.abs().max() for value in expected.values()) > 1e-3


def split(batch: Batch, num_ranks: int) -> list[Batch]:
    """The rows of each data-parallel rank, as `train_jobs` deals them out."""
    return [batch.select_units(part) for part in balance(order_of(batch), num_parts=num_ranks)]


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_the_shares_of_ranks_add_up_to_the_gradient_of_the_whole(
    strategy: TorchStrategy, batch: Batch, aggregation: Aggregation
) -> None:
    loss = loss_of(aggregation)
    expected, _ = gradient(strategy, [batch], loss)
    ours, _ = gradient(strategy, split(batch, 3), loss)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-5)


REJECTIONS = (
    {"distance": "k1", "level": "sequence", "take": "mean", "high": 0.02, "only_negative": True},
    {"distance": "k3", "level": "turn", "take": "max", "high": 0.2, "only_negative": False},
)


@pytest.mark.parametrize("kind", ["gspo", "gspo_token"])
def test_ratios_weights_and_rejections_of_turns_and_sequences_do_not_depend_on_the_cut(
    strategy: TorchStrategy, batch: Batch, kind: str
) -> None:
    turn = torch.where(batch.loss_mask, batch.positions // 4, -1)
    sampler = required(batch.old_logp) + torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1)) * 0.2
    batch = batch.replace(turn=turn, logp=torch.where(batch.loss_mask, sampler, 0.0))
    loss = PolicyLoss(
        kind=kind,
        options={"clip_low": 0.1, "clip_high": 0.1, "level": "turn"},
        aggregation="sequence_mean",
        kl_coef=0.1,
        kl_times_ratio=True,
        corrections=(
            Weighting(kind="importance", options={"level": "geometric_turn", "mode": "mask", "low": 0.8, "high": 1.2}),
        ),
        rejections=tuple(Weighting(kind="distance", options=options) for options in REJECTIONS),
    )
    expected, expected_loss = gradient(strategy, [batch], loss)
    for parts in (micro_batches(batch, max_tokens=1), split(batch, 3)):
        ours, total = gradient(strategy, parts, loss)
        assert total == pytest.approx(expected_loss, abs=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-5)
    told = strategy.forward_backward(batch, loss)
    for name in ("rejection_sequence_mean_k1_rejected", "rejection_turn_max_k3_rejected"):
        assert 0 < told[name].value < 1


def test_packed_logprobs_are_those_of_each_sequence_alone(strategy: TorchStrategy, batch: Batch) -> None:
    alone = torch.cat([required(strategy.forward(batch.select([index]), Needs()).logp) for index in range(len(batch))])
    torch.testing.assert_close(strategy.forward(batch, Needs()).logp, alone, atol=1e-6, rtol=1e-5)


def test_recounting_each_micro_batch_would_be_wrong(strategy: TorchStrategy, batch: Batch) -> None:
    """Guards the tests above: with local denominators the same cut gives another gradient."""
    loss = loss_of("token_mean")
    expected, _ = gradient(strategy, [batch], loss)
    wrong, _ = gradient(strategy, [part.recount() for part in micro_batches(batch, max_tokens=25)], loss)
    assert any(not torch.allclose(wrong[name], value, atol=1e-4) for name, value in expected.items())
