"""Preference losses on packed batches: what they sum over, how micro-batches add up, and what they report."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from reroll.models.load import Head, load_model
from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import micro_batches
from reroll.tokens.samples import sft_sample
from reroll.training.base import Loss, Predictions
from reroll.training.predict import predict
from reroll_zoo.offline.preference_losses import KtoLoss, PreferenceLoss, RankingLoss

LENGTHS = (5, 21, 9, 13, 30, 4, 17, 8, 11, 6, 7, 15, 12, 12, 19, 10)
"""Eight pairs, or sixteen answers."""

DPO = PreferenceLoss(kind="sigmoid", options={"beta": 0.5, "label_smoothing": 0.1})
KTO = KtoLoss(beta=0.3, desirable_weight=1.2, undesirable_weight=0.8, reference_point=0.4)
LOSSES: dict[str, Loss] = {
    "sigmoid": DPO,
    "sigmoid-per-token": replace(DPO, length_normalised=True),
    "ipo": PreferenceLoss(kind="ipo", options={"beta": 0.5}, length_normalised=True),
    "hinge": PreferenceLoss(kind="hinge", options={"beta": 0.5}),
    "simpo": PreferenceLoss(kind="simpo", options={"beta": 2.0, "gamma": 1.0}, uses_reference=False, length_normalised=True),
    "orpo": PreferenceLoss(
        kind="orpo", options={"beta": 0.7}, uses_reference=False, length_normalised=True, uses_odds=True, sft_coef=1.0
    ),
    "sigmoid-with-sft": replace(DPO, sft_coef=0.3),
    "ipo-with-sft": PreferenceLoss(kind="ipo", options={"beta": 0.5}, length_normalised=True, sft_coef=2.0),
    "kto": KTO,
    "ranking": RankingLoss(),
}


def paired_batch(*, seed: int = 0) -> Batch:
    """Ragged pairs with gaps in their masks, reference log-probs and margins."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in LENGTHS:
        mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
        mask[-1] = True
        samples.append(sft_sample(rng.integers(4, 90, size=length).tolist(), mask.tolist()))
    batch = pack(samples)
    ref_logp = torch.where(batch.loss_mask, -torch.from_numpy(rng.exponential(1.0, batch.num_tokens)), 0.0)
    label = torch.from_numpy(rng.random(len(LENGTHS) // 2)).repeat_interleave(2).float()
    return batch.replace(unit_size=2, ref_logp=ref_logp.float(), label=label)


def judged_batch(*, seed: int = 0) -> Batch:
    return paired_batch(seed=seed).replace(unit_size=1, label=torch.tensor([1.0, -1.0, -1.0, 1.0] * (len(LENGTHS) // 4)))


def batch_for(loss: Loss) -> Batch:
    return judged_batch() if isinstance(loss, KtoLoss) else paired_batch()


def predictions(batch: Batch, *, seed: int = 1) -> Predictions:
    rng = np.random.default_rng(seed)
    logp = torch.where(batch.loss_mask, -torch.from_numpy(rng.exponential(1.0, batch.num_tokens)), 0.0)
    return Predictions(logp=logp.requires_grad_(), score=torch.from_numpy(rng.normal(size=len(batch))).requires_grad_())


def answer_sums(values: Tensor, batch: Batch) -> list[float]:
    """The sum over the tokens in the loss, sequence by sequence, token by token."""
    sums = []
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        sums.append(sum(float(values[place].detach()) for place in range(start, end) if batch.loss_mask[place]))
    return sums


def log_sigma(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def test_dpo_is_the_mean_over_pairs_of_the_papers_loss_on_sequence_sums() -> None:
    batch = paired_batch()
    model = predictions(batch)
    assert model.logp is not None
    assert batch.ref_logp is not None
    policy, reference = answer_sums(model.logp, batch), answer_sums(batch.ref_logp, batch)
    ratios = [one - other for one, other in zip(policy, reference, strict=True)]
    total = 0.0
    for chosen, rejected in zip(ratios[0::2], ratios[1::2], strict=True):
        total -= 0.9 * log_sigma(0.5 * (chosen - rejected)) + 0.1 * log_sigma(-0.5 * (chosen - rejected))
    output = DPO(batch, model)
    assert output.loss.item() == pytest.approx(total / 8, rel=1e-6)
    stats = output.stats.values_by_name()
    assert stats["chosen_reward"] == pytest.approx(0.5 * np.mean(ratios[0::2]))
    assert stats["rejected_reward"] == pytest.approx(0.5 * np.mean(ratios[1::2]))
    assert stats["margin"] == pytest.approx(stats["chosen_reward"] - stats["rejected_reward"])
    assert stats["accuracy"] == np.mean(np.array(ratios[0::2]) > np.array(ratios[1::2]))
    assert stats["chosen_logp"] == pytest.approx(np.mean(policy[0::2]))
    assert stats["rejected_logp"] == pytest.approx(np.mean(policy[1::2]))
    assert stats["loss"] == output.loss.item()


def test_simpo_looks_at_mean_log_probs_and_at_no_reference() -> None:
    batch = paired_batch()
    model = predictions(batch)
    assert model.logp is not None
    counts = answer_sums(torch.ones(batch.num_tokens), batch)
    means = [total / count for total, count in zip(answer_sums(model.logp, batch), counts, strict=True)]
    by_hand = [-log_sigma(2.0 * (c - r) - 1.0) for c, r in zip(means[0::2], means[1::2], strict=True)]
    assert LOSSES["simpo"](batch.replace(ref_logp=None), model).loss.item() == pytest.approx(np.mean(by_hand), rel=1e-6)


def test_ipo_normalises_the_log_probs_of_policy_and_reference_by_the_answers_length() -> None:
    batch = paired_batch()
    model = predictions(batch)
    assert model.logp is not None
    assert batch.ref_logp is not None
    counts = answer_sums(torch.ones(batch.num_tokens), batch)
    means = [total / count for total, count in zip(answer_sums(model.logp - batch.ref_logp, batch), counts, strict=True)]
    by_hand = [(c - r - 1 / (2 * 0.5)) ** 2 for c, r in zip(means[0::2], means[1::2], strict=True)]
    assert LOSSES["ipo"](batch, model).loss.item() == pytest.approx(np.mean(by_hand), rel=1e-6)


def answer_means(values: Tensor, batch: Batch) -> list[Tensor]:
    """The mean over the tokens in the loss, sequence by sequence, in the graph."""
    bounds = pairwise(batch.cu_seqlens.tolist())
    return [torch.stack([values[t] for t in range(start, end) if batch.loss_mask[t]]).mean() for start, end in bounds]


def orpo_by_hand(logp: Tensor, batch: Batch, beta: float) -> Tensor:
    """arXiv 2403.07691, equations 3 to 7, pair by pair, on probabilities."""
    probabilities = [mean.exp() for mean in answer_means(logp, batch)]
    total = torch.zeros((), dtype=torch.float64)
    for p, q in zip(probabilities[0::2], probabilities[1::2], strict=True):
        odds_ratio = (p / (1 - p)) / (q / (1 - q))
        total = total - p.log() - beta * (1 / (1 + 1 / odds_ratio)).log()
    return total / (len(probabilities) // 2)


def rpo_by_hand(logp: Tensor, batch: Batch, coef: float) -> Tensor:
    """The loss of conservative DPO on sums, and arXiv 2404.19733's term on means, pair by pair."""
    assert batch.ref_logp is not None
    counts = answer_sums(torch.ones(batch.num_tokens), batch)
    means = answer_means(logp, batch)
    ratios = [count * mean for count, mean in zip(counts, answer_means(logp - batch.ref_logp, batch), strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for pair in range(len(batch) // 2):
        likely = 1 / (1 + torch.exp(-0.5 * (ratios[2 * pair] - ratios[2 * pair + 1])))
        total = total - 0.9 * likely.log() - 0.1 * (1 - likely).log() - coef * means[2 * pair]
    return total / (len(batch) // 2)


@pytest.mark.parametrize("name", ["orpo", "sigmoid-with-sft"])
def test_a_loss_with_an_sft_term_and_its_gradient_are_the_papers_equations(name: str) -> None:
    batch = paired_batch()
    model = predictions(batch)
    assert model.logp is not None
    assert model.logp.dtype == torch.float64
    output = LOSSES[name](batch, model)
    by_hand = orpo_by_hand(model.logp, batch, 0.7) if name == "orpo" else rpo_by_hand(model.logp, batch, 0.3)
    torch.testing.assert_close(output.loss, by_hand, rtol=1e-7, atol=1e-9)
    ours, expected = (torch.autograd.grad(loss, model.logp, retain_graph=True)[0] for loss in (output.loss, by_hand))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)
    assert ours[batch.loss_mask].abs().min() > 0
    stats = output.stats.values_by_name()
    assert stats["sft_loss"] == pytest.approx(-np.mean([mean.item() for mean in answer_means(model.logp, batch)[0::2]]))
    coef = 1.0 if name == "orpo" else 0.3
    assert stats["loss"] == pytest.approx(stats["preference_loss"] + coef * stats["sft_loss"])


def test_orpo_reports_log_odds_as_rewards_and_looks_at_no_reference() -> None:
    batch = paired_batch()
    model = predictions(batch)
    assert model.logp is not None
    p = [mean.exp().item() for mean in answer_means(model.logp, batch)]
    odds = [math.log(value / (1 - value)) for value in p]
    stats = LOSSES["orpo"](batch.replace(ref_logp=None), model).stats.values_by_name()
    assert stats["chosen_reward"] == pytest.approx(0.7 * np.mean(odds[0::2]))
    assert stats["rejected_reward"] == pytest.approx(0.7 * np.mean(odds[1::2]))
    assert stats["accuracy"] == np.mean(np.array(p[0::2]) > np.array(p[1::2]))


def test_the_sft_term_is_the_same_beside_every_loss_and_pulls_at_chosen_answers_alone() -> None:
    batch = paired_batch()
    model = predictions(batch)
    assert model.logp is not None
    chosen = (batch.sequence_index % 2 == 0) & batch.loss_mask
    counts = torch.tensor(answer_sums(torch.ones(batch.num_tokens), batch))[batch.sequence_index]
    expected = torch.where(chosen, -0.4 / (8 * counts), 0.0).double()
    pairwise_losses = [loss for loss in LOSSES.values() if isinstance(loss, PreferenceLoss)]
    assert len(pairwise_losses) == 8
    for loss in pairwise_losses:
        with_more = replace(loss, sft_coef=loss.sft_coef + 0.4)
        more, less = (torch.autograd.grad(each(batch, model).loss, model.logp)[0] for each in (with_more, loss))
        torch.testing.assert_close(more - less, expected)


def test_a_policy_at_its_reference_starts_at_log_two() -> None:
    batch = paired_batch()
    at_reference = Predictions(logp=batch.ref_logp)
    assert DPO(batch, at_reference).loss.item() == pytest.approx(math.log(2))
    assert DPO(batch, at_reference).stats["margin"].value == 0


def test_a_loss_with_a_reference_refuses_a_batch_without_one() -> None:
    with pytest.raises(ValueError, match="lacks what this loss needs"):
        DPO(paired_batch().replace(ref_logp=None), predictions(paired_batch()))


def test_kto_judges_each_answer_against_the_reference_point() -> None:
    batch = judged_batch()
    model = predictions(batch)
    assert model.logp is not None
    assert batch.ref_logp is not None
    assert batch.label is not None
    ratios, good = answer_sums(model.logp - batch.ref_logp, batch), (batch.label > 0).tolist()
    total, num_right = 0.0, 0
    for ratio, is_good in zip(ratios, good, strict=True):
        above = ratio - 0.4
        total += 1.2 * (1 - math.exp(log_sigma(0.3 * above))) if is_good else 0.8 * (1 - math.exp(log_sigma(-0.3 * above)))
        num_right += (above > 0) == is_good
    output = KTO(batch, model)
    assert output.loss.item() == pytest.approx(total / 16, rel=1e-6)
    stats = output.stats.values_by_name()
    assert stats["accuracy"] == num_right / 16
    assert stats["good_reward"] == pytest.approx(0.3 * np.mean([r for r, g in zip(ratios, good, strict=True) if g]))
    assert stats["bad_reward"] == pytest.approx(0.3 * np.mean([r for r, g in zip(ratios, good, strict=True) if not g]))
    assert stats["reference_point"] == 0.4


def test_ranking_compares_scores_and_asks_for_the_margin() -> None:
    batch = paired_batch()
    model = predictions(batch)
    assert model.score is not None
    assert batch.label is not None
    scores, margins = model.score.tolist(), batch.label.tolist()
    by_hand = [-log_sigma(scores[i] - scores[i + 1] - margins[i]) for i in range(0, 16, 2)]
    output = RankingLoss()(batch, model)
    assert output.loss.item() == pytest.approx(np.mean(by_hand), rel=1e-6)
    assert output.stats["accuracy"].value == np.mean([scores[i] > scores[i + 1] for i in range(0, 16, 2)])


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_travels_and_needs_no_log_probs_from_before_the_update(name: str) -> None:
    loss = LOSSES[name]
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert not loss.compares_with_old_policy
    assert loss.prepare(batch_for(loss)).num_tokens == sum(LENGTHS)


@pytest.fixture(scope="module")
def models(tiny_model: Path) -> dict[Head, PreTrainedModel]:
    heads: tuple[Head, ...] = ("language", "score")
    models = {head: load_model(str(tiny_model), dtype=torch.float32, device="cpu", head=head) for head in heads}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.nn.init.normal_(models["score"].get_parameter("score.weight"))  # At zero the trunk would have no gradient.
    return models


def gradient(model: PreTrainedModel, parts: list[Batch], loss: Loss) -> tuple[dict[str, Tensor], dict[str, float]]:
    model.zero_grad()
    stats: Any = None
    for part in parts:
        output = loss(part, predict(model, part, loss.needs, chunk=16))
        output.loss.backward()  # type: ignore[no-untyped-call]
        stats = output.stats if stats is None else stats + output.stats
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return gradients, stats.values_by_name()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("max_tokens", [1, 60])
def test_micro_batches_of_any_size_give_the_gradient_and_the_report_of_the_whole(
    models: dict[Head, PreTrainedModel], name: str, max_tokens: int
) -> None:
    loss = LOSSES[name]
    model, batch = models["score" if loss.needs.score else "language"], batch_for(loss)
    parts = micro_batches(batch, max_tokens=max_tokens)
    assert len(parts) == len(batch) // batch.unit_size if max_tokens == 1 else len(parts) > 2
    expected, expected_stats = gradient(model, [batch], loss)
    ours, stats = gradient(model, parts, loss)
    assert stats == pytest.approx(expected_stats, rel=1e-4)
    assert ours.keys() == expected.keys()
    for parameter, value in expected.items():
        torch.testing.assert_close(ours[parameter], value, atol=1e-5, rtol=1e-4)
    assert max(value.abs().max() for value in expected.values()) > 1e-3
