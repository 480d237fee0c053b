"""The messages between the engine and the process that runs sglang. The two may run different Python versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reroll.infer.embedded.sampler import RowSampling
from reroll.weights.buckets import Entry, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenServer:
    """Start sglang with these options: the first message."""

    server: Mapping[str, Any]
    """Fields of its `ServerArgs`."""
    device: str
    memory_share: float
    """Share of each GPU's memory for weights and KV cache."""
    max_length: int | None
    """Longest context; None: as long as the model takes."""


@dataclass(frozen=True, slots=True)
class Ready:
    """sglang is open."""

    max_length: int
    block_tokens: int
    takes_parts: bool
    """Whether weights can be loaded some at a time: nothing is computed from all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """Start a request, or continue it from its context."""

    external_id: str
    context: tuple[int, ...]
    max_tokens: int
    row: RowSampling
    """How its tokens are sampled. `forbidden` applies to positions before `held_until`."""
    held_until: int
    """A position in the whole sequence."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Take these in, end those, then write until at least one request has a token."""

    starts: tuple[StartRequest, ...]
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Drop all requests and the KV cache. Tokens in flight are reported first."""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load these weights. Their memory is valid until the answer."""

    entries: tuple[Entry, ...]
    payload: Payload
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SetMaxRunning:
    """Decode at most this many sequences together."""

    max_running: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give the memory of weights and cache back; the weights wait on the host. There are no requests."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Take the memory back: of the weights, of the cache, or of both."""

    weights: bool
    cache: bool


@dataclass(frozen=True, slots=True)
class CloseServer:
    """End."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The answer to every message: the tokens generated since the last answer, in order."""

    external_ids: tuple[str, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_reused: Mapping[str, int]
    """For requests that got their first token: prompt tokens that came from the prefix cache."""
    finished: frozenset[str]
    """Requests that reached their `max_tokens` and need not be aborted."""


@dataclass(frozen=True, slots=True)
class ServerError:
    """The process stops on this error: its last message."""

    traceback: str


Message = RunStep | ResetCache | LoadWeights | SetMaxRunning | Sleep | Wake | CloseServer
