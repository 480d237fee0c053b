"""Cuts of rows that begin alike: they stay together as far as sizes allow, and what they share counts once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import balance, fill, mini_batches, order_of, prefix_order, same_prompt, shared_prefixes
from reroll.types import Sample

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=2, max_size=16)


def batch_of(rows: Sequence[Sequence[int]], *, num_prompt: int = 1, unit_size: int = 1) -> Batch:
    """Rows whose first `num_prompt` tokens are not in the loss; `label` says which row each is."""
    samples = []
    for ids in rows:
        mask = np.arange(len(ids)) >= num_prompt
        logp, turn = np.zeros(len(ids), np.float32), np.where(mask, 0, -1)
        samples.append(Sample(ids=np.array(ids), loss_mask=mask, logp=logp, turn=turn))
    num_units = len(rows) // unit_size
    whole = pack(samples).replace(unit_size=unit_size, label=torch.arange(len(rows)).float())
    return whole.select_units(range(num_units))


def siblings(num_groups: int, group_size: int, *, num_prompt: int, num_written: int, seed: int = 0) -> list[list[int]]:
    """Groups of rows with the same prompt, all mixed up."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 50_000, num_prompt).tolist() for _ in range(num_groups)]
    return [
        prompts[group] + rng.integers(0, 50_000, num_written).tolist() for _ in range(group_size) for group in range(num_groups)
    ]


def num_distinct(batch: Batch) -> int:
    return len(shared_prefixes(batch.ids, batch.cu_seqlens).first)


def units_of(parts: Sequence[Sequence[int]]) -> list[int]:
    return sorted(unit for part in parts for unit in part)


def labels(batch: Batch) -> list[int]:
    assert batch.label is not None
    return batch.label.int().tolist()


