"""Cuts of a batch: into optimizer steps, ranks and micro-batches. Units stay whole and no cut loses or repeats one.

What sequences share is computed once if it is computed together, so every cut keeps those together that begin alike, as far as
its size allows, and counts a token that they share once: what begins alike is found here too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reroll.tokens.batch import Batch

REPEAT_COST = 1 / 4
"""What a token that a micro-batch repeats costs its memory, in tokens: every sequence attends by itself."""
_FAIR_ENOUGH = 1.02
"""The largest share against a fair one, below which no better one is looked for."""
_NUM_TRIES = 8


def micro_batches(batch: Batch, *, max_tokens: int, repeat_cost: float = REPEAT_COST) -> list[Batch]:
    """Parts of at most `max_tokens` distinct tokens that together are the batch; global denominators kept.

    A token that a part repeats counts as `repeat_cost`. A unit larger than that gets a part of its own.
    """
    parts = fill(order_of(batch), max_tokens=max_tokens, repeat_cost=repeat_cost)
    return [batch.select_units(part) for part in parts]


def mini_batches(batch: Batch, num: int, *, seed: int) -> list[Batch]:
    """The batch in random order, in `num` parts of equal unit counts (within one), each with its own denominators.

    One part is one optimizer step. Units with the same prompt stand next to each other, so that at most `num - 1` such groups
    are parted, and none where they are of one size that divides a part's. A batch of fewer units gives as many parts as it has.
    """
    num_units = len(batch) // batch.unit_size
    if min(num, num_units) == 1:
        return [batch.recount()]
    shuffled = torch.randperm(num_units, generator=torch.Generator().manual_seed(seed)).tolist()
    place = {unit: number for number, unit in enumerate(shuffled)}
    leader = {unit: min(group) for group in same_prompt(batch) for unit in group}
    order = torch.tensor(sorted(range(num_units), key=lambda unit: (place[leader[unit]], place[unit])))
    return [batch.select_units(sorted(part.tolist())).recount() for part in torch.tensor_split(order, min(num, num_units))]


def order_of(batch: Batch) -> PrefixOrder:
    """The batch's units in prefix order."""
    return prefix_order(batch.ids, batch.cu_seqlens, unit_size=batch.unit_size)


def same_prompt(batch: Batch) -> list[list[int]]:
    """The units in groups that begin with the same tokens up to the loss: siblings, and an episode's rows with them."""
    units, starts = order_of(batch), batch.cu_seqlens[:-1]
    in_loss = batch.loss_mask.nonzero().squeeze(1)
    end = torch.cat([in_loss, in_loss.new_tensor([batch.num_tokens])])
    until_loss = end[torch.searchsorted(in_loss, starts)] - starts
    prompts = torch.minimum(until_loss, torch.diff(batch.cu_seqlens))[:: batch.unit_size].tolist()
    groups: list[list[int]] = []
    for unit, num_shared in zip(units.order, units.num_shared, strict=True):
        if groups and num_shared >= min(prompts[groups[-1][-1]], prompts[unit]):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def fill(units: PrefixOrder, *, max_tokens: float, repeat_cost: float = REPEAT_COST) -> list[list[int]]:
    """Which units share a micro-batch: those that begin alike, and beside them first-fit decreasing."""
    return [bundle.units for bundle in _bundles(units, max_load=max_tokens, repeat_cost=repeat_cost)]


