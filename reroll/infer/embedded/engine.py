"""reroll's own engine: continuous batching over the Hugging Face modules that the trainer runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.infer.base import Engine, EngineCounts, Finished
from reroll.infer.draft import Draft, check_request, early_row
from reroll.infer.embedded.attention import work_kind
from reroll.infer.embedded.memory import Drawing, Memory
from reroll.infer.embedded.network import Network
from reroll.infer.embedded.sampler import Row
from reroll.infer.embedded.slots import SlotMemory
from reroll.infer.prefixes import PrefixIndex
from reroll.types import FinishReason, Request

_MAX_PREFILL_TOKENS = 8192
"""Context tokens that one step reads: bounds its memory and the pause of those already running."""

_MAX_PARKED_BYTES = 2 << 30
"""Memory for the keys and values of ended requests."""

_MIN_REUSED_TOKENS = 16
"""A shorter common prefix is read again: that costs less than finding room for its copy."""

_MIN_REUSED_SHARE = 0.2
"""A prefix that is less of the context is read again: a context read from its beginning takes a faster kernel."""


@dataclass(slots=True, eq=False)
class _Sequence(Draft):
    """A draft, and how much of it the cache holds."""

    cached: int = 0
    """Leading tokens of the context whose keys and values are in its slot."""
    is_current: bool = False
    """Whether the weights now in use computed all that is cached."""
    _row: Row = field(init=False)
    _early_row: Row = field(init=False)

    def __post_init__(self) -> None:
        Draft.__post_init__(self)
        self._early_row = early_row(self)
        self._row = replace(self._early_row, forbidden=())

    @property
    def unread(self) -> tuple[int, ...]:
        """The end of the context, which is not cached."""
        if self.cached == self.length - 1 and self.tokens:  # Nearly always: it writes.
            return (self.tokens[-1],)
        return self.context[self.cached :]

    @property
    def row(self) -> Row:
        """How the next token is drawn. Stop tokens are out of the draw, though not out of its log-prob, before `min_tokens`."""
        return self._row if len(self.tokens) >= self.request.sampling.min_tokens else self._early_row

    @property
    def row_after(self) -> Row:
        """How the token after that is drawn."""
        return self._row if len(self.tokens) + 1 >= self.request.sampling.min_tokens else self._early_row


@dataclass(slots=True)
class _Group:
    """Siblings admitted together: the first reads the context, or what `source` lacks of it, for all."""

    num_reused: int = 0
    """Leading tokens that are cached already."""
    sibling: int | None = None
    """In the slot of this running sequence,"""
    parked: Any = None
    """or else in this parked context."""
    members: list[_Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way, and whose tokens it draws."""

    drawing: Drawing
    sequences: tuple[_Sequence, ...]


