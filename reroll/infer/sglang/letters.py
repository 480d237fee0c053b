"""What the engine and the process that holds sglang say to each other. Both ends may be of different Python versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reroll.infer.embedded.sampler import Row
from reroll.weights.parcel import Entry, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How sglang is to be opened."""

    server: Mapping[str, Any]
    """Of its `ServerArgs`."""
    device: str
    memory_share: float
    """Of each GPU, for weights and cache."""
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
class Start:
    """A request handed in."""

    ticket: str
    context: tuple[int, ...]
    max_tokens: int
    row: Row
    """How its tokens are drawn. The forbidden ones are so before `held_until`."""
    held_until: int
    """A position in the whole sequence."""


@dataclass(frozen=True, slots=True)
class Step:
    """Take these in, end those, then write until at least one request has a token."""

    starts: tuple[Start, ...]
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop all requests and all that was read. What is in flight is written first."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Use these weights from now on. They are lent until the answer."""

    entries: tuple[Entry, ...]
    payload: Payload
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Limit:
    """Decode so many sequences together at most."""

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
class Close:
    """End."""


@dataclass(frozen=True, slots=True)
class Written:
    """The answer to all letters: the tokens that came since the last one, in order."""

    tickets: tuple[str, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_reused: Mapping[str, int]
    """Context tokens that were not read, of requests that have their first token."""
    finished: frozenset[str]
    """Requests that need not be ended: they have all their tokens."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The last word of a process that cannot go on."""

    traceback: str


Letter = Step | Forget | Fill | Limit | Sleep | Wake | Close
