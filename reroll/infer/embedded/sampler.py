"""From logits to tokens: one uniform number per token, turned into a token by inverting the cumulative distribution.

The uniform is a hash of (seed, position), so a request gives the same tokens whatever it is batched with, and a
completion that is interrupted and continued draws what it would have drawn in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from reroll.models import exact, fused

_BLOCK = 256
"""Probabilities are summed in blocks first: two short searches in place of one cumulative sum over the vocabulary."""

_HEAD = 512
"""Most probable tokens that a top-p cut looks at before it resorts to sorting the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How the next token of one sequence is sampled."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    forbidden: tuple[int, ...] = ()
    """Tokens that must not be drawn (stop tokens before `min_tokens`)."""


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position): splitmix64, which needs no state."""
    state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    for salt in (np.zeros(len(seeds), np.uint64), np.array(positions, dtype=np.uint64)):
        state = _mix(state + (salt + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    uniform: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


def sample(logits: Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> tuple[list[int], list[float]]:
    """As `sample_on_device`, with the result on the host."""
    tokens, logprobs = sample_on_device(logits, rows, positions)
    return tokens.tolist(), logprobs.tolist()


def sample_on_device(logits: Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One token for each row of `logits` [R, vocab], and its log-prob under softmax(logits / temperature).

    `positions` are the places of the drawn tokens in their sequences, prompts included.
    The log-prob is that of the whole distribution: neither top-p, top-k nor forbidden tokens change it. Greedy rows
    (temperature 0) report it at temperature 1.
    """
    temperatures = [row.temperature or 1.0 for row in rows]
    probs = _probabilities(logits, temperatures)
    weights = _without_forbidden(probs, [row.forbidden for row in rows])
    uniform = torch.from_numpy(uniforms([row.seed for row in rows], positions)).to(probs.device)
    tokens = invert(weights, uniform)
    if cut := [i for i, row in enumerate(rows) if row.temperature and (row.top_p < 1 or 0 < row.top_k < probs.shape[1])]:
        tokens[cut] = _sample_cut(weights[cut], uniform[cut], [rows[i] for i in cut])
    if greedy := [i for i, row in enumerate(rows) if not row.temperature]:
        tokens[greedy] = weights[greedy].argmax(-1)
    if exact.is_exact():
        scale = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
        if fused.runs_kernels(logits):
            return tokens, fused.kernels().chosen_logprobs(logits, tokens, temperature=scale)[0]
        return tokens, exact.logprobs_of(logits.float() / scale[:, None], tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _probabilities(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits.float() / torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    return torch.softmax(logits, -1, dtype=torch.float32)


def _without_forbidden(probs: Tensor, forbidden: Sequence[tuple[int, ...]]) -> Tensor:
    pairs = [(row, token) for row, tokens in enumerate(forbidden) for token in tokens]
    if not pairs:
        return probs
    index = torch.tensor(pairs, device=probs.device).unbind(1)
    return probs.index_put(index, torch.zeros((), dtype=probs.dtype, device=probs.device))


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative weight of each row [R, N] passes `uniform` [R] of its total. Sums in fp64."""
    width = weights.shape[1]
    blocks = pad(weights, (0, -width % _BLOCK)) if width % _BLOCK else weights
    blocks = blocks.view(len(weights), -1, _BLOCK)
    block, share = _search(blocks.sum(-1), uniform)
    inside = blocks[torch.arange(len(weights), device=weights.device), block]
    return block * _BLOCK + _search(inside, share)[0]


def _search(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The entry of each row in which the point `uniform` of its total falls, and how far into that entry, in [0, 1)."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    point = uniform[:, None] * total
    entry = torch.searchsorted(cumulative, point, right=True)
    entry = torch.minimum(entry, torch.searchsorted(cumulative, total.contiguous()))  # Rounding must not pass the last weight.
    here = weights.gather(1, entry).double()
    into = (point - (cumulative.gather(1, entry) - here)) / here
    return entry[:, 0], into[:, 0].clamp(0, 1 - 2.0**-53)


def _sample_cut(weights: Tensor, uniform: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """As `invert`, among the tokens that top-k and then top-p keep."""
    width = weights.shape[1]
    top_k = torch.tensor([row.top_k or width for row in rows], device=weights.device)[:, None]
    top_p = torch.tensor([row.top_p for row in rows], device=weights.device, dtype=torch.float64)[:, None]
    num_head = min(width, max([_HEAD, *(row.top_k for row in rows)]))
    while True:
        head, tokens = weights.topk(num_head, dim=-1)
        head = head.masked_fill(torch.arange(num_head, device=weights.device) >= top_k, 0)
        total = torch.where(top_k <= num_head, head.double().sum(-1, keepdim=True), weights.double().sum(-1, keepdim=True))
        before = head.double().cumsum(-1) - head
        outside = before >= top_p * total
        reaches_end = (top_k > num_head) & ~outside[:, -1:]
        if num_head == width or not bool(reaches_end.any()):
            break
        num_head = width
    kept = head.masked_fill(outside, 0)
    return tokens.gather(1, _search(kept, uniform)[0][:, None])[:, 0]
