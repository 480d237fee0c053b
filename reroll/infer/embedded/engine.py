"""reroll's own engine: continuous batching over the Hugging Face modules that the trainer runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.config.registry import load_entry
from reroll.errors import ModelError
from reroll.infer.base import Engine, EngineCounts, Finished
from reroll.infer.embedded.attention import work_kind
from reroll.infer.embedded.backend import CacheBackend, PendingTokens
from reroll.infer.embedded.drafts import MAX_DRAFT, NO_DRAFT, DraftedTokens, Drafter, DraftPace
from reroll.infer.embedded.model_runner import ModelRunner, Quantize
from reroll.infer.embedded.sampler import RowSampling
from reroll.infer.embedded.slots import SlotBackend
from reroll.infer.prefixes import PrefixIndex
from reroll.infer.sequence import SequenceState, check_request, end_ids, sampling_until_min_tokens, tell
from reroll.types import FinishReason, Request, TokenBlock

_MAX_PREFILL_TOKENS = 8192
"""Prefill tokens per step: bounds its memory and the pause of running requests. Longer contexts take several steps."""

_RESERVE_TOKENS = 64
"""Free room for each running request when another is admitted, so that none is preempted right away."""

_MAX_CACHED_BYTES = 2 << 30
"""Memory for cached prefixes, the keys and values of ended requests."""

_MIN_REUSED_TOKENS = 16
"""A shorter common prefix is recomputed: that costs less than making room for its copy."""

_MIN_REUSED_SHARE = 0.2
"""A prefix that is a smaller part of the context is recomputed: a prefill from the start uses a faster kernel."""


@dataclass(slots=True, eq=False)
class _Sequence(SequenceState):
    """A request's state, and how much of its context is in the KV cache."""

    cached: int = 0
    """Leading tokens of the context whose keys and values are in its slot."""
    is_current: bool = False
    """Whether the current weights computed all of its cache."""
    arrival: int = 0
    """Its number in the order of submission."""
    stops_short: bool = False
    """Whether its prefill stops before the last token of its context first, so that later siblings can continue from there."""
    _sampling: RowSampling = field(init=False)
    _early_sampling: RowSampling = field(init=False)

    def __post_init__(self) -> None:
        SequenceState.__post_init__(self)
        self._early_sampling = sampling_until_min_tokens(self)
        self._sampling = replace(self._early_sampling, forbidden=())

    @property
    def uncached(self) -> tuple[int, ...]:
        """The tokens at the end of the context that are not in the cache yet."""
        if self.cached == self.length - 1 and self.tokens:  # Nearly always: it is decoding.
            return (self.tokens[-1],)
        return self.context[self.cached :]

    @property
    def next_read(self) -> tuple[int, ...]:
        """The part of `uncached` that the next step reads."""
        uncached = self.uncached
        return uncached[: min(_MAX_PREFILL_TOKENS, max(1, len(uncached) - self.stops_short))]

    @property
    def is_reading(self) -> bool:
        """Whether it is in the middle of its prefill, and cannot generate yet."""
        return self.cached < self.length - 1 or (self.cached < self.length and not self.tokens)

    def sampling(self, *, ahead: int = 0) -> RowSampling:
        """Sampling settings of the next token, or of one `ahead` of it. Before `min_tokens`, stop tokens cannot be drawn, but
        still count in the log-probs."""
        return self._sampling if len(self.tokens) + ahead >= self.request.sampling.min_tokens else self._early_sampling


