import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import balance, fill, join, join_sequences, micro_batches, mini_batches, order_of
from reroll.types import Sample

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=12)


def make_batch(lengths: list[int], seed: int = 0) -> Batch:
    """Rows whose ids name their sequence, so that any cut can be checked."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate(lengths):
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        logp = np.where(mask, rng.normal(size=length), 0).astype(np.float32)
        samples.append(Sample(ids=np.full(length, index), loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
    return pack(samples)


def sequences(batches: list[Batch]) -> list[int]:
    """Which sequence each row of these batches is."""
    return [int(batch.ids[start]) for batch in batches for start in batch.cu_seqlens[:-1]]


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 100))
def test_micro_batches_hold_every_sequence_once_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    batch = make_batch(lengths)
    parts = micro_batches(batch, max_tokens=max_tokens)
    assert sorted(sequences(parts)) == list(range(len(lengths)))
    for part in parts:
        assert part.num_tokens <= max_tokens or len(part) == 1
        assert (part.num_loss_tokens, part.num_sequences) == (batch.num_loss_tokens, batch.num_sequences)
        for start, end in zip(part.cu_seqlens[:-1], part.cu_seqlens[1:], strict=True):
            assert len(part.ids[start:end].unique()) == 1


def test_first_fit_decreasing_fills_parts_well() -> None:
    assert fill(order_of(make_batch([3, 7, 5, 5, 4, 6])), max_tokens=10) == [[1, 0], [5, 4], [2, 3]]


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 5), st.integers(0, 100))
def test_mini_batches_hold_every_sequence_once_and_count_for_themselves(lengths: list[int], num: int, seed: int) -> None:
    batch = make_batch(lengths)
    parts = mini_batches(batch, num, seed=seed)
    assert sorted(sequences(parts)) == list(range(len(lengths)))
    assert len(parts) == min(num, len(lengths))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in parts:
        assert part.num_loss_tokens == int(part.loss_mask.sum()) > 0
        assert part.num_sequences == len(part)
    assert sequences(parts) == sequences(mini_batches(batch, num, seed=seed))


def test_another_seed_gives_other_mini_batches() -> None:
    batch = make_batch([4] * 12)
    assert sequences(mini_batches(batch, 3, seed=0)) != sequences(mini_batches(batch, 3, seed=1))


@settings(max_examples=60)
@given(st.lists(st.integers(2, 40), min_size=4, max_size=12), st.integers(1, 4))
def test_ranks_get_balanced_shares_and_keep_global_denominators(lengths: list[int], ranks: int) -> None:
    batch = make_batch(lengths)
    parts = [batch.select_units(share) for share in balance(order_of(batch), num_parts=ranks)]
    assert sorted(sequences(parts)) == list(range(len(lengths)))
    tokens = [part.num_tokens for part in parts]
    assert max(tokens) <= sum(lengths) / ranks + max(lengths)
    assert {(part.num_loss_tokens, part.num_sequences) for part in parts} == {(batch.num_loss_tokens, batch.num_sequences)}


def test_more_ranks_than_sequences_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="2 sequences cannot be spread over 3 ranks"):
        balance(order_of(make_batch([4, 4])), num_parts=3)


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 60))
def test_join_puts_per_token_results_back_in_order(lengths: list[int], max_tokens: int) -> None:
    batch = make_batch(lengths)
    parts = fill(order_of(batch), max_tokens=max_tokens)
    assert torch.equal(join(batch, parts, [batch.select(part).logp for part in parts]), batch.logp)


def test_cuts_leave_the_batch_as_it_was() -> None:
    batch = make_batch([5, 3, 8])
    before = [batch.ids.clone(), batch.cu_seqlens.clone(), batch.loss_mask.clone()]
    micro_batches(batch, max_tokens=8)
    mini_batches(batch, 2, seed=0)
    assert all(map(torch.equal, before, [batch.ids, batch.cu_seqlens, batch.loss_mask]))


@settings(max_examples=40)
@given(st.lists(st.integers(2, 20), min_size=2, max_size=12), st.integers(1, 60), st.integers(1, 4))
def test_pairs_are_never_parted_by_any_cut(lengths: list[int], max_tokens: int, num: int) -> None:
    lengths = lengths[: len(lengths) // 2 * 2]
    batch = make_batch(lengths).replace(unit_size=2, label=torch.arange(len(lengths)).float())
    cuts = [micro_batches(batch, max_tokens=max_tokens), mini_batches(batch, num, seed=1)]
    if num <= len(lengths) // 2:
        cuts.append([batch.select_units(share) for share in balance(order_of(batch), num_parts=num)])
    for parts in cuts:
        assert sorted(sequences(parts)) == list(range(len(lengths)))
        for part in parts:
            rows = sequences([part])
            assert [(first // 2, first % 2) for first in rows[::2]] == [(second // 2, 0) for second in rows[1::2]]
            assert part.label is not None
            assert part.label.tolist() == rows


def test_sequences_without_a_token_in_the_loss_can_be_left_out() -> None:
    batch = make_batch([5, 4, 6])
    batch = batch.replace(loss_mask=batch.loss_mask & (batch.sequence_index != 1))
    left = batch.without_untrained()
    assert sequences([left]) == [0, 2]
    assert (left.num_loss_tokens, left.num_sequences) == (int(batch.loss_mask.sum()), 2)
    none = batch.replace(loss_mask=torch.zeros_like(batch.loss_mask)).without_untrained()
    assert (len(none), none.num_loss_tokens, none.num_sequences) == (1, 0, 0)


def test_results_with_several_numbers_a_token_or_one_a_sequence_are_put_back_in_order() -> None:
    batch, parts = make_batch([3, 2, 4]), [[2, 0], [1]]
    wide = torch.stack([torch.arange(9), torch.arange(9) * 10], 1)
    values = [torch.cat([wide[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]] for i in part]) for part in parts]
    assert torch.equal(join(batch, parts, values), wide)
    assert join_sequences(parts, [torch.tensor([2.0, 0.0]), torch.tensor([1.0])]).tolist() == [0, 1, 2]