@settings(max_examples=150)
@given(ROWS, st.sampled_from([1, 2]))
def test_the_order_counts_the_distinct_tokens_and_neighbours_share_most(rows: list[list[int]], unit_size: int) -> None:
    batch = batch_of(rows, unit_size=unit_size)
    order = order_of(batch)
    assert sorted(order.order) == list(range(len(batch) // unit_size))
    assert sum(order.num_tokens) == batch.num_tokens
    for unit, distinct in enumerate(order.num_distinct):
        assert distinct == num_distinct(batch.select_units([unit]))
    if unit_size == 1:
        assert sum(order.num_distinct) - sum(order.num_shared) == num_distinct(batch)


@settings(max_examples=200)
@given(ROWS, st.integers(1, 40), st.sampled_from([0.0, 0.125, 1.0]), st.sampled_from([1, 2]))
def test_micro_batches_lose_and_repeat_no_row_and_keep_their_budget(
    rows: list[list[int]], max_tokens: int, repeat_cost: float, unit_size: int
) -> None:
    batch = batch_of(rows, unit_size=unit_size)
    parts = fill(order_of(batch), max_tokens=max_tokens, repeat_cost=repeat_cost)
    assert units_of(parts) == list(range(len(batch) // unit_size))
    for part in parts:
        chosen = batch.select_units(part)
        distinct = num_distinct(chosen)
        assert len(part) == 1 or distinct + repeat_cost * (chosen.num_tokens - distinct) <= max_tokens


@settings(max_examples=100)
@given(ROWS, st.integers(1, 16))
def test_no_rank_has_more_to_compute_than_when_rows_are_dealt_one_by_one(rows: list[list[int]], num_ranks: int) -> None:
    batch = batch_of(rows)
    num_ranks = min(num_ranks, len(batch))
    parts = balance(order_of(batch), num_parts=num_ranks)
    assert units_of(parts) == list(range(len(batch)))
    assert len(parts) <= num_ranks
    assert all(parts)
    loads = [0] * num_ranks
    for length in sorted(batch.lengths, reverse=True):
        heapq.heapreplace(loads, loads[0] + length)
    assert max(num_distinct(batch.select(part)) for part in parts) <= max(loads)


@settings(max_examples=100)
@given(ROWS, st.integers(1, 5), st.integers(0, 50), st.integers(1, 4), st.sampled_from([1, 2]))
def test_mini_batches_are_equal_in_rows_and_part_few_groups(
    rows: list[list[int]], num: int, seed: int, num_prompt: int, unit_size: int
) -> None:
    batch = batch_of([[*row, 0, 0, 0] for row in rows], num_prompt=num_prompt, unit_size=unit_size)
    groups, parts = same_prompt(batch), mini_batches(batch, num, seed=seed)
    assert sorted(row for part in parts for row in labels(part)) == list(range(len(batch)))
    counts = [len(part) // unit_size for part in parts]
    assert max(counts) - min(counts) <= 1
    where = {row // unit_size: number for number, part in enumerate(parts) for row in labels(part)}
    num_cuts = sum(len({where[unit] for unit in group}) - 1 for group in groups)
    assert num_cuts < len(parts)
    assert [labels(part) for part in parts] == [labels(part) for part in mini_batches(batch, num, seed=seed)]


def test_groups_are_rows_with_the_same_prompt_and_what_extends_it() -> None:
    system, other = [7, 7, 7], [9]
    rows = [[*system, 1, 5], [*system, 2, 5], [*system, 1, 6], [*system, 1, 5, 3, 8], [*system, 2, 4], [*other, 1, 5, 5]]
    batch = batch_of(rows, num_prompt=4)
    late = batch.replace(loss_mask=batch.loss_mask & ((batch.sequence_index != 3) | (batch.positions >= 6)))
    assert sorted(map(sorted, same_prompt(late))) == [[0, 2, 3], [1, 4], [5]]


def test_a_row_without_a_token_in_the_loss_belongs_to_what_it_is_the_beginning_of() -> None:
    batch = batch_of([[1, 2, 3], [1, 2, 4], [1, 5, 6]], num_prompt=2)
    unheard = batch.replace(loss_mask=batch.loss_mask & (batch.sequence_index == 0))
    assert sorted(map(sorted, same_prompt(unheard))) == [[0, 1], [2]]


@pytest.mark.parametrize("num_mini_batches", [1, 2, 4])
def test_whole_groups_go_through_every_cut_and_their_prompts_are_computed_once(num_mini_batches: int) -> None:
    batch = batch_of(siblings(8, 4, num_prompt=32, num_written=8), num_prompt=32)
    num_computed = 0
    for step in mini_batches(batch, num_mini_batches, seed=3):
        for share in balance(order_of(step), num_parts=2):
            rows = step.select_units(share)
            parts = fill(order_of(rows), max_tokens=150, repeat_cost=0.125)
            num_computed += sum(num_distinct(rows.select_units(part)) for part in parts)
    assert num_computed == num_distinct(batch) == 8 * (32 + 4 * 8)


def test_a_group_that_exceeds_the_budget_is_cut_and_its_rest_is_put_with_others() -> None:
    big = siblings(1, 10, num_prompt=20, num_written=10)
    small = siblings(1, 3, num_prompt=20, num_written=10, seed=1)
    batch = batch_of(big + small, num_prompt=20)
    parts = fill(order_of(batch), max_tokens=100, repeat_cost=0)
    assert sorted(map(sorted, parts)) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]


def test_a_growing_context_is_computed_once() -> None:
    context = np.random.default_rng(0).integers(0, 50_000, 120).tolist()
    batch = batch_of([context[:length] for length in range(10, 130, 10)])
    [part] = fill(order_of(batch), max_tokens=120, repeat_cost=0)
    assert len(part) == 12
    halves = fill(order_of(batch), max_tokens=170, repeat_cost=0.125)
    assert [num_distinct(batch.select(half)) for half in halves] == [120, 70]


def test_groups_of_which_there_are_fewer_than_ranks_are_parted_evenly() -> None:
    batch = batch_of(siblings(2, 8, num_prompt=16, num_written=16), num_prompt=16)
    shares = balance(prefix_order(batch.ids, batch.cu_seqlens), num_parts=4)
    assert [num_distinct(batch.select(share)) for share in shares] == [16 + 4 * 16] * 4
