from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.algo.losses import Mode, aggregate
from reroll.config.losses import Aggregation

MODES = get_args(Mode)
MAX_LENGTH = 11


def reference(values: list[np.ndarray], masks: list[np.ndarray], mode: str) -> float:
    """The definition, sequence by sequence."""
    kept = [value[mask] for value, mask in zip(values, masks, strict=True) if mask.any()]
    if not kept:
        return 0.0
    if mode == "token_mean":
        return float(np.concatenate(kept).mean())
    per_sequence = [value.mean() if mode == "sequence_mean" else value.sum() for value in kept]
    return float(np.mean(per_sequence)) / (MAX_LENGTH if mode == "fixed_length" else 1)


def ragged(lengths: list[int], seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=length) for length in lengths], [rng.random(length) < 0.6 for length in lengths]


def reduced(values: list[np.ndarray], masks: list[np.ndarray], mode: Mode, counts: tuple[int, int]) -> float:
    index = np.repeat(np.arange(len(values)), [len(value) for value in values])
    return aggregate(
        torch.tensor(np.concatenate(values)),
        torch.tensor(np.concatenate(masks)),
        torch.tensor(index),
        mode=mode,
        num_loss_tokens=counts[0],
        num_sequences=counts[1],
        length=MAX_LENGTH,
    ).item()


def counts_of(masks: list[np.ndarray]) -> tuple[int, int]:
    return sum(int(mask.sum()) for mask in masks), sum(bool(mask.any()) for mask in masks)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from(MODES))
def test_each_mode_follows_its_definition_on_ragged_masks(lengths: list[int], seed: int, mode: Mode) -> None:
    values, masks = ragged(lengths, seed)
    assert reduced(values, masks, mode, counts_of(masks)) == pytest.approx(reference(values, masks, mode), abs=1e-12)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 1000), st.sampled_from(MODES))
def test_the_results_of_micro_batches_add_up_to_that_of_the_batch(lengths: list[int], seed: int, mode: Mode) -> None:
    values, masks = ragged(lengths, seed)
    counts = counts_of(masks)
    whole = reduced(values, masks, mode, counts)
    parts = [reduced([value], [mask], mode, counts) for value, mask in zip(values, masks, strict=True)]
    assert sum(parts) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_off_the_mask_change_neither_value_nor_gradient(mode: Mode) -> None:
    mask = torch.tensor([False, True, True, False, True])
    results = []
    for noise in (0.0, float("inf")):
        values = torch.where(mask, torch.arange(5.0), noise).requires_grad_()
        counts = {"num_loss_tokens": 3, "num_sequences": 2, "length": 4}
        result = aggregate(values, mask, torch.tensor([0, 0, 0, 1, 1]), mode=mode, **counts)
        results.append((result.item(), torch.autograd.grad(result, values)[0].tolist()))
    assert results[0] == results[1]
    assert [results[0][1][place] for place in (0, 3)] == [0.0, 0.0]
    unmasked = aggregate(
        torch.arange(5.0),
        torch.ones(5, dtype=torch.bool),
        torch.tensor([0, 0, 0, 1, 1]),
        mode=mode,
        **counts,
    )
    assert unmasked.item() != results[0][0]


def test_the_modes_differ_on_sequences_of_different_lengths() -> None:
    values, masks = [np.ones(1), np.zeros(3)], [np.ones(1, dtype=bool), np.ones(3, dtype=bool)]
    assert [reduced(values, masks, mode, (4, 2)) for mode in ("token_mean", "sequence_mean", "sequence_sum")] == [
        0.25,
        0.5,
        0.5,
    ]
    assert reduced(values[::-1], [np.ones(3, dtype=bool), np.ones(1, dtype=bool)], "sequence_sum", (4, 2)) == 0.5
    doubled = [np.ones(2), np.zeros(3)]
    assert reduced(doubled, [np.ones(2, dtype=bool), masks[1]], "sequence_sum", (5, 2)) == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_gives_zero(mode: Mode) -> None:
    values, masks = [np.ones(3)], [np.zeros(3, dtype=bool)]
    assert reduced(values, masks, mode, (0, 0)) == 0.0


def test_fixed_length_asks_for_the_length() -> None:
    with pytest.raises(ValueError, match="pass length"):
        aggregate(
            torch.ones(1),
            torch.ones(1, dtype=torch.bool),
            torch.zeros(1, dtype=torch.int64),
            mode="fixed_length",
            num_loss_tokens=1,
            num_sequences=1,
        )


def test_the_modes_are_those_of_the_config() -> None:
    assert set(MODES) == set(get_args(Aggregation))
