"""What vLLM and sglang have in common: external engines behind reroll's engine interface."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from reroll.config.parts import LoraConfig
from reroll.infer.base import Engine, EngineCounts, Finished
from reroll.infer.sequence import SequenceState, check_request, end_ids, tell
from reroll.models.load import DTYPES, Precision, load_model, resolve_base, resolve_model
from reroll.types import FinishReason, Request, TokenBlock
from reroll_zoo.external_engine.weights import HFWeightAssembler


class ExternalEngine(Engine):
    """The external engine schedules, holds the KV cache and runs the model, on one device or tensor-parallel on several.

    reroll samples the tokens, decides when a completion ends, and keeps the state of every sequence: requests survive
    sleep and new weights because they are submitted again with their tokens, and prefilled again.

    On a GPU an external engine launches a step before the tokens of the last are known. A request that ends or is aborted
    may have one more token in flight, which is dropped. Tokens in flight when weights arrive or the engine sleeps are
    taken first.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        weights: HFWeightAssembler,
        *,
        end_ids: frozenset[int],
        max_length: int,
        block_tokens: int,
        takes_parts: bool,
        can_sleep: bool,
    ) -> None:
        """`takes_parts`: it can load some weights before the others. `can_sleep`: it can free its memory."""
        self._tokenizer, self._weights, self._end_ids, self._max_length = tokenizer, weights, end_ids, max_length
        self._takes_parts, self._can_sleep = takes_parts and weights.come_in_parts, can_sleep
        self._states: dict[str, SequenceState] = {}
        """By external id."""
        self._external_ids: dict[str, str] = {}
        """By request id. The external engine knows a request by an id that is used once: a token in flight for a request that
        ended must not go to a later request with the same name."""
        self._serials = itertools.count()
        self._reports: list[Finished] = []
        self._version = 0
        self._asleep = False
        self._has_weights = True
        """Whether the weights are on the device: not during sleep, until new ones are loaded."""
        self.block_tokens = block_tokens
        self.counts = EngineCounts()

    def submit(self, request: Request) -> None:
        check_request(request, max_length=self._max_length)
        state = SequenceState(request, self._end_ids | frozenset(request.sampling.stop_token_ids))
        reason = state.finish_reason(self._tokenizer, max_length=self._max_length)
        if reason is not None:  # All of it was written before.
            self._reports.append(state.finish(reason))
            return
        external_id = self._admit(state)
        if not self._asleep:
            self._submit_external(external_id)

    def abort(self, request_id: str) -> None:
        external_id = self._external_ids.get(request_id)
        if external_id is None:
            return
        self._end(external_id, FinishReason.ABORT)
        if not self._asleep:
            self._abort_external([external_id])

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running, and ended ones not reported yet."""
        return len(self._states) + len(self._reports)

    def step(self) -> list[Finished]:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it before stepping")
        if self._states:
            self._step_external()
        reports, self._reports = self._reports, []
        return reports

    def new_tokens(self) -> TokenBlock | None:
        return tell(self._states.values())

    def load_part(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """In place where the external engine can load some at a time; else they wait on the host."""
        if not self._takes_parts:
            return super().load_part(weights)
        self._load(self._weights.part(weights))
        return {}

    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        self._load(self._weights.complete(weights))
        if not self._asleep:
            self._clear()
            self._submit_all()
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
        self._submit_all()

    @abstractmethod
    def _submit_external(self, external_id: str) -> None:
        """Start a request in the external engine, or continue it from the context in its state."""

    @abstractmethod
    def _abort_external(self, external_ids: Sequence[str]) -> None:
        """Abort requests in the external engine; they are over, or will be submitted again."""

    @abstractmethod
    def _step_external(self) -> None:
        """Run one step, and pass its tokens to `_append`."""

    @abstractmethod
    def _clear(self) -> None:
        """Empty the engine: its KV cache and its requests, whose states stay here. Tokens in flight are taken first."""

    @abstractmethod
    def _copy_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy these into the engine's own tensors, whose addresses its CUDA graphs hold. A step in flight is not disturbed."""

    @abstractmethod
    def _free(self) -> None:
        """Free the memory of weights and KV cache; the weights wait on the host."""

    @abstractmethod
    def _occupy(self, *, weights: bool, cache: bool) -> None:
        """Allocate the memory of weights, of the KV cache, or of both again."""

    def _admit(self, state: SequenceState) -> str:
        """Register a request under a new external id, so that it cannot be confused with what ran before; returns the id."""
        external_id = f"{next(self._serials):016d}"  # Fixed width, so that no id is a prefix of another: sglang would end both.
        self._external_ids[state.request.id], self._states[external_id] = external_id, state
        return external_id

    def _submit_all(self) -> None:
        states, self._states = self._states, {}
        for state in states.values():
            self._submit_external(self._admit(state))

    def _num_left(self, state: SequenceState) -> int:
        """Tokens that may still be generated for a request."""
        return min(state.request.sampling.max_tokens - len(state.tokens), self._max_length - state.length)

    def _append(self, external_id: str, token: int, logprob: float) -> bool:
        """Add a token to its request; returns whether the request is over."""
        state = self._states[external_id]
        state.append(token, logprob, self._version)
        reason = state.finish_reason(self._tokenizer, max_length=self._max_length)
        if reason is not None:
            self._end(external_id, reason)
        return reason is not None

    def _end(self, external_id: str, reason: FinishReason) -> None:
        state = self._states.pop(external_id)
        del self._external_ids[state.request.id]
        self._reports.append(state.finish(reason))

    def _count_context(self, external_id: str, *, num_reused: int) -> None:
        """Count a request's prefill, of which `num_reused` tokens came from the prefix cache."""
        self.counts.num_reused_tokens += num_reused
        self.counts.num_prefill_tokens += self._states[external_id].length - num_reused

    def _adapt(self, model: str, *, precision: Precision, lora: LoraConfig | None) -> None:
        """Where `model` is an adapter, the external engine has loaded its base: the merged weights are pushed to it."""
        if resolve_base(model) != resolve_model(model):
            policy = load_model(model, dtype=DTYPES[precision], device="cpu", lora=lora)
            self.load_weights(dict(policy.named_parameters()), version=0)

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        if not self._has_weights:
            self._occupy(weights=True, cache=False)
            self._has_weights = True
        self._copy_weights(weights)


def end_ids_of(folder: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a completion of the model in this folder."""
    try:
        return end_ids(tokenizer, GenerationConfig.from_pretrained(folder))
    except OSError:  # A folder need not have any settings.
        return end_ids(tokenizer, None)
