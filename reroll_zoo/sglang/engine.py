"""sglang behind reroll's engine seam: in a process of its own, one message per step, with reroll's sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from reroll.config.parts import LoraConfig
from reroll.infer.sequence import sampling_until_min_tokens
from reroll.models.load import DTYPES, Precision, load_tokenizer, resolve_base
from reroll.weights.buckets import Entry, aligned, put
from reroll.weights.sender import GpuTransport, MappedTransport, Transport
from reroll_zoo.external_engine.engine import ExternalEngine, end_ids_of
from reroll_zoo.external_engine.weights import HFWeightAssembler
from reroll_zoo.sglang.config import SglangConfig
from reroll_zoo.sglang.messages import (
    LoadWeights,
    Message,
    OpenServer,
    ResetCache,
    RunStep,
    SetMaxRunning,
    Sleep,
    StartRequest,
    StepOutput,
    Wake,
)
from reroll_zoo.sglang.process import SglangProcess

_BLOCK_TOKENS = 16
"""The smaller, the more of a context others share; the larger, the less sglang does for each step."""
_BUCKET_BYTES = 256 * 2**20


class SglangEngine(ExternalEngine):
    """sglang in a process of its own. A request waits here while a sibling reads the prompt that they share, because sglang
    would read it for each."""

    def __init__(
        self,
        process: SglangProcess,
        tokenizer: PreTrainedTokenizerBase,
        weights: HFWeightAssembler,
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
        """For each prompt that is being prefilled, the external id of the request that prefills it."""
        self._followers: dict[str, list[str]] = {}
        """External ids of the requests that wait for one that prefills their prompt."""
        self._starts: dict[str, None] = {}
        self._ends: list[str] = []
        """External ids of the requests that the next step starts, or ends."""
        self._process.ask(SetMaxRunning(max_running))

    @classmethod
    def open(
        cls, model: str, config: SglangConfig, *, precision: Precision, device: str, lora: LoraConfig | None = None
    ) -> SglangEngine:
        """Load `model` into an sglang of its own, on `device` and, for tensor parallelism, those that follow it."""
        source, tokenizer = resolve_base(model), load_tokenizer(model)
        engine = cls(
            open_process(source, config, precision=precision, device=device),
            tokenizer,
            HFWeightAssembler(model, lora=lora),
            end_ids=end_ids_of(source, tokenizer),
            dtype=DTYPES[precision],
            device=device,
            max_running=config.max_running,
            can_sleep=config.sleep,
        )
        engine._adapt(model, precision=precision, lora=lora)
        return engine

    def close(self) -> None:
        self._process.close()

    def _submit_external(self, external_id: str) -> None:
        prompt = self._states[external_id].request.prompt_ids
        reader = self._readers.get(prompt)
        if reader is not None:
            self._followers[reader].append(external_id)
            return
        if len(prompt) > self.block_tokens:  # Less than a block is not shared.
            self._readers[prompt], self._followers[external_id] = external_id, []
        self._starts[external_id] = None

    def _abort_external(self, external_ids: Sequence[str]) -> None:
        for external_id in external_ids:
            self._has_read(external_id)
            if external_id in self._starts:
                del self._starts[external_id]
            else:
                self._ends.append(external_id)

    def _step_external(self) -> None:
        message = RunStep(tuple(map(self._start, self._starts)), tuple(self._ends))
        self._starts, self._ends = {}, []
        self._ask(message)

    def _clear(self) -> None:
        self._ask(ResetCache())
        self._starts, self._ends = {}, []
        self._readers, self._followers = {}, {}

    def _copy_weights(self, weights: Mapping[str, Tensor]) -> None:
        transport: Transport
        if self._device.type == "cuda":
            transport = GpuTransport(bucket_bytes=_BUCKET_BYTES, device=self._device)
        else:
            transport = MappedTransport(bucket_bytes=_BUCKET_BYTES)
        for bucket in buckets(weights, dtype=self._dtype, max_bytes=_BUCKET_BYTES):
            num_bytes = sum(aligned(_num_bytes(entry)) for entry in bucket)
            for entry in bucket:
                put(transport.buffer(num_bytes), entry, weights[entry.name])
            self._ask(LoadWeights(bucket, transport.send(num_bytes, bucket), num_bytes))
        transport.close()

    def _free(self) -> None:
        self._ask(Sleep())

    def _occupy(self, *, weights: bool, cache: bool) -> None:
        self._ask(Wake(weights=weights, cache=cache))

    def _start(self, external_id: str) -> StartRequest:
        state = self._states[external_id]
        return StartRequest(
            external_id=external_id,
            context=state.context,
            max_tokens=self._num_left(state),
            row=sampling_until_min_tokens(state),
            held_until=len(state.request.prompt_ids) + state.request.sampling.min_tokens,
        )

    def _ask(self, message: Message) -> None:
        self._write(self._process.ask(message))

    def _write(self, written: StepOutput) -> None:
        for external_id, token, logprob in zip(written.external_ids, written.tokens, written.logprobs, strict=True):
            if external_id not in self._states:
                continue  # It was in flight when the request ended.
            if (num_reused := written.num_reused.get(external_id)) is not None:
                self._count_context(external_id, num_reused=num_reused)
                self._has_read(external_id)
            self.counts.num_tokens += 1
            if self._append(external_id, token, logprob) and external_id not in written.finished:
                self._abort_external([external_id])
        self.counts.num_steps += bool(written.external_ids)
        for external_id in written.finished & self._states.keys():
            raise RuntimeError(f"sglang gave up request {self._states[external_id].request.id}: it has not all its tokens")

    def _has_read(self, external_id: str) -> None:
        """Its prompt need not be waited for any longer."""
        followers = self._followers.pop(external_id, None)
        if followers is None:
            return
        self._readers = {prompt: reader for prompt, reader in self._readers.items() if reader != external_id}
        for follower in followers:
            if follower in self._states:
                self._starts[follower] = None


def buckets(weights: Mapping[str, Tensor], *, dtype: torch.dtype, max_bytes: int) -> Iterator[tuple[Entry, ...]]:
    """Group weights into buckets of at most `max_bytes`; a larger tensor gets a bucket of its own."""
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
        "tp_size": config.tp,
        "page_size": _BLOCK_TOKENS,
        "max_running_requests": config.max_running,
        "disable_cuda_graph": config.enforce_eager,
        "disable_overlap_schedule": not is_cuda,  # On a CPU there is no other device to keep busy.
        "enable_memory_saver": config.sleep,
        "enable_weights_cpu_backup": config.sleep,
        "sampling_backend": "pytorch",  # Not used: reroll draws.
        "grammar_backend": "none",
        "log_level": "error",
    }
    if precision == "fp32":
        server["attention_backend"] = "triton"  # The others take 16 bits.
    server_options = OpenServer(
        server=server | dict(config.options),
        device=device,
        memory_share=config.gpu_memory_utilization,
        max_length=config.max_model_len,
    )
    return SglangProcess(config.python, server_options)