def balance(units: PrefixOrder, *, num_parts: int) -> list[list[int]]:
    """Which units go to which rank: as few distinct tokens as can be on the rank that has most. Some may be left without.

    Searches for the smallest share that all fits into (MULTIFIT), between an equal one and the largest that comes of dealing
    units out one by one.
    """
    num_units = len(units.order)
    if num_parts > num_units:
        raise ValueError(f"{num_units} sequences cannot be spread over {num_parts} ranks: use a larger batch or fewer devices")
    parts, largest = _deal(_leaves(units), num_parts)
    fair = max((sum(units.num_distinct) - sum(units.num_shared)) / num_parts, *units.num_distinct)
    share, too_small = _FAIR_ENOUGH * fair, fair
    for _ in range(_NUM_TRIES):
        if largest <= share:
            break
        bundles = _bundles(units, max_load=share)
        if len(bundles) <= num_parts:
            parts, largest = [sorted(bundle.units) for bundle in bundles], max(bundle.load for bundle in bundles)
        else:
            too_small = share
        share = max((too_small + largest) / 2, _FAIR_ENOUGH * too_small)
    return parts


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Units that are computed together."""

    units: list[int]
    load: float
    """Their distinct tokens, and what repeating the others costs."""


def _leaves(units: PrefixOrder, *, repeat_cost: float = 0.0) -> list[_Bundle]:
    """Every unit alone, in prefix order."""
    return [
        _Bundle([unit], _cost(units.num_distinct[unit], units.num_tokens[unit], repeat_cost=repeat_cost))
        for unit in units.order
    ]


def _cost(num_distinct: int, num_tokens: int, *, repeat_cost: float) -> float:
    return num_distinct + repeat_cost * (num_tokens - num_distinct)


def _bundles(units: PrefixOrder, *, max_load: float, repeat_cost: float = 0.0) -> list[_Bundle]:
    """All units in bundles of at most `max_load`, or of one unit.

    Goes through the tree of common prefixes, the longest first: what branches off there is bundled, and the bundles are units
    of the next shorter prefix.
    """
    saved = 1 - repeat_cost  # Of each token that a bundle need not compute again.
    open_nodes: list[tuple[int, list[_Bundle]]] = [(0, [])]  # (length of the prefix, what branched off so far), shortest first.
    for leaf, shared_with_next in zip(_leaves(units, repeat_cost=repeat_cost), [*units.num_shared[1:], 0], strict=True):
        if shared_with_next > open_nodes[-1][0]:
            open_nodes.append((shared_with_next, []))
        open_nodes[-1][1].append(leaf)
        while open_nodes[-1][0] > shared_with_next:
            length, members = open_nodes.pop()
            if open_nodes[-1][0] < shared_with_next:
                open_nodes.append((shared_with_next, []))
            open_nodes[-1][1].extend(_first_fit(members, max_load=max_load, common=saved * length))
    return _first_fit(open_nodes[0][1], max_load=max_load, common=0)


def _first_fit(members: Sequence[_Bundle], *, max_load: float, common: float) -> list[_Bundle]:
    """The members in as few bundles, the largest first into the first that has room; `common` is a part of each one's load."""
    bundles: list[_Bundle] = []
    for member in sorted(members, key=lambda one: (-one.load, one.units[0])):
        place = next((at for at, one in enumerate(bundles) if one.load + member.load - common <= max_load), None)
        if place is None:
            bundles.append(member)
        else:
            bundle = bundles[place]
            bundles[place] = _Bundle(bundle.units + member.units, bundle.load + member.load - common)
    return bundles


def _deal(bundles: Sequence[_Bundle], num_parts: int) -> tuple[list[list[int]], float]:
    """The largest bundle left to the part with the smallest load; and the largest load then."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0.0, part) for part in range(num_parts)]
    for bundle in sorted(bundles, key=lambda one: (-one.load, one.units[0])):
        load, part = heapq.heappop(loads)
        parts[part] += bundle.units
        heapq.heappush(loads, (load + bundle.load, part))
    return [sorted(part) for part in parts], max(loads)[0]


def join(batch: Batch, parts: Sequence[Sequence[int]], values: Sequence[Tensor]) -> Tensor:
    """Per-token results [T, …] of `batch.select(part)` for each part, put back into the batch's order."""
    bounds = batch.cu_seqlens.tolist()
    joined = values[0].new_empty(batch.num_tokens, *values[0].shape[1:])
    for part, value in zip(parts, values, strict=True):
        rows = torch.cat([torch.arange(bounds[index], bounds[index + 1]) for index in part])
        joined[rows.to(value.device)] = value
    return joined


