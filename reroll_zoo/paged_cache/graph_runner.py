"""One engine step on a GPU: its inputs in one buffer, its kernels in one CUDA graph.

Steps of nearly equal size share a graph: tokens and rows are padded up to the graph's size. Padding tokens write to a page
that nobody reads and belong to no sequence; padding rows draw tokens that nobody takes.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from reroll.infer.embedded.backend import sampled_places
from reroll.infer.embedded.model_runner import ModelRunner
from reroll.infer.embedded.sampler import RowSampling, sample, uniforms
from reroll.models.attention import Attention
from reroll.models.exact import can_be_exact, exact_forward
from reroll_zoo.paged_cache.kernels import PAGE, READING_ROWS, WRITING_ROWS, tokens_per_block
from reroll_zoo.paged_cache.plain_sampling import is_plain, sample_plain_on_device

_MAX_GRAPH_TOKENS = 2048
"""Larger steps keep the GPU busy without a graph."""

_WORTH_A_GRAPH = 3
"""Steps of one size before a graph is captured for it, which takes as long as several steps without."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a step's tensors are sized for, padding included."""

    num_tokens: int
    num_rows: int
    num_blocks: int
    num_pages: int
    """Pages of the longest sequence."""
    block_rows: int

    def parts(self) -> list[int]:
        tokens, rows = self.num_tokens, self.num_rows
        return [tokens, tokens, tokens, rows, rows, rows + 1, self.num_blocks, self.num_blocks, rows * self.num_pages]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The inputs of a step: views of one buffer of integers and one of floats."""

    ids: Tensor
    positions: Tensor
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
    def of(cls, size: Size, int_inputs: Tensor, float_inputs: Tensor) -> StepTensors:
        ids, positions, rows, last, starts, bounds, block_sequence, block_first, tables = torch.split(int_inputs, size.parts())
        temperatures, uniform, may_end = float_inputs.view(3, size.num_rows)
        return cls(
            ids=ids,
            positions=positions,
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
    int_inputs: Tensor
    float_inputs: Tensor
    sampled: Tensor
    logits: Tensor


class DeviceTokens:
    """The tokens of a step that the device works on, and their copy on its way to the host."""

    def __init__(
        self,
        sampled: Tensor,
        logits: Tensor,
        rows: Sequence[RowSampling],
        positions: Sequence[int],
        others: Sequence[int],
        model: PreTrainedModel,
    ) -> None:
        self._sampled = sampled  # Another step of the same size overwrites it.
        self._model = model
        self._rows, self._positions, self._others = rows, positions, others
        self._other_logits = logits[torch.tensor(others, device=logits.device)] if others else None
        is_cuda = sampled.device.type == "cuda"
        self._host = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=is_cuda)
        self._host.copy_(sampled, non_blocking=True)
        self._arrived = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    @property
    def is_plain(self) -> bool:
        """Whether every token is sampled on the device."""
        return not self._others

    def tokens_of(self, rows: Sequence[int]) -> Tensor:
        """The tokens of these rows, on the device, where nobody waits for them. Only until another step is started."""
        if list(rows) == list(range(len(rows))):
            return self._sampled[0, : len(rows)]
        return self._sampled[0, torch.tensor(rows, device=self._sampled.device)]

    def result(self) -> tuple[list[int], list[float]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers = self._host[:, : len(self._rows)].numpy()
        tokens, logprobs = numbers[0].astype(int).tolist(), numbers[1].tolist()
        if self._other_logits is not None:
            rows = [self._rows[place] for place in self._others]
            positions = [self._positions[place] for place in self._others]
            with exact_forward(self._model):
                drawn = sample(self._other_logits, rows, positions)
            for place, token, logprob in zip(self._others, *drawn, strict=True):
                tokens[place], logprobs[place] = token, logprob
        return tokens, logprobs


class GraphRunner:
    """Runs steps, as CUDA graphs where it pays; captures the graphs as it goes."""

    def __init__(
        self,
        runner: ModelRunner,
        attention: Callable[[StepTensors], Attention],
        end_ids: Sequence[int],
        *,
        keep_routes: Callable[[Tensor, Tensor], None],
    ) -> None:
        """`keep_routes` gets `StepTensors.rows` and the experts that their tokens went to, where these are noted."""
        self._runner, self._keep_routes = runner, keep_routes
        self._end_ids = tuple(end_ids)
        self._end_tensor = torch.tensor(self._end_ids, dtype=torch.int64, device=runner.device)
        self._attention = attention
        self._may_capture = can_be_captured(runner.model)
        self._graphs: dict[Size, _Graph] = {}
        self._num_seen: Counter[Size] = Counter()
        self._weights = runner.address_version
        self._memory_pool: Any = None

    def run(
        self,
        starts: Sequence[int],
        uncached: Sequence[Sequence[int]],
        leaders: Sequence[int],
        rows: Sequence[RowSampling],
        tables: NDArray[np.int32],
        *,
        num_drafted: Sequence[int] = (),
        tokens: Tensor | None = None,
    ) -> DeviceTokens:
        """Start a step; see `CacheBackend.forward_and_sample`. Row i of `tables` holds the pages of slot i.

        `tokens` [R], on the device, stand in the place of `uncached`, which then says only that each slot reads one.
        """
        lengths = [len(tokens) for tokens in uncached]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        slots, places = sampled_places(lengths, leaders, num_drafted)
        positions = [starts[slot] + place + 1 for slot, place in zip(slots, places, strict=True)]
        size, is_graph = self._size(lengths, num_rows=len(rows), num_pages=-(-max(ends) // PAGE))
        int_inputs = _int_inputs(size, starts, uncached, (slots, places), tables, self._tokens(size.block_rows))
        float_inputs = _float_inputs(size, rows, positions)
        graph = self._graph(size) if is_graph else None
        device = self._runner.device
        if graph is None:
            ints_on_device, floats_on_device = int_inputs.to(device), float_inputs.to(device)
        else:
            ints_on_device, floats_on_device = graph.int_inputs, graph.float_inputs
            ints_on_device.copy_(int_inputs, non_blocking=True)
            floats_on_device.copy_(float_inputs, non_blocking=True)
        if tokens is not None:
            ints_on_device[: len(rows)] = tokens
        if graph is None:
            sampled, logits = self._forward(size, ints_on_device, floats_on_device)
        else:
            graph.graph.replay()
            sampled, logits = graph.sampled, graph.logits
        others = [place for place, row in enumerate(rows) if not is_plain(row, self._end_ids)]
        return DeviceTokens(sampled, logits, rows, positions, others, self._runner.model)

    def are_plain(self, rows: Sequence[RowSampling]) -> bool:
        """Whether all these can be sampled on the device."""
        return all(is_plain(row, self._end_ids) for row in rows)

    def invalidate(self) -> None:
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
        block_rows = WRITING_ROWS if is_writing else READING_ROWS
        num_blocks = num_tokens if is_writing else num_tokens // self._tokens(block_rows) + num_rows
        return Size(num_tokens, num_rows, num_blocks, num_pages, block_rows), is_graph

    def _tokens(self, block_rows: int) -> int:
        return tokens_per_block(self._runner.num_heads, self._runner.num_kv_heads, rows=block_rows)

    def _forward(self, size: Size, int_inputs: Tensor, float_inputs: Tensor) -> tuple[Tensor, Tensor]:
        step = StepTensors.of(size, int_inputs, float_inputs)
        noted = self._runner.noted_routes()
        hidden = self._runner.hidden(step.ids, step.positions, self._attention(step), noted)
        if noted is not None:
            self._keep_routes(step.rows, noted.taken())
        logits = self._runner.logits(hidden[step.last])
        with exact_forward(self._runner.model):
            sampled = sample_plain_on_device(
                logits,
                temperatures=step.temperatures,
                uniform=step.uniforms,
                may_end=step.may_end,
                end_ids=self._end_tensor,
            )
        return sampled, logits

    def _graph(self, size: Size) -> _Graph | None:
        """The graph for steps of this size, if they come often enough to be worth one."""
        if self._weights != self._runner.address_version:
            self.invalidate()
            self._weights = self._runner.address_version
        self._num_seen[size] += 1
        if size not in self._graphs and self._num_seen[size] >= _WORTH_A_GRAPH:
            self._graphs[size] = self._capture(size)
        return self._graphs.get(size)

    def _capture(self, size: Size) -> _Graph:
        device = self._runner.device
        int_inputs = torch.zeros(sum(size.parts()), dtype=torch.int32, device=device)
        float_inputs = torch.full((3 * size.num_rows,), 0.5, dtype=torch.float64, device=device)
        step = StepTensors.of(size, int_inputs, float_inputs)
        # One real token, which predicts every row, so that nothing that is sampled from is left undefined. The others write
        # where it does not look.
        step.rows[1:] = 1
        step.bounds[1:] = 1
        step.block_sequence[1:] = -1
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._forward(size, int_inputs, float_inputs)  # Kernels are compiled and workspaces made before the capture.
        torch.cuda.current_stream(device).wait_stream(stream)
        if self._memory_pool is None:
            self._memory_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._memory_pool, stream=stream, capture_error_mode="thread_local")
        with _nothing_collected(), capture:
            sampled, logits = self._forward(size, int_inputs, float_inputs)
        return _Graph(graph, int_inputs, float_inputs, sampled, logits)


def can_be_captured(model: PreTrainedModel) -> bool:
    """Whether a GPU can run it as a CUDA graph."""
    return model.device.type == "cuda" and not asks_host(model)


def asks_host(model: PreTrainedModel) -> bool:
    """Whether experts (they lie stacked) ask the host for counts: in fp32, exact, or outside of transformers' interface for
    experts, which marks the modules that run through it."""
    stacks = [module for module in model.modules() if any(each.ndim == 3 for each in module.parameters(recurse=False))]
    asks = model.dtype == torch.float32 or can_be_exact(model)
    return any(asks or not hasattr(module, "is_transposed") for module in stacks)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python's collector waits: a dead engine's graph lies in a cycle, and to free it would break the capture off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _padded(number: int, *, fine: bool) -> int:
    """The next power of two from 16 on, or (fine) three quarters of it if that is enough."""
    power = max(16, 1 << (number - 1).bit_length())
    return 3 * power // 4 if fine and number <= 3 * power // 4 else power


def _int_inputs(
    size: Size,
    starts: Sequence[int],
    uncached: Sequence[Sequence[int]],
    sampled: tuple[Sequence[int], Sequence[int]],
    tables: NDArray[np.int32],
    tokens_per_block: int,
) -> Tensor:
    """The integer inputs of a step, in one buffer on the host. `sampled`: see `sampled_places`."""
    buffer = torch.zeros(sum(size.parts()), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    ids, positions, targets, last, first_positions, bounds, block_sequence, block_first, pages = (
        part.numpy() for part in torch.split(buffer, size.parts())
    )
    num_sequences = len(starts)
    lengths = np.fromiter(map(len, uncached), np.int64, num_sequences)
    ends = np.cumsum(lengths)
    num_tokens = int(ends[-1])
    sequence = np.repeat(np.arange(num_sequences), lengths)
    first_positions[:num_sequences] = starts

    ids[:num_tokens] = [token for tokens in uncached for token in tokens]
    positions[:num_tokens] = np.arange(num_tokens) + (first_positions[:num_sequences] - ends + lengths)[sequence]
    pages_here = pages.reshape(size.num_rows, size.num_pages)
    width = min(size.num_pages, tables.shape[1])
    pages_here[:num_sequences, :width] = tables[:num_sequences, :width]
    here = positions[:num_tokens]
    targets[:num_tokens] = pages_here[sequence, here // PAGE] * PAGE + here % PAGE
    slots, places = sampled
    last[: len(slots)] = (ends - lengths)[np.array(slots)] + np.array(places)
    bounds[1 : num_sequences + 1] = ends
    bounds[num_sequences + 1 :] = num_tokens

    num_blocks = -(-lengths // tokens_per_block)
    total = int(num_blocks.sum())
    block_sequence[:total] = np.repeat(np.arange(num_sequences), num_blocks)
    block_sequence[total:] = -1
    block_first[:total] = (np.arange(total) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)) * tokens_per_block
    return buffer


def _float_inputs(size: Size, rows: Sequence[RowSampling], positions: Sequence[int]) -> Tensor:
    """The float inputs of a step, in one buffer on the host: how each row is sampled."""
    buffer = torch.full((3 * size.num_rows,), 0.5, dtype=torch.float64, pin_memory=torch.cuda.is_available())
    temperatures, uniform, may_end = buffer.numpy().reshape(3, -1)[:, : len(rows)]
    temperatures[:] = [row.temperature for row in rows]
    uniform[:] = uniforms([row.seed for row in rows], positions)
    may_end[:] = [not row.forbidden for row in rows]
    return buffer
