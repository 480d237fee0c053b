"""The KV cache in pages, on a GPU: contexts share pages, one kernel attends for a whole step, and a step is a CUDA graph."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reroll.infer.embedded.attention import check_fits
from reroll.infer.embedded.backend import CacheBackend, PendingTokens
from reroll.infer.embedded.model_runner import ModelRunner
from reroll.infer.embedded.sampler import RowSampling
from reroll.models.attention import Scoring
from reroll.models.exact import is_exact
from reroll_zoo.exact_attention import AttendProgram, HeadShape, writing_program
from reroll_zoo.paged_cache.graph_runner import DeviceTokens, GraphRunner, StepTensors
from reroll_zoo.paged_cache.kernels import PAGE, WRITING_ROWS, attend, store

_FIRST_PAGES = 256

_SHARE_OF_FREE = 0.7
"""Of the device's free memory when the first page is taken: what a cache without a budget of its own may grow to."""

_SHARE_AT_ONCE = 0.5
"""Of that: what it takes at once, where so much is foreseen. Answers are seldom as long as they may be, and the trainer's first
update is still to come."""

log = logging.getLogger(__name__)


class PagePool:
    """Pages by number, each free or used by a number of holders. Page 0 is never given out: padding writes there."""

    def __init__(self) -> None:
        self._uses = [1]
        self._free: list[int] = []

    @property
    def num_pages(self) -> int:
        return len(self._uses)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, num_pages: int) -> None:
        """Have this many pages in all."""
        old = self.num_pages
        self._uses += [0] * (num_pages - old)
        self._free += reversed(range(old, num_pages))  # The lowest are given out first.

    def take(self) -> int:
        """A free page, used once from now on. There must be one."""
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Each of these has one more holder."""
        for page in pages:
            self._uses[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Each of these has one holder less; those without any are free."""
        for page in pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)


class SavedPages:
    """Pages that are kept for a context that left its slot. They are given back when nobody holds this any more."""

    __slots__ = ("_pool", "pages")

    def __init__(self, pool: PagePool, pages: Sequence[int]) -> None:
        self._pool = pool
        self.pages = tuple(pages)
        pool.share(self.pages)

    def __del__(self) -> None:
        self._pool.give_back(self.pages)


