"""reroll's own engine: continuous batching over the Hugging Face modules that the trainer runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.infer.base import Engine, EngineCounts, Finished
from reroll.infer.embedded.cache import SlotCache, StepAttention
from reroll.infer.embedded.network import Network
from reroll.infer.embedded.sampler import Row, sample
from reroll.infer.embedded.stop import completes_stop
from reroll.types import Completion, FinishReason, Request

_MAX_PREFILL_TOKENS = 8192
"""Context tokens that one step reads: bounds its memory and the pause of those already running."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request and what was written for it."""

    request: Request
    end_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    cached: int = 0
    """Leading tokens of the context whose keys and values are in its slot."""
    prompt_version: int = -1
    """The weights that computed the cached prompt, if one version did."""

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.tokens)

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.prompt_ids[-1]

    def row(self) -> Row:
        """How the next token is drawn. Stop tokens are out of the draw, though not out of its log-prob, before `min_tokens`."""
        sampling = self.request.sampling
        return Row(
            seed=sampling.seed,
            position=self.length,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            forbidden=tuple(self.end_ids) if len(self.tokens) < sampling.min_tokens else (),
        )

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))

    def finish(self, reason: FinishReason) -> Finished:
        completion = Completion(
            token_ids=tuple(self.tokens), logprobs=tuple(self.logprobs), finish_reason=reason, versions=tuple(self.versions)
        )
        return Finished(self.request.id, completion)


