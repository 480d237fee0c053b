"""The Triton kernels against plain attention over the same pages: on a GPU, or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from reroll.models.attention import Scoring
from reroll_zoo.paged_cache.kernels import PAGE, attend, store, tokens_per_block

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SEQUENCES = [(130, 1), (0, 70), (60, 5), (3, 1)]
"""Tokens held, and tokens that are new."""


def whole(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def plain_attention(query, keys, values, *, start, scoring):
    """[L, H, D] at places from `start` on, over [L_kv, H, D]."""
    scores = torch.einsum("thd,shd->hts", query.double(), keys.double()) * scoring.scaling
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    positions = torch.arange(start, start + len(query), device=DEVICE)[:, None]
    others = torch.arange(len(keys), device=DEVICE)[None]
    visible = others <= positions
    if scoring.sliding_window:
        visible &= others > positions - scoring.sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    if scoring.sinks is not None:  # A key of each head that all see and that has no value.
        scores = torch.cat([scores, scoring.sinks.double()[:, None, None].expand(-1, len(query), 1)], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values.double())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), pytest.param(torch.bfloat16, 2e-2, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap", "has_sinks"),
    [
        (9, 3, 64, None, None, False),
        (16, 8, 128, None, None, False),
        (4, 4, 24, None, None, False),
        (8, 2, 32, 20, None, False),
        (4, 1, 32, 7, 3.0, False),
        (6, 2, 64, None, None, True),
        (8, 2, 32, 20, None, True),
    ],
)
def test_pages_are_attended_to_like_plain_keys(heads, kv_heads, dim, window, softcap, has_sinks, rows, dtype, tolerance):
    torch.manual_seed(0)
    sinks = torch.randn(heads, device=DEVICE, dtype=dtype) if has_sinks else None
    scoring = Scoring(scaling=dim**-0.5, sliding_window=window, softcap=softcap, sinks=sinks)
    keys, values = torch.randn(2, 64, PAGE, kv_heads, dim, device=DEVICE, dtype=dtype)
    pages = iter(torch.randperm(63).add(1).tolist())
    tables = [[next(pages) for _ in range(-(-(start + new) // PAGE))] for start, new in SEQUENCES]
    positions = [
        (table, place) for table, (start, new) in zip(tables, SEQUENCES, strict=True) for place in range(start, start + new)
    ]
    num_tokens = len(positions)
    # As transformers gives them: [heads, T, D] seen as [T, heads, D].
    query, key, value = (
        torch.randn(num, num_tokens, dim, device=DEVICE, dtype=dtype).transpose(0, 1) for num in (heads, kv_heads, kv_heads)
    )
    store(key, value, keys, values, whole([table[place // PAGE] * PAGE + place % PAGE for table, place in positions]))
    step = tokens_per_block(heads, kv_heads, rows=rows)
    blocks = [(number, first) for number, (_, new) in enumerate(SEQUENCES) for first in range(0, new, step)] + [(-1, 0)]
    width = max(map(len, tables))
    bounds = [0, *torch.tensor([new for _, new in SEQUENCES]).cumsum(0).tolist()]
    got = attend(
        query,
        keys,
        values,
        tables=whole([table + [0] * (width - len(table)) for table in tables]),
        starts=whole([start for start, _ in SEQUENCES]),
        bounds=whole(bounds),
        block_sequence=whole([number for number, _ in blocks]),
        block_first=whole([first for _, first in blocks]),
        rows=rows,
        scoring=scoring,
    )
    for number, (start, new) in enumerate(SEQUENCES):
        seen = [tensor[tables[number]].flatten(0, 1)[: start + new] for tensor in (keys, values)]
        seen = [tensor.repeat_interleave(heads // kv_heads, 1) for tensor in seen]
        want = plain_attention(query[bounds[number] : bounds[number + 1]], *seen, start=start, scoring=scoring)
        torch.testing.assert_close(got[bounds[number] : bounds[number + 1]].double(), want, atol=tolerance, rtol=tolerance)
