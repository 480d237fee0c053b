"""One engine step on a GPU: its inputs in one buffer, its kernels in one CUDA graph.

Steps of nearly equal size share a graph: tokens and rows are padded up to the graph's size. Padding tokens write to a page
that nobody reads and belong to no sequence; padding rows draw tokens that nobody takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reroll.infer.embedded.kernels import PAGE, tokens_per_block
from reroll.infer.embedded.network import Network
from reroll.infer.embedded.sampler import Row, draw, is_plain, sample, uniforms
from reroll.models.attention import Attention

_MAX_GRAPH_TOKENS = 2048
"""Larger steps keep the GPU busy without a graph."""

_WORTH_A_GRAPH = 3
"""Steps of one size before a graph is captured for it, which takes as long as several steps without."""

_WRITING_ROWS, _READING_ROWS = 16, 64
"""Rows of an attention program where every sequence has one token, and where some have many."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a step's tensors are sized for, padding included."""

    num_tokens: int
    num_rows: int
    num_blocks: int
    num_pages: int
    """Of the longest sequence."""
    block_rows: int

    def parts(self) -> list[int]:
        tokens, rows = self.num_tokens, self.num_rows
        return [tokens, tokens, tokens, rows, rows, rows + 1, self.num_blocks, self.num_blocks, rows * self.num_pages]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The inputs of a step: views of one buffer of whole numbers, and one of fractions."""

    ids: Tensor
    places: Tensor
    """Where each token stands in its sequence."""
    rows: Tensor
    """Where its keys and values go: page × PAGE + offset."""
    last: Tensor
    """For each row of the result, the token that predicts it."""
    starts: Tensor
    bounds: Tensor
    block_sequence: Tensor
    block_first: Tensor
    tables: Tensor
    block_rows: int
    temperatures: Tensor
    uniforms: Tensor
    may_end: Tensor

    @classmethod
    def of(cls, size: Size, whole: Tensor, fractions: Tensor) -> StepTensors:
        ids, places, rows, last, starts, bounds, block_sequence, block_first, tables = torch.split(whole, size.parts())
        temperatures, uniform, may_end = fractions.view(3, size.num_rows)
        return cls(
            ids=ids,
            places=places,
            rows=rows,
            last=last,
            starts=starts,
            bounds=bounds,
            block_sequence=block_sequence,
            block_first=block_first,
            tables=tables.view(size.num_rows, size.num_pages),
            block_rows=size.block_rows,
            temperatures=temperatures,
            uniforms=uniform,
            may_end=may_end,
        )


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    whole: Tensor
    fractions: Tensor
    drawn: Tensor
    logits: Tensor


class StepDrawing:
    """A step that the device works on. Its tokens are on their way to the host, whatever runs after it."""

    def __init__(
        self, drawn: Tensor, logits: Tensor, rows: Sequence[Row], positions: Sequence[int], others: Sequence[int]
    ) -> None:
        self._drawn = drawn  # Another step of the same size overwrites it.
        self._rows, self._positions, self._others = rows, positions, others
        self._other_logits = logits[torch.tensor(others, device=logits.device)] if others else None
        is_cuda = drawn.device.type == "cuda"
        self._host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=is_cuda)
        self._host.copy_(drawn, non_blocking=True)
        self._arrived = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    @property
    def is_plain(self) -> bool:
        """Whether every token is drawn on the device."""
        return not self._others

    def tokens_of(self, rows: Sequence[int]) -> Tensor:
        """The tokens of these rows, on the device, where nobody waits for them. Only until another step is started."""
        if list(rows) == list(range(len(rows))):
            return self._drawn[0, : len(rows)]
        return self._drawn[0, torch.tensor(rows, device=self._drawn.device)]

    def wait(self) -> tuple[list[int], list[float]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers = self._host[:, : len(self._rows)].numpy()
        tokens, logprobs = numbers[0].astype(int).tolist(), numbers[1].tolist()
        if self._other_logits is not None:
            rows = [self._rows[place] for place in self._others]
            positions = [self._positions[place] for place in self._others]
            for place, token, logprob in zip(self._others, *sample(self._other_logits, rows, positions), strict=True):
                tokens[place], logprobs[place] = token, logprob
        return tokens, logprobs


class Steps:
    """Runs steps; captures the graphs it needs as it goes."""

    def __init__(self, network: Network, attention: Callable[[StepTensors], Attention], end_ids: Sequence[int]) -> None:
        self._network = network
        self._end_ids = tuple(end_ids)
        self._end_tensor = torch.tensor(self._end_ids, dtype=torch.int64, device=network.device)
        self._attention = attention
        self._may_capture = network.can_be_captured
        self._graphs: dict[Size, _Graph] = {}
        self._num_seen: Counter[Size] = Counter()
        self._weights = network.addresses
        self._memory_pool: Any = None

    def run(
        self,
        starts: Sequence[int],
        unread: Sequence[Sequence[int]],
        leaders: Sequence[int],
        rows: Sequence[Row],
        tables: NDArray[np.int32],
        *,
        tokens: Tensor | None = None,
    ) -> StepDrawing:
        """Start a step; see `Memory.read`. Row i of `tables` holds the pages of slot i.

        `tokens` [R], on the device, stand in the place of `unread`, which then says only that each slot reads one.
        """
        lengths = [len(tokens) for tokens in unread]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        positions = [*ends, *(ends[leader] for leader in leaders)]
        size, is_graph = self._size(lengths, num_rows=len(rows), num_pages=-(-max(ends) // PAGE))
        whole = _whole(size, starts, unread, leaders, tables, self._tokens(size.block_rows))
        fractions = _fractions(size, rows, positions)
        graph = self._graph(size) if is_graph else None
        device = self._network.device
        if graph is None:
            there, fractions_there = whole.to(device), fractions.to(device)
        else:
            there, fractions_there = graph.whole, graph.fractions
            there.copy_(whole, non_blocking=True)
            fractions_there.copy_(fractions, non_blocking=True)
        if tokens is not None:
            there[: len(rows)] = tokens
        if graph is None:
            drawn, logits = self._forward(size, there, fractions_there)
        else:
            graph.graph.replay()
            drawn, logits = graph.drawn, graph.logits
        others = [place for place, row in enumerate(rows) if not is_plain(row, self._end_ids)]
        return StepDrawing(drawn, logits, rows, positions, others)

    def are_plain(self, rows: Sequence[Row]) -> bool:
        """Whether all these can be drawn on the device."""
        return all(is_plain(row, self._end_ids) for row in rows)

    def forget(self) -> None:
        """Addresses changed: every graph is captured anew when it is next needed."""
        self._graphs.clear()
        self._num_seen.clear()

    def _size(self, lengths: Sequence[int], *, num_rows: int, num_pages: int) -> tuple[Size, bool]:
        num_tokens, is_writing = sum(lengths), max(lengths) == 1
        is_graph = self._may_capture and num_tokens <= _MAX_GRAPH_TOKENS
        if is_graph:
            num_rows = _padded(num_rows, fine=is_writing)
            num_tokens = num_rows if is_writing else max(num_rows, _padded(num_tokens, fine=False))
            num_pages = 4 ** math.ceil(math.log(max(num_pages, 16), 4))
        block_rows = _WRITING_ROWS if is_writing else _READING_ROWS
        num_blocks = num_tokens if is_writing else num_tokens // self._tokens(block_rows) + num_rows
        return Size(num_tokens, num_rows, num_blocks, num_pages, block_rows), is_graph

    def _tokens(self, block_rows: int) -> int:
        return tokens_per_block(self._network.num_heads, self._network.num_kv_heads, rows=block_rows)

    def _forward(self, size: Size, whole: Tensor, fractions: Tensor) -> tuple[Tensor, Tensor]:
        step = StepTensors.of(size, whole, fractions)
        hidden = self._network.hidden(step.ids, step.places, self._attention(step))
        logits = self._network.logits(hidden[step.last])
        drawn = draw(
            logits,
            temperatures=step.temperatures,
            uniform=step.uniforms,
            may_end=step.may_end,
            end_ids=self._end_tensor,
        )
        return drawn, logits

    def _graph(self, size: Size) -> _Graph | None:
        """The graph for steps of this size, if they come often enough to be worth one."""
        if self._weights != self._network.addresses:
            self.forget()
            self._weights = self._network.addresses
        self._num_seen[size] += 1
        if size not in self._graphs and self._num_seen[size] >= _WORTH_A_GRAPH:
            self._graphs[size] = self._capture(size)
        return self._graphs.get(size)

    def _capture(self, size: Size) -> _Graph:
        device = self._network.device
        whole = torch.zeros(sum(size.parts()), dtype=torch.int32, device=device)
        fractions = torch.full((3 * size.num_rows,), 0.5, dtype=torch.float64, device=device)
        step = StepTensors.of(size, whole, fractions)
        # One real token, which predicts every row, so that nothing that is drawn from is left undefined. The others write
        # where it does not look.
        step.rows[1:] = 1
        step.bounds[1:] = 1
        step.block_sequence[1:] = -1
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._forward(size, whole, fractions)  # Kernels are compiled and workspaces made before the capture.
        torch.cuda.current_stream(device).wait_stream(stream)
        if self._memory_pool is None:
            self._memory_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool, stream=stream, capture_error_mode="thread_local"):
            drawn, logits = self._forward(size, whole, fractions)
        return _Graph(graph, whole, fractions, drawn, logits)


def _padded(number: int, *, fine: bool) -> int:
    """The next power of two from 16 on, or (fine) three quarters of it if that is enough."""
    power = max(16, 1 << (number - 1).bit_length())
    return 3 * power // 4 if fine and number <= 3 * power // 4 else power


def _whole(
    size: Size,
    starts: Sequence[int],
    unread: Sequence[Sequence[int]],
    leaders: Sequence[int],
    tables: NDArray[np.int32],
    tokens_per_block: int,
) -> Tensor:
    """The whole numbers of a step, on the host."""
    buffer = torch.zeros(sum(size.parts()), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    ids, places, targets, last, first_places, bounds, block_sequence, block_first, pages = (
        part.numpy() for part in torch.split(buffer, size.parts())
    )
    num_sequences = len(starts)
    lengths = np.fromiter(map(len, unread), np.int64, num_sequences)
    ends = np.cumsum(lengths)
    num_tokens = int(ends[-1])
    sequence = np.repeat(np.arange(num_sequences), lengths)
    first_places[:num_sequences] = starts

    ids[:num_tokens] = [token for tokens in unread for token in tokens]
    places[:num_tokens] = np.arange(num_tokens) + (first_places[:num_sequences] - ends + lengths)[sequence]
    pages_here = pages.reshape(size.num_rows, size.num_pages)
    width = min(size.num_pages, tables.shape[1])
    pages_here[:num_sequences, :width] = tables[:num_sequences, :width]
    here = places[:num_tokens]
    targets[:num_tokens] = pages_here[sequence, here // PAGE] * PAGE + here % PAGE
    last[:num_sequences] = ends - 1
    last[num_sequences : num_sequences + len(leaders)] = ends[np.array(leaders, int)] - 1
    bounds[1 : num_sequences + 1] = ends
    bounds[num_sequences + 1 :] = num_tokens

    num_blocks = -(-lengths // tokens_per_block)
    total = int(num_blocks.sum())
    block_sequence[:total] = np.repeat(np.arange(num_sequences), num_blocks)
    block_sequence[total:] = -1
    block_first[:total] = (np.arange(total) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)) * tokens_per_block
    return buffer


def _fractions(size: Size, rows: Sequence[Row], positions: Sequence[int]) -> Tensor:
    """How each row is drawn, on the host."""
    buffer = torch.full((3 * size.num_rows,), 0.5, dtype=torch.float64, pin_memory=torch.cuda.is_available())
    temperatures, uniform, may_end = buffer.numpy().reshape(3, -1)[:, : len(rows)]
    temperatures[:] = [row.temperature for row in rows]
    uniform[:] = uniforms([row.seed for row in rows], positions)
    may_end[:] = [not row.forbidden for row in rows]
    return buffer
