"""What `policy.exact` trains with on a GPU: attention of packed tokens by the very kernel by which the engine attends to pages.

Keys and values are laid into pages of their own, each page once however many sequences begin with it. Where every sequence asks
for one token, the engine may take smaller programs: those that were seen to give the same bits here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from triton.errors import TritonError

from reroll.models.attention import Scoring
from reroll_zoo.exact_kernels import quickest
from reroll_zoo.exact_sums import with_gradient_of
from reroll_zoo.paged_cache.kernels import PAGE, READING_ROWS, WRITING_ROWS, attend, tokens_per_block

_TRIED_PAGES = 5
"""Of the longest context by which programs are compared."""

_TRIED_HEADS = {"cuda": 1024, "cpu": 8}
"""That many contexts look at keys of their own, heads counted: on a GPU they fill it, and take some 200 MB for a moment."""


class PackedPages:
    """Causal attention in which the last tokens of each sequence ask.

    `query_bounds` [N + 1] says which tokens ask, `key_bounds` [N + 1] which places are looked at, and `index` which token
    stands at each place; None: the tokens in their order.
    """

    def __init__(self, query_bounds: Tensor, key_bounds: Tensor, index: Tensor | None) -> None:
        self._device = query_bounds.device
        self._queries, lengths = query_bounds.cpu().diff(), key_bounds.cpu().diff()
        counts = -(-lengths // PAGE)
        firsts = counts.cumsum(0) - counts
        places = torch.arange(int(lengths.sum()))
        tokens = places if index is None else index.cpu()
        shifts = firsts * PAGE - key_bounds.cpu()[:-1]
        flat = torch.zeros(int(counts.sum()) * PAGE, dtype=torch.int64)
        flat[places + shifts.repeat_interleave(lengths)] = tokens
        pages, numbers = torch.unique(flat.view(-1, PAGE), dim=0, return_inverse=True)
        sequence, of_page = torch.arange(len(counts)).repeat_interleave(counts), torch.arange(len(numbers))
        tables = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32)
        tables[sequence, of_page - firsts.repeat_interleave(counts)] = numbers.to(torch.int32)
        self._sources = pages.flatten().to(self._device)
        self._tables = tables.to(self._device)
        self._starts = (lengths - self._queries).to(torch.int32).to(self._device)
        self._bounds = query_bounds.to(torch.int32)
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, quick: Callable[..., Tensor]) -> Tensor:
        """query [T, H, D], key and value [U, H_kv, D] -> [T, H, D], with the gradient of `quick`."""
        sinks = () if scoring.sinks is None else (scoring.sinks,)

        def with_sinks(way: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda q, k, v, *sinks: way(q, k, v, scoring=replace(scoring, sinks=sinks[0] if sinks else None))

        query, key = query.to(value.dtype), key.to(value.dtype)  # Under autocast, rotary embeddings leave them in fp32.
        return with_gradient_of(with_sinks(quick), with_sinks(self._attend), query, key, value, *sinks)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        keys, values = (each.index_select(0, self._sources).view(-1, PAGE, *each.shape[1:]) for each in (key, value))
        block_sequence, block_first = self._cut(tokens_per_block(query.shape[1], key.shape[1], rows=READING_ROWS))
        return attend(
            query,
            keys,
            values,
            tables=self._tables,
            starts=self._starts,
            bounds=self._bounds,
            block_sequence=block_sequence,
            block_first=block_first,
            rows=READING_ROWS,
            scoring=scoring,
        )

    def _cut(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The work of each program, which takes this many neighbouring tokens: its sequence, and its first token there."""
        if num_tokens not in self._blocks:
            counts = -(-self._queries // num_tokens)
            sequence = torch.arange(len(counts)).repeat_interleave(counts)
            first = (torch.arange(len(sequence)) - (counts.cumsum(0) - counts).repeat_interleave(counts)) * num_tokens
            self._blocks[num_tokens] = sequence.to(torch.int32).to(self._device), first.to(torch.int32).to(self._device)
        return self._blocks[num_tokens]


@dataclass(frozen=True, slots=True)
class AttendProgram:
    """The shape of a program of `attend`."""

    rows: int
    num_warps: int | None = None
    """None: what the kernel takes by itself."""
    num_stages: int = 2


READING = AttendProgram(READING_ROWS)
WRITING = tuple(AttendProgram(WRITING_ROWS, *options) for options in ((4, 2), (2, 2), (1, 1), (1, 2), (1, 3)))
"""A warp alone has all scores of a row, as in programs of more rows: it adds up their weights in the same order."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a kernel of `attend` is compiled for."""

    num_heads: int
    num_kv_heads: int
    dim: int
    dtype: torch.dtype
    softcap: float | None
    window: int | None
    has_sinks: bool

    @classmethod
    def of(cls, query: Tensor, keys: Tensor, scoring: Scoring) -> HeadShape:
        """Of query [T, H, D] and pages of keys [pages, PAGE, H_kv, D]."""
        return cls(
            num_heads=query.shape[1],
            num_kv_heads=keys.shape[2],
            dim=query.shape[2],
            dtype=keys.dtype,
            softcap=scoring.softcap,
            window=scoring.sliding_window,
            has_sinks=scoring.sinks is not None,
        )


@cache
def writing_program(shape: HeadShape, device: torch.device) -> AttendProgram:
    """The quickest program for one token of each sequence that gives the bits of `READING` on this device. Tried once."""
    newest = one_token_each(shape, device, num_contexts=max(3, _TRIED_HEADS[device.type] // shape.num_kv_heads))
    alike = (READING, *programs_alike(newest))
    if device.type != "cuda":
        return alike[-1]
    return quickest({program: partial(newest, program) for program in alike})


def programs_alike(newest: Callable[[AttendProgram], Tensor]) -> list[AttendProgram]:
    """Those of `WRITING` that give what `READING` gives."""
    want = newest(READING)
    found = []
    for program in WRITING:
        try:
            if torch.equal(newest(program), want):
                found.append(program)
        except TritonError:  # It takes more shared memory than this GPU has.
            continue
    return found


def one_token_each(shape: HeadShape, device: torch.device, *, num_contexts: int) -> Callable[[AttendProgram], Tensor]:
    """What a program makes of the newest token of so many contexts of all lengths: in fp32, so that every bit shows."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=shape.dtype)

    num_pages = num_contexts * _TRIED_PAGES
    query = drawn(num_contexts, shape.num_heads, shape.dim)
    keys, values = (drawn(num_pages, PAGE, shape.num_kv_heads, shape.dim) for _ in range(2))
    counted = torch.arange(num_contexts + 1, dtype=torch.int32, device=device)
    sinks = drawn(shape.num_heads) if shape.has_sinks else None
    scoring = Scoring(scaling=2 * shape.dim**-0.5, sliding_window=shape.window, softcap=shape.softcap, sinks=sinks)

    def newest(program: AttendProgram) -> Tensor:
        return attend(
            query,
            keys,
            values,
            tables=torch.arange(num_pages, dtype=torch.int32, device=device).view(num_contexts, -1),
            starts=counted[:-1] * 131 % (_TRIED_PAGES * PAGE),  # No common factor: all lengths, and all places in a page.
            bounds=counted,
            block_sequence=counted[:-1],
            block_first=torch.zeros_like(counted[:-1]),
            rows=program.rows,
            num_warps=program.num_warps,
            num_stages=program.num_stages,
            scoring=scoring,
            dtype=torch.float32,
        )

    return newest