class EmbeddedEngine(Engine):
    """One model, one device, one KV cache.

    Running sequence i lives in cache slot i: `_running` is the slot table. A step is one forward pass over the newest
    token of every running sequence and the whole context of those just admitted.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_running: int = 64) -> None:
        config = model.config
        self._network = Network(model)
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._max_length: int = config.max_position_embeddings
        self._end_ids = _end_ids(model, tokenizer)
        self._cache = SlotCache(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=model.dtype,
            device=model.device,
        )
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._reports: list[Finished] = []
        self._version = 0
        self._asleep = False
        self.counts = EngineCounts()

    def submit(self, request: Request) -> None:
        sampling, room = request.sampling, self._max_length - len(request.prompt_ids)
        if not request.prompt_ids:
            raise ValueError(f"request {request.id} has an empty prompt: give it at least one token")
        if room < 1:
            raise ValueError(
                f"request {request.id} has a prompt of {len(request.prompt_ids)} tokens, but the model takes "
                f"{self._max_length}: lower rollout.max_prompt_tokens"
            )
        if sampling.max_tokens < 1:
            raise ValueError(f"request {request.id} asks for {sampling.max_tokens} tokens: max_tokens must be at least 1")
        self._waiting.append(_Sequence(request, self._end_ids | frozenset(sampling.stop_token_ids)))

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        for sequence in self._waiting:
            if sequence.request.id == request_id:
                self._waiting.remove(sequence)
                self._reports.append(sequence.finish(FinishReason.ABORT))
                return
        for slot, sequence in enumerate(self._running):
            if sequence.request.id == request_id:
                self._vacate(slot)
                self._reports.append(sequence.finish(FinishReason.ABORT))
                return

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running, and ended ones not reported yet."""
        return len(self._waiting) + len(self._running) + len(self._reports)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it before stepping")
        prefill = self._admit()
        if self._running:
            self._write(prefill)
        reports, self._reports = self._reports, []
        return reports

    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        self._network.load(weights)
        self._version = version

    def sleep(self) -> None:
        for sequence in self._running:
            sequence.cached = 0
        self._waiting.extendleft(reversed(self._running))
        self._running = []
        self._cache.free()
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def _admit(self) -> list[list[int]]:
        """Give free slots to waiting requests, oldest first. Returns the slots to prefill, siblings in one list."""
        cached_prompts = {
            sequence.request.prompt_ids: slot
            for slot, sequence in enumerate(self._running)
            if sequence.prompt_version == self._version
        }
        joining: list[tuple[_Sequence, int]] = []
        groups: dict[tuple[int, ...], list[_Sequence]] = {}
        num_tokens, num_running = 0, len(self._running)
        while self._waiting and num_running < self._max_running:
            sequence = self._waiting[0]
            context = sequence.context
            if context in cached_prompts and len(context) > 1:
                joining.append((sequence, cached_prompts[context]))
            elif context in groups:
                groups[context].append(sequence)
            elif groups and num_tokens + len(context) > _MAX_PREFILL_TOKENS:
                break
            else:
                groups[context] = [sequence]
                num_tokens += len(context)
            self._waiting.popleft()
            num_running += 1
        return self._seat(joining, groups)

    def _seat(self, joining: list[tuple[_Sequence, int]], groups: dict[tuple[int, ...], list[_Sequence]]) -> list[list[int]]:
        """Put admitted sequences into slots: first those that join a running sibling, which decode from now on."""
        newcomers = [sequence for sequence, _ in joining] + [sequence for group in groups.values() for sequence in group]
        if newcomers:
            longest = max(sequence.length for sequence in newcomers)
            self._cache.reserve(num_slots=len(self._running) + len(newcomers), length=longest + 1)
        for sequence, sibling in joining:
            # All but the last prompt token: decoding that one gives the logits to draw from.
            sequence.cached = sequence.length - 1
            sequence.prompt_version = self._version
            self._cache.copy(sibling, len(self._running), length=sequence.cached)
            self._running.append(sequence)
        slots = []
        for group in groups.values():
            slots.append(list(range(len(self._running), len(self._running) + len(group))))
            self._running.extend(group)
        return slots

    def _write(self, prefill: list[list[int]]) -> None:
        """One forward pass, one token for every running sequence."""
        num_decode = prefill[0][0] if prefill else len(self._running)
        decoding = self._running[:num_decode]
        leaders = [self._running[slots[0]] for slots in prefill]
        lengths = [sequence.cached for sequence in decoding]
        if decoding:
            self._cache.reserve(num_slots=len(self._running), length=max(lengths) + 1)
        contexts = [sequence.context for sequence in leaders]
        attention = StepAttention(
            self._cache,
            lengths=lengths,
            prefill_slots=[slots[0] for slots in prefill],
            prefill_lengths=[len(c) for c in contexts],
        )
        ids = [sequence.last_token for sequence in decoding] + [token for context in contexts for token in context]
        positions = lengths + [place for context in contexts for place in range(len(context))]
        device = self._network.device
        hidden = self._network.hidden(torch.tensor(ids, device=device), torch.tensor(positions, device=device), attention)
        logits = self._network.logits(_rows_to_draw_from(hidden, num_decode, [len(c) for c in contexts]))
        logits = _repeat_for_siblings(logits, num_decode, [len(slots) for slots in prefill])

        for sequence in decoding:
            sequence.cached += 1
        for slots, context in zip(prefill, contexts, strict=True):
            self._share_prefill(slots, len(context))
        tokens, logprobs = sample(logits, [sequence.row() for sequence in self._running])
        for sequence, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            sequence.append(token, logprob, self._version)
        self.counts.add_step(num_running=len(self._running), num_prefill_tokens=sum(map(len, contexts)))
        self._retire()

    def _share_prefill(self, slots: list[int], length: int) -> None:
        for slot in slots:
            if slot != slots[0]:
                self._cache.copy(slots[0], slot, length=length)
            self._running[slot].cached = length
            self._running[slot].prompt_version = self._version

    def _retire(self) -> None:
        """Report the sequences that ended with their last token, and free their slots."""
        for slot in reversed(range(len(self._running))):
            sequence = self._running[slot]
            if (reason := self._finish_reason(sequence)) is not None:
                self._vacate(slot)
                self._reports.append(sequence.finish(reason))

    def _finish_reason(self, sequence: _Sequence) -> FinishReason | None:
        sampling, num_tokens = sequence.request.sampling, len(sequence.tokens)
        if num_tokens >= sampling.min_tokens:
            if sequence.tokens[-1] in sequence.end_ids:
                return FinishReason.STOP
            if completes_stop(self._tokenizer, sequence.tokens, sampling.stop):
                return FinishReason.STOP
        if num_tokens >= sampling.max_tokens or sequence.length >= self._max_length:
            return FinishReason.LENGTH
        return None

    def _vacate(self, slot: int) -> None:
        """Free a slot: the last running sequence moves into it, so that running slots stay contiguous."""
        last = self._running.pop()
        if slot < len(self._running):
            self._cache.copy(len(self._running), slot, length=last.cached)
            self._running[slot] = last


def _rows_to_draw_from(hidden: Tensor, num_decode: int, prefill_lengths: list[int]) -> Tensor:
    """The decoded rows, and the last row of each prefilled context."""
    if not prefill_lengths:
        return hidden
    ends = num_decode - 1 + torch.tensor(prefill_lengths, device=hidden.device).cumsum(0)
    return hidden[torch.cat([torch.arange(num_decode, device=hidden.device), ends])]


def _repeat_for_siblings(logits: Tensor, num_decode: int, group_sizes: list[int]) -> Tensor:
    """One row for each running sequence: siblings draw from the same logits."""
    if not group_sizes:
        return logits
    times = torch.tensor([*[1] * num_decode, *group_sizes], device=logits.device)
    return logits.repeat_interleave(times, 0)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a completion: the tokenizer's, and those that the model's generation settings name."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    named = generation if isinstance(generation, list) else [generation]
    return frozenset(token for token in (tokenizer.eos_token_id, *named) if token is not None)
