"""The router's state for each worker and each pending request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from reroll.infer.worker import Command, EngineStatus
from reroll.observe.metrics import Mean, Stats, Sum
from reroll.tokens.pictures import FIRST_ID, pictures_to_send
from reroll.types import Completion, PartialCompletion, Request

OnTokens = Callable[[NDArray[np.uint32], NDArray[np.float64], int], None]
"""Called with the next tokens of a request, their log-probs and their weight version."""


@dataclass(slots=True)
class WorkerState:
    """The router's state for one worker."""

    rank: int
    queued: list[Command] = field(default_factory=list)
    has_queued: asyncio.Event = field(default_factory=asyncio.Event)
    is_away: bool = False
    """Paused or asleep: its requests wait, new ones go to the others."""
    is_dead: bool = False
    """Its process is gone, and its requests were moved to the others."""
    needs_weights: bool = False
    """It was (re)started with the weights of the model folder, and serves after the next push."""
    has_joined: bool = False
    """It joined during the run, and is removed if it dies."""
    load: int = 0
    """Requests sent or queued that are not answered yet."""
    has_load: asyncio.Event = field(default_factory=asyncio.Event)
    pictures: set[str] = field(default_factory=set)
    """Those that it was sent."""
    seen_ids: tuple[int, ...] = ()
    """The prompt that was last looked through for them: siblings have the very same."""
    status: EngineStatus | None = None
    """As of its last report."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the worker is being restarted."""

    @property
    def is_serving(self) -> bool:
        """Whether it may be sent requests."""
        return not (self.is_dead or self.needs_weights)

    @property
    def is_ready(self) -> bool:
        """Whether it answers what it is sent now."""
        return not (self.is_away or self.is_dead or self.needs_weights)

    def pictures_for(self, request: Request) -> dict[str, bytes]:
        """Those of its prompt that the worker was not sent before."""
        if request.prompt_ids is self.seen_ids:
            return {}
        self.seen_ids = request.prompt_ids
        has_any = max(request.prompt_ids, default=0) >= FIRST_ID
        missing = pictures_to_send(request.prompt_ids, but=self.pictures) if has_any else {}
        self.pictures.update(missing)
        return missing

    def post(self, command: Command) -> None:
        """Queue a command for the next call."""
        self.queued.append(command)
        self.has_queued.set()


@dataclass(frozen=True, slots=True)
class Affinity:
    """The worker that holds the cached prefix of a conversation."""

    worker: WorkerState
    num_opening: int
    """Length of its first prompt: a request that starts with all of it is a later turn or a sibling."""


@dataclass(slots=True)
class PendingRequest:
    """A request that was sent to a worker, its tokens so far, and the future of its completion."""

    request: Request
    answer: asyncio.Future[Completion]
    worker: WorkerState
    on_tokens: OnTokens
    partial: PartialCompletion = field(init=False)

    def __post_init__(self) -> None:
        self.partial = PartialCompletion(self.request.written)

    def add(self, start: int, ids: NDArray[np.uint32], logprobs: NDArray[np.float64], version: int) -> None:
        """Add reported tokens. A late report of a worker that the request has left does not fit, and is ignored."""
        if start == self.partial.num_tokens:
            self.partial.add(ids, logprobs, version)
            self.on_tokens(ids, logprobs, version)

    def rest(self) -> Request:
        """The request, to be continued from its tokens so far."""
        if self.partial.num_tokens == len(self.request.written.token_ids):
            return self.request
        return replace(self.request, written=self.partial.written())


def work_between(before: EngineStatus | None, now: EngineStatus) -> Stats:
    """Metrics of a worker between two reports; `before` is None for the first."""
    tokens, prefill, reused = now.num_tokens, now.num_prefill_tokens, now.num_reused_tokens
    steps, busy_s = now.num_steps, now.busy_s
    if before is not None:
        tokens, prefill = tokens - before.num_tokens, prefill - before.num_prefill_tokens
        reused, steps, busy_s = reused - before.num_reused_tokens, steps - before.num_steps, busy_s - before.busy_s
    gave_way = now.num_gave_way - (before.num_gave_way if before else 0)
    drafted = now.num_drafted - (before.num_drafted if before else 0)
    accepted = now.num_accepted - (before.num_accepted if before else 0)
    return Stats(
        {
            "engine/tokens": Sum(tokens),
            "engine/prefill_tokens": Sum(prefill),
            "engine/reused_tokens": Sum(reused),
            "engine/gave_way": Sum(gave_way),
            "engine/drafted_tokens": Sum(drafted),
            "engine/accepted_tokens": Sum(accepted),
            "engine/busy_s": Sum(busy_s),
            "engine/tokens_per_s": Sum(tokens / busy_s if busy_s else 0.0),
            "engine/occupancy": Mean((tokens - accepted) / now.max_running, steps),
        }
    )
