"""The state of a request inside an engine: its tokens so far, and when it is finished."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedTokenizerBase

from reroll.infer.base import Finished
from reroll.infer.embedded.sampler import RowSampling
from reroll.types import Completion, FinishReason, Request, TokenBlock


def check_request(request: Request, *, max_length: int) -> None:
    """Raise ValueError, naming the request, if it can never run on a model that takes so many tokens."""
    if not request.prompt_ids:
        raise ValueError(f"request {request.id} has an empty prompt: give it at least one token")
    if len(request.prompt_ids) >= max_length:
        raise ValueError(
            f"request {request.id} has a prompt of {len(request.prompt_ids)} tokens, but the model takes "
            f"{max_length}: lower rollout.max_prompt_tokens"
        )
    if request.sampling.max_tokens < 1:
        raise ValueError(f"request {request.id} asks for {request.sampling.max_tokens} tokens: max_tokens must be at least 1")


def end_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    """Tokens that end a completion: the tokenizer's, and those that the model's generation settings name."""
    named = generation.eos_token_id if generation is not None else None
    tokens = (tokenizer.eos_token_id, *(named if isinstance(named, list) else [named]))
    return frozenset(token for token in tokens if token is not None)


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request and the tokens generated for it so far, here or before it came here."""

    request: Request
    end_ids: frozenset[int]
    tokens: list[int] = field(init=False)
    logprobs: list[float] = field(init=False)
    versions: list[tuple[int, int]] = field(init=False)
    length: int = field(init=False)
    """Number of tokens in the context: prompt and completion."""
    num_told: int = field(init=False)
    """Leading tokens that whoever asked knows of."""

    def __post_init__(self) -> None:
        written = self.request.written
        self.tokens, self.logprobs, self.versions = list(written.token_ids), list(written.logprobs), list(written.versions)
        self.length = len(self.request.prompt_ids) + len(self.tokens)
        self.num_told = len(self.tokens)

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.tokens)

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.length += 1
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))

    def finish_reason(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> FinishReason | None:
        """Why the completion ends with its last token; None while it goes on."""
        sampling, num_tokens = self.request.sampling, len(self.tokens)
        if num_tokens and num_tokens >= sampling.min_tokens:
            if self.tokens[-1] in self.end_ids:
                return FinishReason.STOP
            if completes_stop(tokenizer, self.tokens, sampling.stop):
                return FinishReason.STOP
        if num_tokens >= sampling.max_tokens or self.length >= max_length:
            return FinishReason.LENGTH
        return None

    def finish(self, reason: FinishReason, routes: NDArray[Any] | None = None) -> Finished:
        completion = Completion(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            versions=tuple(self.versions),
            routes=routes,
        )
        return Finished(self.request.id, completion)


def tell(states: Iterable[SequenceState]) -> TokenBlock | None:
    """What was written for these since they were last told of; None if nothing was."""
    rows: list[tuple[str, int, int, int]] = []
    ids, logprobs = array("I"), array("d")
    for state in states:
        if state.num_told == len(state.tokens):
            continue
        rows += [(state.request.id, *row) for row in _untold_runs(state)]
        ids.extend(state.tokens[state.num_told :])
        logprobs.extend(state.logprobs[state.num_told :])
        state.num_told = len(state.tokens)
    if not rows:
        return None
    request_ids, starts, counts, versions = zip(*rows, strict=True)
    return TokenBlock(
        request_ids=request_ids,
        starts=starts,
        counts=counts,
        versions=versions,
        token_ids=np.frombuffer(ids, dtype=np.uint32),
        logprobs=np.frombuffer(logprobs, dtype=np.float64),
    )


def _untold_runs(state: SequenceState) -> list[tuple[int, int, int]]:
    """The runs of tokens under one version, after those that were told: where each starts, how long it is, the version."""
    end = len(state.tokens)
    runs: list[tuple[int, int, int]] = []
    for version, count in reversed(state.versions):
        start = max(end - count, state.num_told)
        runs.append((start, end - start, version))
        end -= count
        if end <= state.num_told:
            break
    return runs[::-1]


def sampling_until_min_tokens(state: SequenceState) -> RowSampling:
    """How its tokens are sampled until there are `min_tokens`, with stop tokens forbidden. After that nothing is forbidden."""
    sampling = state.request.sampling
    return RowSampling(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        forbidden=tuple(sorted(state.end_ids)),
    )


_BYTES_PER_CHARACTER = 4
"""A token may be one byte of a character: that many tokens per character are enough to hold a stop string."""

_MARGIN_TOKENS = 4


def completes_stop(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether the last token completes one of the strings."""
    if not stops:
        return False
    window = token_ids[-(_BYTES_PER_CHARACTER * max(map(len, stops)) + _MARGIN_TOKENS) :]
    text = _decode(tokenizer, window)
    found = [stop for stop in stops if stop in text]
    if not found:
        return False
    before = _decode(tokenizer, window[:-1])
    return any(text.count(stop) > before.count(stop) for stop in found)


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
