"""How vLLM draws tokens for reroll: with the embedded engine's sampler, called where vLLM lets logits be changed.

vLLM's own settings cannot report what a trainer needs. `raw_logprobs` ignores the temperature; `processed_logprobs` are
those after top-p, top-k and `min_tokens`; and a seed gives other tokens once a request is interrupted and continued. So
every request is greedy for vLLM, and this processor leaves it one token to take: the drawn one, whose "logit" is the
log-prob to report.

There are two ways for that number to the engine. Where the processor is in the engine's process, it is asked for those of
each step (`SamplingProcessor.logprobs`). Where it is in another, which tensor parallelism makes, vLLM carries them:
`logprobs_mode="processed_logits"` hands them back as they are. That way costs vLLM an object per token, so it is for there
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import SamplingParams as VllmParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from reroll.infer.embedded.sampler import RowSampling, sample_on_device, uniforms
from reroll_zoo.paged_cache.plain_sampling import is_plain, sample_plain_on_device

_KEY = "reroll"
"""Under which a request's own parameters carry what the processor needs."""


def sampling_args(name: str, row: RowSampling, *, num_held_back: int) -> dict[str, Any]:
    """The `extra_args` of a request that is drawn by `row`, whose `forbidden` hold for its first `num_held_back` tokens."""
    return {_KEY: {"name": name, "row": asdict(row), "num_held_back": num_held_back}}


@dataclass(frozen=True, slots=True)
class _BatchRow:
    """A request in vLLM's batch."""

    name: str
    sampling: RowSampling
    early_sampling: RowSampling
    num_held_back: int
    num_prompt: int
    written: list[int]
    """vLLM's own list, which grows as tokens are drawn: one that has not reached the host yet has its place in it."""


class _BatchSampling:
    """How the rows of a batch are sampled: as columns, so that a step over hundreds of them is a few array operations."""

    def __init__(self, rows: Sequence[_BatchRow], *, device: torch.device, is_pinned: bool) -> None:
        self.names = [row.name for row in rows]
        self._rows = rows
        self._device, self._is_pinned = device, is_pinned
        self._seeds = [row.sampling.seed for row in rows]
        self._written = [row.written for row in rows]
        self._num_prompt = np.array([row.num_prompt for row in rows])
        self._num_held_back = np.array([row.num_held_back for row in rows])
        self._temperatures = np.array([row.sampling.temperature for row in rows])
        held_back = {row.early_sampling.forbidden for row in rows if row.num_held_back > 0}
        self._is_plain = len(held_back) <= 1 and all(is_plain(row.sampling, ()) for row in rows)
        self._end_ids = _on_device(tuple(token for tokens in held_back for token in tokens), device)

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each row, and its log-prob."""
        num_written = np.fromiter(map(len, self._written), np.int64, len(self._written))
        positions = (self._num_prompt + num_written).tolist()
        may_end = num_written >= self._num_held_back
        if not self._is_plain:
            rows = [row.sampling if late else row.early_sampling for row, late in zip(self._rows, may_end, strict=True)]
            return sample_on_device(logits, rows, positions)
        temperatures, uniform, ends = self._sent(self._temperatures, uniforms(self._seeds, positions), may_end)
        drawn = sample_plain_on_device(logits, temperatures=temperatures, uniform=uniform, may_end=ends, end_ids=self._end_ids)
        return drawn[0].long(), drawn[1]

    def _sent(self, *columns: NDArray[Any]) -> Tensor:
        """On the device, without waiting for what it works on."""
        here = torch.empty((len(columns), len(self.names)), dtype=torch.float64, pin_memory=self._is_pinned)
        np.stack(columns, out=here.numpy())
        return here.to(self._device, non_blocking=True)


@lru_cache(maxsize=16)
def _on_device(token_ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, because a copy of a few numbers waits for all that the device works on."""
    return torch.tensor(token_ids, dtype=torch.int64, device=device)


class StepLogprobs:
    """The log-probs of one step, on their way to the host while the device goes on."""

    def __init__(self, names: list[str], logprobs: Tensor, *, is_pinned: bool) -> None:
        self._names, self._logprobs = names, logprobs
        self._arrival: torch.cuda.Event | None = None
        if logprobs.is_cuda:
            self._logprobs = torch.empty(logprobs.shape, dtype=logprobs.dtype, pin_memory=is_pinned)
            self._logprobs.copy_(logprobs, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def by_name(self) -> dict[str, float]:
        """By the name of the request. Those of prompts read in part are among them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return dict(zip(self._names, self._logprobs.tolist(), strict=True))


class SamplingProcessor(LogitsProcessor):
    """Draws a token for each row and leaves no other. All requests of the engine must carry `sampling_args`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device, self._is_pinned = device, is_pin_memory
        self._rows: dict[int, _BatchRow] = {}
        self._batch: _BatchSampling | None = None
        """None when the rows have changed."""
        self.logprobs: StepLogprobs | None = None
        """In the step that was launched last."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self._rows, batch_update, _batch_row):
            self._batch = None

    def apply(self, logits: Tensor) -> Tensor:
        if not self._rows:  # vLLM tries its sampler out before there are requests.
            return logits
        if self._batch is None:
            rows = [self._rows[index] for index in range(len(logits))]
            self._batch = _BatchSampling(rows, device=self._device, is_pinned=self._is_pinned)
        tokens, logprobs = self._batch.sample(logits)
        self.logprobs = StepLogprobs(self._batch.names, logprobs, is_pinned=self._is_pinned)
        lowest = torch.finfo(logits.dtype).min
        return logits.fill_(lowest).scatter_(1, tokens[:, None], logprobs[:, None].to(logits.dtype))


def _batch_row(params: VllmParams, prompt_ids: list[int] | None, written: list[int]) -> _BatchRow:
    assert params.extra_args is not None
    given = params.extra_args[_KEY]
    early_sampling = RowSampling(**given["row"])
    return _BatchRow(
        name=given["name"],
        sampling=replace(early_sampling, forbidden=()),
        early_sampling=early_sampling,
        num_held_back=given["num_held_back"],
        num_prompt=len(prompt_ids or ()),
        written=written,
    )
