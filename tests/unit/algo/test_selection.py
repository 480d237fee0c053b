import numpy as np
import pytest
import torch

from reroll.algo.selection import highest_entropy
from reroll_zoo.algorithms.selections import between, covariance, highest


def batch(seed: int, num_tokens: int = 500) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    logp, advantage = rng.normal(size=(2, num_tokens)) * [[1.5], [1.0]]
    return torch.tensor(logp), torch.tensor(advantage), torch.tensor(rng.random(num_tokens) < 0.8)


def reference_covariance(logp: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """arXiv 2505.22617: the product of the two deviations from the batch's means, token by token."""
    kept = [place for place, inside in enumerate(mask.tolist()) if inside]
    mean_logp = sum(logp[place].item() for place in kept) / len(kept)
    mean_advantage = sum(advantage[place].item() for place in kept) / len(kept)
    values = [0.0] * len(mask)
    for place in kept:
        values[place] = (logp[place].item() - mean_logp) * (advantage[place].item() - mean_advantage)
    return values


def test_the_covariance_of_a_token_is_the_product_of_its_deviations() -> None:
    logp, advantage, mask = batch(0)
    expected = reference_covariance(logp, advantage, mask)
    np.testing.assert_allclose(covariance(logp, advantage, mask).numpy(), expected, atol=1e-12)


def test_the_highest_covariances_are_selected() -> None:
    logp, advantage, mask = batch(1)
    values = np.array(reference_covariance(logp, advantage, mask))
    values[~mask.numpy()] = -np.inf
    picked = highest(logp, advantage, mask, share=0.05)
    num = int(0.05 * int(mask.sum()))
    assert num > 1
    assert set(picked.nonzero().flatten().tolist()) == set(np.argsort(values)[-num:].tolist())


def test_tokens_between_the_bounds_are_selected_evenly_spaced() -> None:
    logp, advantage, mask = batch(2)
    values = reference_covariance(logp, advantage, mask)
    candidates = [place for place, value in enumerate(values) if mask[place] and 1 <= value <= 5]
    picked = between(logp, advantage, mask, share=0.02, low=1.0, high=5.0).nonzero().flatten().tolist()
    assert len(picked) == int(0.02 * int(mask.sum())) < len(candidates)
    gaps = np.diff([candidates.index(place) for place in picked])
    assert gaps.max() - gaps.min() <= 1
    every = between(logp, advantage, mask, share=1.0, low=1.0, high=5.0).nonzero().flatten().tolist()
    assert every == candidates


def test_at_least_one_token_is_selected_where_there_is_a_candidate() -> None:
    logp, advantage, mask = batch(3)
    assert int(highest(logp, advantage, mask, share=1e-9).sum()) == 1
    assert int(between(logp, advantage, mask, share=1e-9, low=1.0, high=5.0).sum()) == 1
    assert int(between(logp, advantage, mask, share=0.5, low=1e6, high=1e7).sum()) == 0


@pytest.mark.parametrize("noise", [float("nan"), 1e9])
def test_tokens_off_the_mask_are_neither_selected_nor_counted(noise: float) -> None:
    logp, advantage, mask = batch(4)
    spoilt = torch.where(mask, logp, noise), torch.where(mask, advantage, noise), mask
    for select, options in ((highest, {}), (between, {"low": 1.0, "high": 5.0})):
        picked = select(logp, advantage, mask, share=0.1, **options)
        assert picked.any()
        assert not picked[~mask].any()
        torch.testing.assert_close(select(*spoilt, share=0.1, **options), picked)


def test_an_empty_mask_selects_nothing() -> None:
    logp, advantage, _ = batch(5)
    nothing = torch.zeros(len(logp), dtype=torch.bool)
    assert not highest(logp, advantage, nothing, share=0.5).any()
    assert not between(logp, advantage, nothing, share=0.5, low=-1e9, high=1e9).any()


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
def test_the_tokens_of_the_highest_entropy_are_those_at_and_above_the_quantile_of_the_mask(share: float) -> None:
    """arXiv 2506.01939: tokens with H >= tau, the quantile 1 - share of all tokens of the batch."""
    for seed, num_tokens in enumerate((1, 2, 11, 501)):
        rng = np.random.default_rng(seed)
        entropy, mask = rng.exponential(size=num_tokens).round(1), rng.random(num_tokens) < 0.7  # Rounded: many tie.
        mask[0] = True
        expected = mask & (entropy >= np.quantile(entropy[mask], 1 - share) - 1e-12)
        spoilt = np.where(mask, entropy, 1e9)
        picked = highest_entropy(torch.tensor(spoilt), torch.tensor(mask), share=share)
        np.testing.assert_array_equal(picked.numpy(), expected)


def test_a_fifth_of_ten_tokens_are_two_and_of_none_none() -> None:
    mask = torch.ones(10, dtype=torch.bool)
    assert highest_entropy(torch.arange(10.0), mask, share=0.2).nonzero().flatten().tolist() == [8, 9]
    assert highest_entropy(torch.arange(6.0), mask[:6], share=0.2).nonzero().flatten().tolist() == [4, 5]
    assert not highest_entropy(torch.full((10,), torch.nan), ~mask, share=0.2).any()
