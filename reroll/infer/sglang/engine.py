"""sglang behind reroll's engine seam: in a process of its own, a step for every letter, drawing as reroll draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from reroll.config.parts import LoraConfig
from reroll.config.parts import SglangEngine as SglangConfig
from reroll.infer.base import Engine, EngineCounts, Finished
from reroll.infer.draft import Draft, check_request, end_ids
from reroll.infer.embedded.sampler import Row
from reroll.infer.sglang.letters import Fill, Forget, Letter, Limit, Opening, Sleep, Start, Step, Wake, Written
from reroll.infer.sglang.process import SglangProcess
from reroll.infer.whole import Weights
from reroll.models.load import DTYPES, Precision, load_model, load_tokenizer, resolve_base, resolve_model
from reroll.types import FinishReason, Request
from reroll.weights.carriers import Carrier, GpuCarrier, MappedCarrier
from reroll.weights.parcel import Entry, aligned, put

_BLOCK_TOKENS = 16
"""The smaller, the more of a context others share; the larger, the less sglang does for each step."""
_BUCKET_BYTES = 256 * 2**20


class SglangEngine(Engine):
    """One sglang engine on one device, or on several that share each layer.

    sglang schedules, keeps the cache and runs the model. reroll draws the tokens, decides when a completion ends, and keeps
    what was written, so that requests outlive a sleep or new weights: they are handed in again with their tokens, and read
    anew. A request waits here while a sibling reads the prompt that they share, because sglang would read it for each.

    On a GPU sglang launches a step before the tokens of the last are known. A request that ends or is aborted may have one
    more in flight, which is dropped. What is in flight when weights come or the engine sleeps is taken first.
    """

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
        self._process, self._tokenizer, self._weights = process, tokenizer, weights
        self._end_ids, self._dtype, self._device, self._can_sleep = end_ids, dtype, torch.device(device), can_sleep
        self._max_length = process.ready.max_length
        self._takes_parts = weights.come_in_parts and process.ready.takes_parts
        self._drafts: dict[str, Draft] = {}
        """By ticket."""
        self._tickets: dict[str, str] = {}
        """By request. sglang knows a request by its ticket, which no other gets: what is in flight for one that ended must
        not go to a later one of its name."""
        self._serials = itertools.count()
        self._readers: dict[tuple[int, ...], str] = {}
        """Of each prompt that is being read, the ticket that reads it."""
        self._followers: dict[str, list[str]] = {}
        """Tickets that wait for one that reads their prompt."""
        self._starts: list[str] = []
        self._ends: list[str] = []
        """Tickets that the next step takes in, or ends."""
        self._reports: list[Finished] = []
        self._version = 0
        self._asleep = False
        self._has_weights = True
        """Whether they are on the device: asleep they are not, until new ones come."""
        self.block_tokens = process.ready.block_tokens
        self.counts = EngineCounts()
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
        if source != resolve_model(model):  # sglang has read the base; what the adapter makes of it comes by push.
            policy = load_model(model, dtype=DTYPES[precision], device="cpu", lora=lora)
            engine.load_weights(dict(policy.named_parameters()), version=0)
        return engine

    def submit(self, request: Request) -> None:
        check_request(request, max_length=self._max_length)
        ticket = f"{next(self._serials):016d}"  # No ticket may begin with another: sglang would end both.
        self._tickets[request.id] = ticket
        self._drafts[ticket] = Draft(request, self._end_ids | frozenset(request.sampling.stop_token_ids))
        if not self._asleep:
            self._hand_in(ticket)

    def abort(self, request_id: str) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._end(ticket, FinishReason.ABORT)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running, and ended ones not reported yet."""
        return len(self._drafts) + len(self._reports)

    def step(self) -> list[Finished]:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it before stepping")
        if self._drafts:
            starts = tuple(self._start(ticket) for ticket in self._starts)
            letter = Step(starts, tuple(self._ends))
            self._starts, self._ends = [], []
            self._ask(letter)
        reports, self._reports = self._reports, []
        return reports

    def load_part(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """In place where sglang's model needs no others with them; else they wait on the host."""
        if not self._takes_parts:
            return super().load_part(weights)
        self._fill(self._weights.part(weights))
        return {}

    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        self._fill(self._weights.whole(weights))
        if not self._asleep:
            self._forget()
            self._hand_in_all()
        self._version = version

    def sleep(self) -> None:
        self._forget()
        if self._can_sleep:
            self._ask(Sleep())
            self._has_weights = False
        self._asleep = True

    def wake(self) -> None:
        if self._can_sleep:
            self._ask(Wake(weights=not self._has_weights, cache=True))
            self._has_weights = True
        self._asleep = False
        self._hand_in_all()

    def close(self) -> None:
        self._process.close()

    def _ask(self, letter: Letter) -> None:
        self._write(self._process.ask(letter))

    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        """Have these copied into sglang's own tensors, whose addresses its CUDA graphs know."""
        if not self._has_weights:
            self._ask(Wake(weights=True, cache=False))
            self._has_weights = True
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

    def _forget(self) -> None:
        """Empty the cache. Requests stay with the engine alone."""
        self._ask(Forget())
        self._starts, self._ends = [], []
        self._readers, self._followers = {}, {}

    def _hand_in_all(self) -> None:
        for ticket in self._drafts:
            self._hand_in(ticket)

    def _hand_in(self, ticket: str) -> None:
        prompt = self._drafts[ticket].request.prompt_ids
        reader = self._readers.get(prompt)
        if reader is not None:
            self._followers[reader].append(ticket)
            return
        if len(prompt) > self.block_tokens:  # Less than a block is not shared.
            self._readers[prompt], self._followers[ticket] = ticket, []
        self._starts.append(ticket)

    def _start(self, ticket: str) -> Start:
        draft = self._drafts[ticket]
        sampling = draft.request.sampling
        row = Row(
            seed=sampling.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            forbidden=tuple(sorted(draft.end_ids)),
        )
        return Start(
            ticket=ticket,
            context=draft.context,
            max_tokens=min(sampling.max_tokens - len(draft.tokens), self._max_length - draft.length),
            row=row,
            held_until=len(draft.request.prompt_ids) + sampling.min_tokens,
        )

    def _write(self, written: Written) -> None:
        for ticket, token, logprob in zip(written.tickets, written.tokens, written.logprobs, strict=True):
            draft = self._drafts.get(ticket)
            if draft is None:
                continue  # It was in flight when the request ended.
            if (num_reused := written.num_reused.get(ticket)) is not None:
                self._count_context(draft, num_reused=num_reused)
                self._has_read(ticket)
            draft.append(token, logprob, self._version)
            self.counts.num_tokens += 1
            if (reason := draft.finish_reason(self._tokenizer, max_length=self._max_length)) is not None:
                self._end(ticket, reason, is_known=ticket in written.finished)
        self.counts.num_steps += bool(written.tickets)
        for ticket in written.finished & self._drafts.keys():
            raise RuntimeError(f"sglang gave up request {self._drafts[ticket].request.id}: it has not all its tokens")

    def _end(self, ticket: str, reason: FinishReason, *, is_known: bool = False) -> None:
        draft = self._drafts.pop(ticket)
        del self._tickets[draft.request.id]
        self._reports.append(draft.finish(reason))
        self._has_read(ticket)
        if ticket in self._starts:
            self._starts.remove(ticket)
        elif not is_known:
            self._ends.append(ticket)

    def _has_read(self, ticket: str) -> None:
        """Its prompt need not be waited for any longer."""
        followers = self._followers.pop(ticket, None)
        if followers is None:
            return
        self._readers = {prompt: reader for prompt, reader in self._readers.items() if reader != ticket}
        for follower in followers:
            if follower in self._drafts:
                self._starts.append(follower)

    def _count_context(self, draft: Draft, *, num_reused: int) -> None:
        self.counts.num_reused_tokens += num_reused
        self.counts.num_prefill_tokens += draft.length - num_reused


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