@dataclass(slots=True)
class _Siblings:
    """Siblings admitted together: the first one prefills their common context for all."""

    num_reused: int = 0
    """Leading tokens that are cached already: in `sibling` or in `cached_prefix`."""
    sibling: int | None = None
    """The slot of a running sequence."""
    cached_prefix: Any = None
    """A prefix that the backend saved from an earlier request."""
    members: list[_Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _RunningStep:
    """A step under way, and its sequences. It samples one token for each, and one more for each drafted token."""

    pending: PendingTokens
    sequences: tuple[_Sequence, ...]
    drafts: tuple[DraftedTokens, ...] = ()
    only_writes: bool = True
    """Whether it only decodes (newest tokens and drafts), without any prefill."""


class EmbeddedEngine(Engine):
    """One model, one device, one KV cache.

    Running sequence i uses cache slot i: `_running` is the slot table. A step is one forward pass over the uncached tokens of
    the running sequences: the newest token of most, the whole context of those just admitted.

    When a request ends, its keys and values stay cached: they are saved from its slot and kept until memory is short (least
    recently used first) or the weights change. A prompt that starts with a cached prefix, such as the next turn of a
    conversation, or like a running prompt, gets a copy and prefills only the rest. `max_cached` prefixes are kept: by
    default four times `max_running`, because there are more conversations than running requests; 0 for none.

    `cache_bytes` bounds the KV cache; None: the free memory of the device. When it is full, cached prefixes are evicted,
    requests wait, and the youngest running requests are preempted: their tokens are kept and prefilled again when there is
    room. A token is a function of seed, position and weights, so preemption does not change the result.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_running: int = 64,
        max_cached: int | None = None,
        cache_bytes: int | None = None,
        reads_again: bool = False,
        drafter: Drafter | None = None,
        pace: DraftPace | None = None,
        notes_routes: bool = False,
        quantize: Quantize | None = None,
    ) -> None:
        """With `reads_again`, requests in flight are prefilled again after new weights; else they keep the cache of the older
        ones. With a `drafter` and a `pace`, steps verify drafted tokens when the pace expects a gain. With `notes_routes`,
        completions report the experts of their tokens. `quantize`: has layers hold their weights in fewer bits."""
        self._runner = ModelRunner(model, notes_routes=notes_routes, quantize=quantize)
        if drafter is not None and self._runner.is_recurrent:
            raise ModelError(
                f"models of family {model.config.model_type!r} take no drafts: a wrong one could not be taken back from the "
                "state that their layers carry (set engine.draft to off)"
            )
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._max_length: int = model.config.get_text_config().max_position_embeddings
        self._end_ids = end_ids(tokenizer, model.generation_config)
        self.backend = make_backend(self._runner, sorted(self._end_ids), max_bytes=cache_bytes)
        """Where keys and values lie, and what runs the model over them."""
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._max_cached = 4 * max_running if max_cached is None else max_cached
        self.cached_prefixes = _prefix_index(self.backend, max_entries=self._max_cached)
        """What ended requests have left."""
        self._reports: list[Finished] = []
        self._ahead: _RunningStep | None = None
        self._version = 0
        self._asleep = False
        self._num_submitted = 0
        self._reads_again = reads_again
        self._drafter, self._pace = drafter, pace
        self.counts = EngineCounts()

    def submit(self, request: Request) -> None:
        check_request(request, max_length=self._max_length)
        self._num_submitted += 1
        ends = self._end_ids | frozenset(request.sampling.stop_token_ids)
        sequence = _Sequence(request, ends, arrival=self._num_submitted)
        reason = sequence.finish_reason(self._tokenizer, max_length=self._max_length)
        if reason is None:
            self._waiting.append(sequence)
            if self._drafter is not None:
                self._drafter.join(sequence)
        else:  # The request was complete already.
            self._reports.append(sequence.finish(reason))

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        for sequence in self._waiting:
            if sequence.request.id == request_id:
                self._waiting.remove(sequence)
                self._report(sequence, FinishReason.ABORT)
                return
        for slot, sequence in enumerate(self._running):
            if sequence.request.id == request_id:
                self._free_slot(slot)
                self._report(sequence, FinishReason.ABORT)
                return

    @property
    def num_unfinished(self) -> int:
        """Requests waiting, running, or ended and not reported yet."""
        return len(self._waiting) + len(self._running) + len(self._reports)

    def tokens_so_far(self, request_id: str) -> tuple[int, ...]:
        """The generated tokens of a running request; empty for any other."""
        for sequence in self._running:
            if sequence.request.id == request_id:
                return tuple(sequence.tokens)
        return ()

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it before stepping")
        step, self._ahead = self._ahead, None
        if step is not None:
            for sequence in step.sequences:
                sequence.cached = sequence.length
        else:
            self._make_way()
            groups = self._admit()
            if self._running or groups:
                step = self._start(self._assign_slots(groups))
        if step is not None:
            self._ahead = self._start_ahead(step)
            self._finish(step)
        reports, self._reports = self._reports, []
        return reports

    def new_tokens(self) -> TokenBlock | None:
        return tell([*self._running, *self._waiting])

    adopts_weights = True

    def load_part(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy them in place: there is no second copy of the weights."""
        self._runner.load_part(weights)
        return {}

    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        self._ahead = None  # It was drawn with the old weights.
        self.cached_prefixes.clear()
        for slot in reversed(range(len(self._running))):
            if self._running[slot].is_reading:  # No prefill mixes two versions.
                self._put_back(slot)
        for sequence in self._running:
            sequence.is_current = False
        if self._reads_again:
            self._forget_running()
        self._runner.load(weights)
        self._version = version

    def sleep(self) -> None:
        self._ahead = None
        self._forget_running()
        self.cached_prefixes.clear()
        self.backend.free()
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def _make_way(self) -> None:
        """Make room for the next tokens of the running sequences: preempt the youngest until there is enough."""
        while self._running and not self._find_room():
            if len(self._running) == 1:
                raise self._too_small(self._running[0].length)
            self._put_back(max(range(len(self._running)), key=lambda slot: self._running[slot].arrival))
            self.counts.num_gave_way += 1

    def _find_room(self, newcomers: Sequence[tuple[int, int]] = (), *, reserve: int = 0) -> bool:
        """Whether the running sequences and the `newcomers` (see `has_room`) fit, each with `reserve` further tokens. Cached
        prefixes are evicted for them."""
        running = self._running
        num_new = sum(end - num_shared for end, num_shared in newcomers) + sum(s.length - s.cached for s in running)
        num_new += reserve * (len(running) + len(newcomers))
        if self.backend.surely_has_room(num_slots=len(running), num_newcomers=len(newcomers), num_new=num_new):
            return True
        self.backend.foreseen = self._foreseen()
        ends = [sequence.length + reserve for sequence in running]
        others = [(end + reserve, num_shared) for end, num_shared in newcomers]
        while not self.backend.has_room(ends, others):
            if not (self.backend.saves_in_place and self.cached_prefixes.drop_oldest()):
                return False
        return True

    def _foreseen(self) -> list[int]:
        """The most tokens of each request that runs or is next, and of the saved prefixes."""
        next_ = [sequence.request for sequence in (*self._running, *self._waiting)][: self._max_running]
        ends = [min(self._max_length, len(each.prompt_ids) + each.sampling.max_tokens) for each in next_]
        return [*ends, min(_MAX_CACHED_BYTES // max(1, self.backend.bytes_per_token), self._max_cached * max(ends))]

    def _too_small(self, length: int) -> ModelError:
        return ModelError(
            f"a context of {length:,} tokens does not fit into the engine's cache: raise engine.cache_gib, or lower "
            "rollout.max_prompt_tokens, rollout.max_tokens or max_total_tokens"
        )

    def _forget_running(self) -> None:
        """Move all running sequences back to the front of the queue: their contexts are prefilled again."""
        for slot in reversed(range(len(self._running))):
            self._put_back(slot)

    def _admit(self) -> list[_Siblings]:
        """Admit waiting requests, oldest first, within the limits on running requests, cache and prefill."""
        num_free, num_tokens = self._max_running - len(self._running), 0
        if not self._waiting or not num_free or any(sequence.is_reading for sequence in self._running):
            return []
        groups: dict[tuple[int, ...], _Siblings] = {}
        newcomers: list[tuple[int, int]] = []
        running_prompts = self._running_prompts()
        while self._waiting and num_free:
            context = self._waiting[0].context
            group = groups.get(context) or self._find_reusable(context, running_prompts)
            num_shared = len(context) if group.members else group.num_reused
            is_first = not (groups or self._running)
            if groups and num_tokens + len(context) - num_shared > _MAX_PREFILL_TOKENS:
                break
            newcomers.append((len(context), num_shared))
            if not self._find_room(newcomers, reserve=0 if is_first else _RESERVE_TOKENS):
                if is_first:
                    raise self._too_small(len(context))
                break
            num_tokens += len(context) - num_shared
            groups[context] = group
            leader = self._waiting[0]
            leader.stops_short = self._leaves_siblings(num_free) and num_shared < len(context) - 1
            group.members.append(self._waiting.popleft())
            num_free -= 1
            # It is prefilled in parts; its siblings follow when that is done.
            if num_tokens > _MAX_PREFILL_TOKENS or leader.stops_short:
                break
        return list(groups.values())

    def _leaves_siblings(self, num_free: int) -> bool:
        """Whether some siblings of the first waiting request have to wait, and would find no state to continue from."""
        waiting = self._waiting
        return self.backend.bytes_per_state > 0 and len(waiting) > num_free and waiting[num_free].context == waiting[0].context

    def _running_prompts(self) -> PrefixIndex[int]:
        """The slots of running prompts that the current weights have read."""
        index: PrefixIndex[int] = PrefixIndex(max_entries=self._max_running, max_tokens=self._max_running * self._max_length)
        if self.backend.bytes_per_state:  # The states have moved on since.
            return index
        for slot, sequence in enumerate(self._running):
            if sequence.is_current and not sequence.is_reading:
                index.keep(sequence.request.prompt_ids, slot)
        return index

    def _find_reusable(self, context: tuple[int, ...], running_prompts: PrefixIndex[int]) -> _Siblings:
        """A new group that reuses what is cached of this context, if that is worth a copy."""
        sibling, cached = running_prompts.find(context), self.cached_prefixes.find(context)
        num_common = max(match[0] if match else 0 for match in (sibling, cached))
        # The last token is always read: the first new token is drawn from its logits.
        num_reused = min(num_common, len(context) - 1)
        if num_reused < max(_MIN_REUSED_TOKENS, _MIN_REUSED_SHARE * len(context)):
            return _Siblings()
        if sibling and sibling[0] == num_common:
            return _Siblings(num_reused, sibling=sibling[1])
        return _Siblings(num_reused, cached_prefix=cached[1] if cached else None)

    def _assign_slots(self, groups: list[_Siblings]) -> list[int]:
        """Give admitted sequences the next slots: first the leader of each group, then the siblings that copy its cache.

        Returns, for each of those siblings, the slot of its leader.
        """
        if not groups:
            return []
        newcomers = [sequence for group in groups for sequence in group.members]
        followers, leaders = [], []
        for group in sorted(groups, key=lambda group: work_kind(group.num_reused, group.members[0].length - group.num_reused)):
            slot, (leader, *others) = len(self._running), group.members
            if group.sibling is not None:
                self.backend.copy(group.sibling, slot, length=group.num_reused)
            elif group.num_reused:
                self.backend.restore_prefix(slot, group.cached_prefix, length=group.num_reused)
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

    def _start(self, leaders: list[int]) -> _RunningStep:
        """Start a forward pass that samples for every running sequence. The last ones copy the cache of their `leaders`."""
        num_readers = len(self._running) - len(leaders)
        readers = self._running[:num_readers]
        starts, uncached = [sequence.cached for sequence in readers], [sequence.next_read for sequence in readers]
        only_writes = not leaders and all(sequence.cached == sequence.length - 1 and sequence.tokens for sequence in readers)
        if only_writes and (drafts := self._draft()):
            pending = self._check(starts, uncached, drafts)
        else:
            drafts = ()
            rows = [sequence.sampling() for sequence in self._running]
            pending = self.backend.forward_and_sample(starts, uncached, leaders=leaders, rows=rows)
        for slot, (sequence, tokens) in enumerate(zip(readers, uncached, strict=True)):
            sequence.cached += len(tokens)
            if sequence.stops_short and sequence.cached == sequence.length - 1:
                sequence.stops_short = False
                self._save_prefix(slot)
        for slot, leader in enumerate(leaders, num_readers):
            self._running[slot].cached = self._running[leader].cached
            self.backend.copy(leader, slot, length=self._running[leader].cached)
        return _RunningStep(pending, tuple(self._running), drafts, only_writes)

    def _draft(self) -> tuple[DraftedTokens, ...]:
        """Drafts of the next tokens of each running sequence, within its limits. Empty if there are none, or no room."""
        least = self._draft_bar()
        if self._drafter is None or least is None:
            return ()
        drafts = []
        for sequence in self._running:
            num_left = min(sequence.request.sampling.max_tokens - len(sequence.tokens), self._max_length - sequence.length)
            drafts.append(self._drafter.draft(sequence, max_tokens=min(MAX_DRAFT, num_left - 1), least=least))
        ends = [sequence.length + len(draft.tokens) for sequence, draft in zip(self._running, drafts, strict=True)]
        num_new = sum(ends) - sum(sequence.cached for sequence in self._running)
        is_worth_it = any(draft.tokens for draft in drafts) and (
            self.backend.surely_has_room(num_slots=len(ends), num_new=num_new) or self.backend.has_room(ends)
        )
        return tuple(drafts) if is_worth_it else ()

    def _draft_bar(self) -> float | None:
        """The least probability of a drafted token that the next step verifies; None: no drafts."""
        return self._pace.bar(len(self._running)) if self._drafter and self._pace else None

    def _check(self, starts: list[int], uncached: list[tuple[int, ...]], drafts: Sequence[DraftedTokens]) -> PendingTokens:
        """Start a step that reads the drafts too, and samples at each of their positions."""
        num_drafted = [len(draft.tokens) for draft in drafts]
        self.counts.num_drafted += sum(num_drafted)
        return self.backend.forward_and_sample(
            starts,
            [(*tokens, *draft.tokens) for tokens, draft in zip(uncached, drafts, strict=True)],
            leaders=(),
            rows=[
                sequence.sampling(ahead=ahead)
                for sequence, num in zip(self._running, num_drafted, strict=True)
                for ahead in range(num + 1)
            ],
            num_drafted=num_drafted,
        )

    def _start_ahead(self, step: _RunningStep) -> _RunningStep | None:
        """Start the next step before the tokens of this one are known, so that the device does not wait for the host.

        Its tokens for sequences that turn out to have ended are discarded. None if others should be admitted first, or if
        most sequences will have ended.
        """
        if self._waiting and len(self._running) < self._max_running:
            return None
        if step.drafts or self._draft_bar() is not None:
            return None  # Drafts follow known tokens.
        running = self._running
        if any(sequence.length + 1 >= self._max_length or sequence.cached < sequence.length for sequence in running):
            return None
        if not (self.backend.surely_has_room(num_slots=len(running), num_new=len(running)) or self._find_room(reserve=1)):
            return None
        num_going_on = sum(len(sequence.tokens) + 1 < sequence.request.sampling.max_tokens for sequence in running)
        if 2 * num_going_on < len(running):
            return None
        place = {id(sequence): row for row, sequence in enumerate(step.sequences)}
        pending = self.backend.forward_next(
            step.pending,
            [place[id(sequence)] for sequence in running],
            [sequence.length for sequence in running],
            rows=[sequence.sampling(ahead=1) for sequence in running],
        )
        return None if pending is None else _RunningStep(pending, tuple(running))

    def _finish(self, step: _RunningStep) -> None:
        """Append the tokens of a step, and report the sequences that ended with it."""
        ended, num_tokens = [], 0
        slots = {id(sequence): slot for slot, sequence in enumerate(self._running)}
        drawn = zip(*step.pending.result(), strict=True)
        for sequence, draft in zip(step.sequences, step.drafts or repeat(NO_DRAFT), strict=False):
            own = list(islice(drawn, len(draft.tokens) + 1))
            if id(sequence) not in slots or sequence.cached < sequence.length:  # It has ended, or is still in its prefill.
                continue
            num_written, reason = self._write(sequence, own, draft)
            num_tokens += num_written
            if reason is not None:
                ended.append((slots[id(sequence)], reason))
        self.counts.add_step(num_tokens=num_tokens)
        if self._pace is not None and step.only_writes and num_tokens:
            self._pace.stepped(len(step.sequences), num_tokens=num_tokens)
        elif self._pace is not None:
            self._pace.interrupted()
        for slot, reason in sorted(ended, reverse=True):
            sequence = self._running[slot]
            end = sequence.length - 1  # The newest token has not been read.
            routes = self.backend.routes(slot, min(sequence.request.num_routed, end), end)
            self._free_slot(slot)
            self._report(sequence, reason, routes)

    def _write(
        self, sequence: _Sequence, drawn: Sequence[tuple[int, float]], draft: DraftedTokens
    ) -> tuple[int, FinishReason | None]:
        """Append the sampled tokens up to the end or the first wrong draft: later ones were sampled in another context."""
        num_written = num_right = 0
        reason = None
        for token, logprob in drawn:
            sequence.append(token, logprob, self._version)
            num_written += 1
            reason = sequence.finish_reason(self._tokenizer, max_length=self._max_length)
            is_right = num_right < len(draft.tokens) and draft.tokens[num_right] == token
            num_right += is_right
            if reason is not None or not is_right:
                break
        sequence.cached = sequence.length - 1
        if self._drafter is not None and draft.tokens:
            self._drafter.learn(draft, num_right=num_right, num_known=num_written)
            self.counts.num_accepted += num_right
        return num_written, reason

    def _report(self, sequence: _Sequence, reason: FinishReason, routes: NDArray[Any] | None = None) -> None:
        if self._drafter is not None:
            self._drafter.leave(sequence)
        self._reports.append(sequence.finish(reason, routes))

    def _free_slot(self, slot: int) -> None:
        """Cache a slot's prefix and free the slot: the last running sequence moves in, so that slots stay contiguous."""
        ended = self._running[slot]
        if ended.is_current:
            self._save_prefix(slot)
        self._vacate(slot)

    def _save_prefix(self, slot: int) -> None:
        """Cache a slot's prefix, if it is long enough."""
        sequence = self._running[slot]
        if self._max_cached and sequence.cached >= _MIN_REUSED_TOKENS:
            saved = self.backend.save_prefix(slot, length=sequence.cached)
            self.cached_prefixes.keep(sequence.context[: sequence.cached], saved)

    @torch.inference_mode()
    def _put_back(self, slot: int) -> None:
        """Preempt a running sequence: it waits again, before all others. Its tokens are kept, its cache is not."""
        sequence = self._running[slot]
        self._vacate(slot)
        sequence.cached, sequence.is_current = 0, False
        self._waiting.appendleft(sequence)

    def _vacate(self, slot: int) -> None:
        last = self._running.pop()
        self.backend.free_slot(slot, len(self._running), length=last.cached)
        if slot < len(self._running):
            self._running[slot] = last


def make_backend(runner: ModelRunner, end_ids: Sequence[int], *, max_bytes: int | None = None) -> CacheBackend[Any]:
    """The cache backend of the group `reroll.cache_backends` for this type of device (pages and CUDA graphs on a GPU), or
    `recurrent` for models whose layers carry a state, or `vision` for those that see; else dense slots."""
    kind = "recurrent" if runner.is_recurrent else "vision" if runner.eye else runner.device.type
    opened = load_entry("reroll.cache_backends", kind)
    if opened is None and runner.is_recurrent:
        raise ModelError("models whose layers carry a state need the cache backend `recurrent`: install reroll with its zoo")
    if opened is None:
        return SlotBackend(runner, max_bytes=max_bytes)
    backend: CacheBackend[Any] = opened(runner, end_ids, max_bytes=max_bytes)
    return backend


def _prefix_index(backend: CacheBackend[Any], *, max_entries: int) -> PrefixIndex[Any]:
    """An index for the prefixes that this backend saves."""
    bytes_per_token = max(1, backend.bytes_per_token)  # Without attention layers, tokens take no memory.
    max_tokens, entry_tokens = _MAX_CACHED_BYTES // bytes_per_token, -(-backend.bytes_per_state // bytes_per_token)
    return backend.prefix_index(max_entries=max_entries, max_tokens=max_tokens, entry_tokens=entry_tokens)
