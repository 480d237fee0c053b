"""sglang behind reroll's engine seam: in a process of its own, a step for every letter, drawing as reroll draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from reroll.config.parts import LoraConfig
from reroll.config.parts import SglangEngine as SglangConfig
from reroll.infer.draft import early_row, end_ids
from reroll.infer.guest import GuestEngine
from reroll.infer.sglang.letters import Fill, Forget, Letter, Limit, Opening, Sleep, Start, Step, Wake, Written
from reroll.infer.sglang.process import SglangProcess
from reroll.infer.whole import Weights
from reroll.models.load import DTYPES, Precision, load_tokenizer, resolve_base
from reroll.weights.carriers import Carrier, GpuCarrier, MappedCarrier
from reroll.weights.parcel import Entry, aligned, put

_BLOCK_TOKENS = 16
"""The smaller, the more of a context others share; the larger, the less sglang does for each step."""
_BUCKET_BYTES = 256 * 2**20


class SglangEngine(GuestEngine):
    """sglang in a process of its own. A request waits here while a sibling reads the prompt that they share, because sglang
    would read it for each."""

    def __init__(
        self,
        process: SglangProcess,
        tokenizer: PreTrainedTokenizerBase,
        weights: Weights,
        *,
        end_ids: frozenset[int],
        dtype: torch.dtype,
        device: str,
        max_running: int,
        can_sleep: bool,
    ) -> None:
        super().__init__(
            tokenizer,
            weights,
            end_ids=end_ids,
            max_length=process.ready.max_length,
            block_tokens=process.ready.block_tokens,
            takes_parts=process.ready.takes_parts,
            can_sleep=can_sleep,
        )
        self._process, self._dtype, self._device = process, dtype, torch.device(device)
        self._readers: dict[tuple[int, ...], str] = {}
        """Of each prompt that is being read, the ticket that reads it."""
        self._followers: dict[str, list[str]] = {}
        """Tickets that wait for one that reads their prompt."""
        self._starts: dict[str, None] = {}
        self._ends: list[str] = []
        """Tickets that the next step takes in, or ends."""
        self._process.ask(Limit(max_running))

    @classmethod
    def open(
        cls, model: str, config: SglangConfig, *, precision: Precision, device: str, lora: LoraConfig | None = None
    ) -> SglangEngine:
        """Load `model` into an sglang of its own, on `device` and, for tensor parallelism, those that follow it."""
        source, tokenizer = resolve_base(model), load_tokenizer(model)
        engine = cls(
            open_process(source, config, precision=precision, device=device),
            tokenizer,
            Weights(model, lora=lora),
            end_ids=end_ids(source, tokenizer),
            dtype=DTYPES[precision],
            device=device,
            max_running=config.max_running,
            can_sleep=config.offload == "all",
        )
        engine._adapt(model, precision=precision, lora=lora)
        return engine

    def close(self) -> None:
        self._process.close()

    def _hand_in(self, ticket: str) -> None:
        prompt = self._drafts[ticket].request.prompt_ids
        reader = self._readers.get(prompt)
        if reader is not None:
            self._followers[reader].append(ticket)
            return
        if len(prompt) > self.block_tokens:  # Less than a block is not shared.
            self._readers[prompt], self._followers[ticket] = ticket, []
        self._starts[ticket] = None

    def _withdraw(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self._has_read(ticket)
            if ticket in self._starts:
                del self._starts[ticket]
            else:
                self._ends.append(ticket)

    def _advance(self) -> None:
        letter = Step(tuple(map(self._start, self._starts)), tuple(self._ends))
        self._starts, self._ends = {}, []
        self._ask(letter)

    def _clear(self) -> None:
        self._ask(Forget())
        self._starts, self._ends = {}, []
        self._readers, self._followers = {}, {}

    def _copy_in(self, weights: Mapping[str, Tensor]) -> None:
        carrier: Carrier
        if self._device.type == "cuda":
            carrier = GpuCarrier(bucket_bytes=_BUCKET_BYTES, device=self._device)
        else:
            carrier = MappedCarrier(bucket_bytes=_BUCKET_BYTES)
        for bucket in buckets(weights, dtype=self._dtype, max_bytes=_BUCKET_BYTES):
            num_bytes = sum(aligned(_num_bytes(entry)) for entry in bucket)
            for entry in bucket:
                put(carrier.room(num_bytes), entry, weights[entry.name])
            self._ask(Fill(bucket, carrier.ship(num_bytes, bucket), num_bytes))
        carrier.close()

    def _free(self) -> None:
        self._ask(Sleep())

    def _occupy(self, *, weights: bool, cache: bool) -> None:
        self._ask(Wake(weights=weights, cache=cache))

    def _start(self, ticket: str) -> Start:
        draft = self._drafts[ticket]
        return Start(
            ticket=ticket,
            context=draft.context,
            max_tokens=self._num_left(draft),
            row=early_row(draft),
            held_until=len(draft.request.prompt_ids) + draft.request.sampling.min_tokens,
        )

    def _ask(self, letter: Letter) -> None:
        self._write(self._process.ask(letter))

    def _write(self, written: Written) -> None:
        for ticket, token, logprob in zip(written.tickets, written.tokens, written.logprobs, strict=True):
            if ticket not in self._drafts:
                continue  # It was in flight when the request ended.
            if (num_reused := written.num_reused.get(ticket)) is not None:
                self._count_context(ticket, num_reused=num_reused)
                self._has_read(ticket)
            self.counts.num_tokens += 1
            if self._append(ticket, token, logprob) and ticket not in written.finished:
                self._withdraw([ticket])
        self.counts.num_steps += bool(written.tickets)
        for ticket in written.finished & self._drafts.keys():
            raise RuntimeError(f"sglang gave up request {self._drafts[ticket].request.id}: it has not all its tokens")

    def _has_read(self, ticket: str) -> None:
        """Its prompt need not be waited for any longer."""
        followers = self._followers.pop(ticket, None)
        if followers is None:
            return
        self._readers = {prompt: reader for prompt, reader in self._readers.items() if reader != ticket}
        for follower in followers:
            if follower in self._drafts:
                self._starts[follower] = None


def buckets(weights: Mapping[str, Tensor], *, dtype: torch.dtype, max_bytes: int) -> Iterator[tuple[Entry, ...]]:
    """Where tensors lie that travel together, up to so many bytes of them; a larger one travels alone."""
    bucket: list[Entry] = []
    offset = 0
    for name, tensor in weights.items():
        entry = Entry(name, dtype, tuple(tensor.shape), offset)
        if bucket and offset + _num_bytes(entry) > max_bytes:
            yield tuple(bucket)
            bucket, offset = [], 0
            entry = Entry(name, dtype, tuple(tensor.shape), offset)
        bucket.append(entry)
        offset += aligned(_num_bytes(entry))
    if bucket:
        yield tuple(bucket)


def _num_bytes(entry: Entry) -> int:
    return entry.dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))


def open_process(folder: str, config: SglangConfig, *, precision: Precision, device: str) -> SglangProcess:
    """Start sglang on the model of this folder."""
    is_cuda = torch.device(device).type == "cuda"
    server: dict[str, Any] = {
        "model_path": folder,
        "device": torch.device(device).type,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[precision],
        "tp_size": config.tensor_parallel,
        "page_size": _BLOCK_TOKENS,
        "max_running_requests": config.max_running,
        "disable_cuda_graph": config.enforce_eager,
        "disable_overlap_schedule": not is_cuda,  # On a CPU there is no other device to keep busy.
        "enable_memory_saver": config.offload == "all",
        "enable_weights_cpu_backup": config.offload == "all",
        "sampling_backend": "pytorch",  # Not used: reroll draws.
        "grammar_backend": "none",
        "log_level": "error",
    }
    if precision == "fp32":
        server["attention_backend"] = "triton"  # The others take 16 bits.
    opening = Opening(
        server=server | dict(config.options),
        device=device,
        memory_share=config.gpu_memory_utilization,
        max_length=config.max_model_len,
    )
    return SglangProcess(config.python, opening)
