"""Engines that others wrote, behind reroll's seam: what vLLM and sglang have in common."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from reroll.config.parts import LoraConfig
from reroll.infer.base import Engine, EngineCounts, Finished
from reroll.infer.draft import Draft, check_request
from reroll.infer.whole import Weights
from reroll.models.load import DTYPES, Precision, load_model, resolve_base, resolve_model
from reroll.types import FinishReason, Request


class GuestEngine(Engine):
    """A guest schedules, keeps the cache and runs the model, on one device or on several that share each layer.

    reroll draws the tokens, decides when a completion ends, and keeps what was written: requests outlive a sleep and new
    weights, because they are handed in again with their tokens, and read anew.

    On a GPU a guest launches a step before the tokens of the last are known. A request that ends or is aborted may have one
    more in flight, which is dropped. What is in flight when weights come or the engine sleeps is taken first.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        weights: Weights,
        *,
        end_ids: frozenset[int],
        max_length: int,
        block_tokens: int,
        takes_parts: bool,
        can_sleep: bool,
    ) -> None:
        """`takes_parts`: the guest can be given some weights before the others. `can_sleep`: it can free its memory."""
        self._tokenizer, self._weights, self._end_ids, self._max_length = tokenizer, weights, end_ids, max_length
        self._takes_parts, self._can_sleep = takes_parts and weights.come_in_parts, can_sleep
        self._drafts: dict[str, Draft] = {}
        """By ticket."""
        self._tickets: dict[str, str] = {}
        """By request. The guest knows a request by its ticket, which no other gets: what is in flight for one that ended must
        not go to a later one of its name."""
        self._serials = itertools.count()
        self._reports: list[Finished] = []
        self._version = 0
        self._asleep = False
        self._has_weights = True
        """Whether they are on the device: asleep they are not, until new ones come."""
        self.block_tokens = block_tokens
        self.counts = EngineCounts()

    def submit(self, request: Request) -> None:
        check_request(request, max_length=self._max_length)
        ticket = self._admit(Draft(request, self._end_ids | frozenset(request.sampling.stop_token_ids)))
        if not self._asleep:
            self._hand_in(ticket)

    def abort(self, request_id: str) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return
        self._end(ticket, FinishReason.ABORT)
        if not self._asleep:
            self._withdraw([ticket])

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running, and ended ones not reported yet."""
        return len(self._drafts) + len(self._reports)

    def step(self) -> list[Finished]:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it before stepping")
        if self._drafts:
            self._advance()
        reports, self._reports = self._reports, []
        return reports

    def load_part(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """In place where the guest needs no others with them; else they wait on the host."""
        if not self._takes_parts:
            return super().load_part(weights)
        self._fill(self._weights.part(weights))
        return {}

    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        self._fill(self._weights.whole(weights))
        if not self._asleep:
            self._clear()
            self._hand_in_all()
        self._version = version

    def sleep(self) -> None:
        self._clear()
        if self._can_sleep:
            self._free()
            self._has_weights = False
        self._asleep = True

    def wake(self) -> None:
        if self._can_sleep:
            self._occupy(weights=not self._has_weights, cache=True)
            self._has_weights = True
        self._asleep = False
        self._hand_in_all()

    @abstractmethod
    def _hand_in(self, ticket: str) -> None:
        """Have the guest start a request, or go on with it, from the context in its draft."""

    @abstractmethod
    def _withdraw(self, tickets: Sequence[str]) -> None:
        """Have the guest end requests that it was given, and that are over."""

    @abstractmethod
    def _advance(self) -> None:
        """One step. What it wrote goes to `_append`."""

    @abstractmethod
    def _clear(self) -> None:
        """Empty the guest: its cache, and its requests, which the drafts keep. What is in flight is written first."""

    @abstractmethod
    def _copy_in(self, weights: Mapping[str, Tensor]) -> None:
        """Copy these into the guest's own tensors, whose addresses its CUDA graphs know. What is in flight is not disturbed."""

    @abstractmethod
    def _free(self) -> None:
        """Give the memory of weights and cache back; the weights wait on the host."""

    @abstractmethod
    def _occupy(self, *, weights: bool, cache: bool) -> None:
        """Take the memory of either back, or of both."""

    def _admit(self, draft: Draft) -> str:
        """Its ticket, a new one every time: the guest must not take it for what it ran before."""
        ticket = f"{next(self._serials):016d}"  # None begins with another: sglang would end both.
        self._tickets[draft.request.id], self._drafts[ticket] = ticket, draft
        return ticket

    def _hand_in_all(self) -> None:
        drafts, self._drafts = self._drafts, {}
        for draft in drafts.values():
            self._hand_in(self._admit(draft))

    def _num_left(self, draft: Draft) -> int:
        """Tokens that may still be written for a request."""
        return min(draft.request.sampling.max_tokens - len(draft.tokens), self._max_length - draft.length)

    def _append(self, ticket: str, token: int, logprob: float) -> bool:
        """Write a token down; returns whether its request is over."""
        draft = self._drafts[ticket]
        draft.append(token, logprob, self._version)
        reason = draft.finish_reason(self._tokenizer, max_length=self._max_length)
        if reason is not None:
            self._end(ticket, reason)
        return reason is not None

    def _end(self, ticket: str, reason: FinishReason) -> None:
        draft = self._drafts.pop(ticket)
        del self._tickets[draft.request.id]
        self._reports.append(draft.finish(reason))

    def _count_context(self, ticket: str, *, num_reused: int) -> None:
        """The guest has read a request's context, but for so many tokens that it knew."""
        self.counts.num_reused_tokens += num_reused
        self.counts.num_prefill_tokens += self._drafts[ticket].length - num_reused

    def _adapt(self, model: str, *, precision: Precision, lora: LoraConfig | None) -> None:
        """Where `model` is an adapter, the guest has read its base: what the adapter makes of it comes by push."""
        if resolve_base(model) != resolve_model(model):
            policy = load_model(model, dtype=DTYPES[precision], device="cpu", lora=lora)
            self.load_weights(dict(policy.named_parameters()), version=0)

    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        if not self._has_weights:
            self._occupy(weights=True, cache=False)
            self._has_weights = True
        self._copy_in(weights)