class EmbeddedEngine(Engine):
    """One model, one device, one KV cache.

    Running sequence i lives in cache slot i: `_running` is the slot table. A step is one forward pass over what the
    running sequences have not read yet: the newest token of most, the context of those just admitted.

    When a request ends, its keys and values are parked: copied out of its slot and kept until memory is short (the
    least recently used go first) or the weights change. A prompt that begins like a parked context, such as the next
    turn of a conversation, or like a running prompt, gets a copy and reads only the rest. `max_parked` contexts are
    kept: by default four times as many as may run, because the conversations under way are more than those; 0 for none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_running: int = 64,
        max_parked: int | None = None,
    ) -> None:
        self._network = Network(model)
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._max_length: int = model.config.max_position_embeddings
        self._end_ids = _end_ids(model, tokenizer)
        self._memory = make_memory(self._network, sorted(self._end_ids))
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._max_parked = 4 * max_running if max_parked is None else max_parked
        self._parked: PrefixIndex[Any] = PrefixIndex(
            max_entries=self._max_parked, max_tokens=_MAX_PARKED_BYTES // self._memory.bytes_per_token
        )
        self._reports: list[Finished] = []
        self._ahead: _Step | None = None
        self._version = 0
        self._asleep = False
        self.counts = EngineCounts()

    def submit(self, request: Request) -> None:
        check_request(request, max_length=self._max_length)
        self._waiting.append(_Sequence(request, self._end_ids | frozenset(request.sampling.stop_token_ids)))

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
        step, self._ahead = self._ahead, None
        if step is not None:
            for sequence in step.sequences:
                sequence.cached = sequence.length
        else:
            groups = self._admit()
            if self._running or groups:
                step = self._start(self._seat(groups))
        if step is not None:
            self._ahead = self._start_ahead(step)
            self._finish(step)
        reports, self._reports = self._reports, []
        return reports

    adopts_weights = True

    def load_part(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """In place: no second copy of the weights is held."""
        self._network.load_part(weights)
        return {}

    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        self._ahead = None  # The old weights drew it.
        self._parked.clear()
        for sequence in self._running:
            sequence.is_current = False
        self._network.load(weights)
        self._version = version

    def sleep(self) -> None:
        self._ahead = None
        for sequence in self._running:
            sequence.cached = 0
        self._waiting.extendleft(reversed(self._running))
        self._running = []
        self._parked.clear()
        self._memory.free()
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def _admit(self) -> list[_Group]:
        """Take from the waiting requests, oldest first, as many as may run and be read now."""
        num_free, num_tokens = self._max_running - len(self._running), 0
        if not self._waiting or not num_free:
            return []
        groups: dict[tuple[int, ...], _Group] = {}
        running_prompts = self._running_prompts()
        while self._waiting and num_free:
            context = self._waiting[0].context
            if context not in groups:
                group = self._find_reusable(context, running_prompts)
                num_tokens += len(context) - group.num_reused
                if groups and num_tokens > _MAX_PREFILL_TOKENS:
                    break
                groups[context] = group
            groups[context].members.append(self._waiting.popleft())
            num_free -= 1
        return list(groups.values())

    def _running_prompts(self) -> PrefixIndex[int]:
        """The slots of prompts that the present weights have read."""
        index: PrefixIndex[int] = PrefixIndex(max_entries=self._max_running, max_tokens=self._max_running * self._max_length)
        for slot, sequence in enumerate(self._running):
            if sequence.is_current:
                index.keep(sequence.request.prompt_ids, slot)
        return index

    def _find_reusable(self, context: tuple[int, ...], running_prompts: PrefixIndex[int]) -> _Group:
        """A group that begins with what is cached of this context already, if that is enough to be worth a copy."""
        sibling, parked = running_prompts.find(context), self._parked.find(context)
        num_common = max(match[0] if match else 0 for match in (sibling, parked))
        # The last token is always read: its logits are what the first new token is drawn from.
        num_reused = min(num_common, len(context) - 1)
        if num_reused < max(_MIN_REUSED_TOKENS, _MIN_REUSED_SHARE * len(context)):
            return _Group()
        if sibling and sibling[0] == num_common:
            return _Group(num_reused, sibling=sibling[1])
        return _Group(num_reused, parked=parked[1] if parked else None)

    def _seat(self, groups: list[_Group]) -> list[int]:
        """Give admitted sequences the next slots: first one of each group, then the siblings that only copy it.

        Returns, for each of the latter, the slot of its sibling.
        """
        if not groups:
            return []
        newcomers = [sequence for group in groups for sequence in group.members]
        followers, leaders = [], []
        for group in sorted(groups, key=lambda group: work_kind(group.num_reused, group.members[0].length - group.num_reused)):
            slot, (leader, *others) = len(self._running), group.members
            if group.sibling is not None:
                self._memory.copy(group.sibling, slot, length=group.num_reused)
            elif group.num_reused:
                self._memory.put_in(slot, group.parked, length=group.num_reused)
            leader.cached = group.num_reused
            self._running.append(leader)
            followers += others
            leaders += [slot] * len(others)
            self.counts.num_reused_tokens += group.num_reused
            self.counts.num_prefill_tokens += leader.length - group.num_reused
        self._running += followers
        for sequence in newcomers:
            sequence.is_current = True
        return leaders

    def _start(self, leaders: list[int]) -> _Step:
        """Start a forward pass that draws a token for every running sequence. The last ones copy what their `leaders` read."""
        num_readers = len(self._running) - len(leaders)
        readers = self._running[:num_readers]
        starts, unread = [sequence.cached for sequence in readers], [sequence.unread for sequence in readers]
        rows = [sequence.row for sequence in self._running]
        drawing = self._memory.read(starts, unread, leaders=leaders, rows=rows)
        for sequence in readers:
            sequence.cached = sequence.length
        for slot, leader in enumerate(leaders, num_readers):
            self._running[slot].cached = self._running[leader].cached
            self._memory.copy(leader, slot, length=self._running[leader].cached)
        return _Step(drawing, tuple(self._running))

    def _start_ahead(self, step: _Step) -> _Step | None:
        """Start the step after this one, before its tokens are known: the device need not wait for the host.

        What it draws for sequences that turn out to have ended is thrown away. None if others should be admitted first,
        or if most will have ended.
        """
        if self._waiting and len(self._running) < self._max_running:
            return None
        running = self._running
        if any(sequence.length + 1 >= self._max_length for sequence in running):
            return None
        num_going_on = sum(len(sequence.tokens) + 1 < sequence.request.sampling.max_tokens for sequence in running)
        if 2 * num_going_on < len(running):
            return None
        place = {id(sequence): row for row, sequence in enumerate(step.sequences)}
        drawing = self._memory.read_on(
            step.drawing,
            [place[id(sequence)] for sequence in running],
            [sequence.length for sequence in running],
            rows=[sequence.row_after for sequence in running],
        )
        return None if drawing is None else _Step(drawing, tuple(running))

    def _finish(self, step: _Step) -> None:
        """Write down what a step drew, and report the sequences that ended with it."""
        self.counts.add_step(num_running=len(self._running))
        ended = []
        slots = {id(sequence): slot for slot, sequence in enumerate(self._running)}
        for sequence, token, logprob in zip(step.sequences, *step.drawing.wait(), strict=True):
            if id(sequence) not in slots:
                continue
            sequence.append(token, logprob, self._version)
            if (reason := sequence.finish_reason(self._tokenizer, max_length=self._max_length)) is not None:
                ended.append((slots[id(sequence)], reason))
        for slot, reason in sorted(ended, reverse=True):
            sequence = self._running[slot]
            self._vacate(slot)
            self._reports.append(sequence.finish(reason))

    def _vacate(self, slot: int) -> None:
        """Park what a slot holds and free it: the last running sequence moves in, so that running slots stay contiguous."""
        ended = self._running[slot]
        if self._max_parked and ended.is_current and ended.cached >= _MIN_REUSED_TOKENS:
            kept = self._memory.take_out(slot, length=ended.cached)
            self._parked.keep(ended.context[: ended.cached], kept)
        last = self._running.pop()
        self._memory.close_gap(slot, len(self._running), length=last.cached)
        if slot < len(self._running):
            self._running[slot] = last


def make_memory(network: Network, end_ids: Sequence[int]) -> Memory[Any]:
    """Pages and CUDA graphs on a GPU, dense slots elsewhere."""
    if network.device.type == "cuda":
        from reroll.infer.embedded.paged import PagedMemory  # Imports triton, which CPU builds of PyTorch lack.

        return PagedMemory(network, end_ids)
    return SlotMemory(network)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a completion: the tokenizer's, and those that the model's generation settings name."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    named = generation if isinstance(generation, list) else [generation]
    return frozenset(token for token in (tokenizer.eos_token_id, *named) if token is not None)