class PagedBackend(CacheBackend[SavedPages]):
    """Slot i's tokens are in the pages `_tables[i]`, in order. Full pages may be shared; the last one, if it is being
    written, is its slot's alone.

    With `max_bytes` so much is allocated, once, when the first page is taken. Without, as much as the requests that are there
    may come to need; if that was too little pages double, up to a share of what the device had free then, or to what it has.
    """

    saves_in_place = True

    def __init__(self, runner: ModelRunner, end_ids: Sequence[int], *, max_bytes: int | None = None) -> None:
        self._runner, self._max_bytes = runner, max_bytes
        self._max_pages: int | None = None
        self._data, self._routes = self._zeros(1), self._no_routes(1)
        self.pool = PagePool()
        self._tables: list[list[int]] = []
        self._table_rows = np.zeros((0, 16), np.int32)
        self._copies: list[tuple[int, int]] = []
        self._graphs = GraphRunner(runner, self.attention, end_ids, keep_routes=self._keep_routes)

    @property
    def bytes_per_token(self) -> int:
        data, routes = self._data, self._runner.routes
        num_bytes = data.shape[0] * 2 * data.shape[4] * data.shape[5] * data.element_size()
        return num_bytes + (routes.num_bytes if routes else 0)

    def surely_has_room(self, *, num_slots: int, num_new: int, num_newcomers: int = 0) -> bool:
        # A newcomer that shares a part of a page has it copied.
        return self.pool.num_free >= num_slots + 2 * num_newcomers + num_new // PAGE

    def has_room(self, ends: Sequence[int], newcomers: Sequence[tuple[int, int]] = ()) -> bool:
        num_needed = sum(
            _pages(end) - len(table) for end, table in zip(ends, self._tables, strict=True) if end > len(table) * PAGE
        )
        num_needed += sum(_pages(end) - num_shared // PAGE for end, num_shared in newcomers)
        while num_needed > self.pool.num_free:
            if not self._grow():
                return False
        return True

    def forward_and_sample(
        self,
        starts: Sequence[int],
        uncached: Sequence[Sequence[int]],
        *,
        leaders: Sequence[int],
        rows: Sequence[RowSampling],
        num_drafted: Sequence[int] = (),
    ) -> PendingTokens:
        self._make_room([start + len(tokens) for start, tokens in zip(starts, uncached, strict=True)])
        return self._graphs.run(starts, uncached, leaders, rows, self._table_rows, num_drafted=num_drafted)

    def forward_next(
        self, previous: PendingTokens, source_rows: Sequence[int], starts: Sequence[int], *, rows: Sequence[RowSampling]
    ) -> PendingTokens | None:
        assert isinstance(previous, DeviceTokens)
        if not previous.is_plain or not self._graphs.are_plain(rows):
            return None
        self._make_room([start + 1 for start in starts])
        tokens = previous.tokens_of(source_rows)
        return self._graphs.run(starts, [(0,)] * len(starts), (), rows, self._table_rows, tokens=tokens)

    def _make_room(self, ends: Sequence[int]) -> None:
        """Slot i gets pages for `ends[i]` tokens."""
        self._tables += [[] for _ in range(len(ends) - len(self._tables))]
        for slot, end in enumerate(ends):
            table = self._tables[slot]
            if end > len(table) * PAGE:
                table += [self._take() for _ in range(_pages(end) - len(table))]
                self._write_row(slot)
        self._flush_copies()

    def attention(self, step: StepTensors) -> PagedAttention:
        """What the tokens of a step look at."""
        return PagedAttention(self._data, step)

    def routes(self, slot: int, start: int, end: int) -> NDArray[Any] | None:
        if self._routes is None:
            return None
        self._flush_copies()
        places = np.arange(start, end)
        rows = np.array(self._tables[slot])[places // PAGE] * PAGE + places % PAGE
        return self._routes.flatten(0, 1)[torch.from_numpy(rows).to(self._routes.device)].cpu().numpy()

    def _keep_routes(self, rows: Tensor, taken: Tensor) -> None:
        """Beside the keys of the same tokens: so they are shared and copied with them."""
        if self._routes is not None:
            self._routes.flatten(0, 1).index_copy_(0, rows.long(), taken)

    def copy(self, source: int, target: int, *, length: int) -> None:
        self._fill(target, self._tables[source], length=length)

    def save_prefix(self, slot: int, *, length: int) -> SavedPages:
        return SavedPages(self.pool, self._tables[slot][: _pages(length)])

    def restore_prefix(self, slot: int, saved: SavedPages, *, length: int) -> None:
        self._fill(slot, saved.pages, length=length)

    def free_slot(self, slot: int, last: int, *, length: int) -> None:
        self.pool.give_back(self._tables[slot])
        moved = self._tables.pop()
        if slot != last:
            self._tables[slot] = moved
            self._write_row(slot)

    def free(self) -> None:
        for table in self._tables:
            self.pool.give_back(table)
        self._tables.clear()
        self._copies.clear()
        self._graphs.invalidate()
        self.pool = PagePool()
        self._data, self._routes = self._zeros(1), self._no_routes(1)
        self._max_pages = None

    def _fill(self, slot: int, pages: Sequence[int], *, length: int) -> None:
        """The next slot holds the first `length` places of these pages: full ones are shared, the last is copied."""
        self._tables += [[] for _ in range(slot - len(self._tables))]
        num_full, num_more = divmod(length, PAGE)
        table = list(pages[:num_full])
        self.pool.share(table)
        if num_more:
            own = self._take()
            self._copies.append((pages[num_full], own))
            table.append(own)
        self._tables.append(table)
        self._write_row(slot)

    def _write_row(self, slot: int) -> None:
        """Note a slot's pages where the steps read them."""
        table, (num_slots, num_pages) = self._tables[slot], self._table_rows.shape
        if slot >= num_slots or len(table) > num_pages:
            larger = np.zeros((max(num_slots, 2 * slot + 16), max(num_pages, 2 * len(table))), np.int32)
            larger[:num_slots, :num_pages] = self._table_rows
            self._table_rows = larger
        self._table_rows[slot, : len(table)] = table

    def _flush_copies(self) -> None:
        """Copy pages that were to be copied, all at once. In order of asking: a copy may be copied again."""
        while self._copies:
            targets: set[int] = set()
            now = []
            for source, target in self._copies:
                if source in targets:
                    break
                targets.add(target)
                now.append((source, target))
            self._copies = self._copies[len(now) :]
            sources, copies = torch.tensor(now, device=self._data.device).unbind(1)
            self._data[:, :, copies] = self._data[:, :, sources]
            if self._routes is not None:
                self._routes[copies] = self._routes[sources]

    def _take(self) -> int:
        if not self.pool.num_free and not self._grow():
            raise torch.OutOfMemoryError("the engine's cache is full: room must be asked for before it is taken")
        return self.pool.take()

    def _grow(self) -> bool:
        """More pages, unless the budget is used up. Graphs hold addresses of the old ones: they are captured anew."""
        if self._max_pages is None:
            self._max_pages = self._affordable_pages()
        old, old_routes, num_pages = self._data, self._routes, self._max_pages
        if self._max_bytes is None:
            foreseen = min(1 + sum(map(_pages, self.foreseen)), int(_SHARE_AT_ONCE * num_pages))
            num_pages = min(num_pages, max(_FIRST_PAGES, 2 * self.pool.num_pages, foreseen))
        if num_pages <= self.pool.num_pages:
            return False
        try:
            self._data, self._routes = self._zeros(num_pages), self._no_routes(num_pages)
        except torch.OutOfMemoryError as error:
            if self._max_bytes is not None or self.pool.num_pages == 1:
                needed = num_pages * PAGE * self.bytes_per_token / 2**30
                raise torch.OutOfMemoryError(
                    f"there is no room for an engine's cache of {needed:.1f} GiB: lower engine.cache_gib, or "
                    f"policy.strategy.micro_batch_tokens ({error})"
                ) from error
            self._max_pages = self.pool.num_pages  # Who needs more gives way to others.
            log.warning("the engine's cache stays at %.1f GiB: the device has no room for more", old.nbytes / 2**30)
            return False
        self._data[:, :, : old.shape[2]] = old
        if self._routes is not None and old_routes is not None:
            self._routes[: len(old_routes)] = old_routes
        self._graphs.invalidate()
        self.pool.grow(num_pages)
        return True

    def _affordable_pages(self) -> int:
        """Pages that the budget pays for, the one for padding among them."""
        if self._max_bytes is None and self._runner.device.type != "cuda":
            return sys.maxsize
        num_bytes = _SHARE_OF_FREE * _free_bytes(self._runner.device) if self._max_bytes is None else self._max_bytes
        return max(2, int(num_bytes) // (PAGE * self.bytes_per_token))

    def _zeros(self, num_pages: int) -> Tensor:
        """[layers, 2, pages, PAGE, heads, dim]"""
        runner = self._runner
        shape = (runner.num_layers, 2, num_pages, PAGE, runner.num_kv_heads, runner.head_dim)
        return torch.zeros(shape, dtype=runner.dtype, device=runner.device)

    def _no_routes(self, num_pages: int) -> Tensor | None:
        """[pages, PAGE, layers, top_k], where the experts of tokens are noted."""
        shape = self._runner.routes
        if shape is None:
            return None
        return torch.zeros((num_pages, PAGE, shape.num_layers, shape.top_k), dtype=shape.dtype, device=self._runner.device)


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def _free_bytes(device: torch.device) -> int:
    """What this process could still allocate."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class PagedAttention:
    """New tokens go to their pages, and look at those of their sequence."""

    def __init__(self, data: Tensor, step: StepTensors) -> None:
        self._data = data
        self._step = step

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        step, (keys, values) = self._step, self._data[layer]
        check_fits(key, num_heads=keys.shape[2], head_dim=keys.shape[3])
        store(key, value, keys, values, step.rows)
        program = AttendProgram(step.block_rows)
        if step.block_rows == WRITING_ROWS and is_exact():
            program = writing_program(HeadShape.of(query, keys, scoring), query.device)
        return attend(
            query,
            keys,
            values,
            tables=step.tables,
            starts=step.starts,
            bounds=step.bounds,
            block_sequence=step.block_sequence,
            block_first=step.block_first,
            rows=program.rows,
            num_warps=program.num_warps,
            num_stages=program.num_stages,
            scoring=scoring,
        )