def join_sequences(parts: Sequence[Sequence[int]], values: Sequence[Tensor]) -> Tensor:
    """As `join`, for results [N] with one entry per sequence."""
    order = torch.tensor([index for part in parts for index in part])
    flat = torch.cat(list(values))
    return torch.empty_like(flat).index_copy(0, order, flat)


Row = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOrder:
    """Units (sequences, or neighbours that stay together) in dictionary order: those that begin alike are neighbours.

    Each shares more with the unit before it than with any other earlier one. Units of several sequences are ordered, and
    compared, by their first.
    """

    order: list[int]
    num_shared: list[int]
    """With how many of the tokens of the one before it each of `order` begins. The first: 0."""
    num_tokens: list[int]
    """Tokens of each unit, by its number."""
    num_distinct: list[int]
    """Those that a model must see of it where nothing else is computed, by its number."""


def prefix_order(ids: Tensor, cu_seqlens: Tensor, *, unit_size: int = 1) -> PrefixOrder:
    """The order of packed sequences, of which `unit_size` neighbours each are a unit."""
    rows = _rows(ids, cu_seqlens)
    units = [rows[start : start + unit_size] for start in range(0, len(rows), unit_size)]
    order, num_shared = _sorted(rows[::unit_size])
    num_tokens = [sum(map(len, unit)) for unit in units]
    num_repeated = [0 if unit_size == 1 else sum(_sorted(unit)[1]) for unit in units]
    return PrefixOrder(
        order=order,
        num_shared=num_shared,
        num_tokens=num_tokens,
        num_distinct=[total - repeated for total, repeated in zip(num_tokens, num_repeated, strict=True)],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """A token's state depends on the tokens before it only, so sequences that begin alike need their beginning once."""

    first: Tensor
    """[U] where in the pack each distinct token stands first."""
    index: Tensor
    """[T] which of the distinct tokens each token of the pack is: `values_U[index]` spreads results over the pack."""
    sequences: Tensor
    """[N] in whose order the distinct tokens stand: first those of one sequence, then those that the next adds to it, …"""
    num_added: Tensor
    """[N] how many distinct tokens each of `sequences` adds: its last ones."""


def shared_prefixes(ids: Tensor, cu_seqlens: Tensor) -> SharedPrefixes:
    """Find the longest common beginnings among packed sequences: prompts of siblings, and whatever else they share."""
    bounds = cu_seqlens.tolist()
    index, first = np.empty(len(ids), dtype=np.int64), []
    previous, num_distinct = index[:0], 0
    order, num_shared = _sorted(_rows(ids, cu_seqlens))
    for row, shared in zip(order, num_shared, strict=True):
        start, end = bounds[row], bounds[row + 1]
        added = end - start - shared
        index[start : start + shared] = previous[:shared]
        index[start + shared : end] = np.arange(num_distinct, num_distinct + added)
        first.append(np.arange(start + shared, end))
        previous, num_distinct = index[start:end], num_distinct + added
    return SharedPrefixes(
        first=torch.from_numpy(np.concatenate(first)),
        index=torch.from_numpy(index),
        sequences=torch.tensor(order),
        num_added=torch.tensor([len(added) for added in first]),
    )


def _rows(ids: Tensor, cu_seqlens: Tensor) -> list[Row]:
    flat = ids.cpu().numpy()
    return [flat[start:end] for start, end in pairwise(cu_seqlens.tolist())]


def _sorted(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """The rows in dictionary order, and with how many tokens of the row before it each begins."""
    keys = [row.astype(">u8").tobytes() for row in rows]  # Of which bytes are compared as the numbers are.
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return order, [0, *(_num_equal(rows[before], rows[after]) for before, after in pairwise(order))]


def _num_equal(left: Row, right: Row) -> int:
    """Length of the common beginning."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
