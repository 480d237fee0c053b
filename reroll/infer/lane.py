"""What the router keeps about the workers behind it, and about who waits for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from reroll.infer.worker import Command, EngineStatus
from reroll.observe.metrics import Mean, Stats, Sum
from reroll.types import Completion, Request


@dataclass(slots=True)
class Lane:
    """What the router keeps about one worker."""

    rank: int
    outbox: list[Command] = field(default_factory=list)
    has_mail: asyncio.Event = field(default_factory=asyncio.Event)
    is_away: bool = False
    """Off its device: what it has waits, and others get what is new."""
    is_dead: bool = False
    """Its process is gone: others have what it had."""
    needs_weights: bool = False
    """It was started anew and holds another policy: others have its share until the next push."""
    load: int = 0
    """Requests sent or queued whose answer is awaited."""
    has_load: asyncio.Event = field(default_factory=asyncio.Event)
    status: EngineStatus | None = None
    """As of its last report."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its worker is started anew."""

    @property
    def is_serving(self) -> bool:
        """Whether it may be sent requests."""
        return not (self.is_dead or self.needs_weights)

    def post(self, command: Command) -> None:
        """Queue a command for the next call."""
        self.outbox.append(command)
        self.has_mail.set()


@dataclass(frozen=True, slots=True)
class Home:
    """Where a conversation takes place."""

    lane: Lane
    num_opening: int
    """Tokens of the prompt that it began with: a request that begins with the same is part of it, or a sibling's."""


@dataclass(slots=True)
class Ticket:
    """One awaited completion."""

    request: Request
    answer: asyncio.Future[Completion]
    lane: Lane


def work_between(before: EngineStatus | None, now: EngineStatus) -> Stats:
    """What a worker did from one report to another; None: from its start."""
    tokens, prefill, reused = now.num_tokens, now.num_prefill_tokens, now.num_reused_tokens
    steps, busy_s = now.num_steps, now.busy_s
    if before is not None:
        tokens, prefill = tokens - before.num_tokens, prefill - before.num_prefill_tokens
        reused, steps, busy_s = reused - before.num_reused_tokens, steps - before.num_steps, busy_s - before.busy_s
    return Stats(
        {
            "engine/tokens": Sum(tokens),
            "engine/prefill_tokens": Sum(prefill),
            "engine/reused_tokens": Sum(reused),
            "engine/busy_s": Sum(busy_s),
            "engine/tokens_per_s": Sum(tokens / busy_s if busy_s else 0.0),
            "engine/occupancy": Mean(tokens / now.max_running, steps),
        }
    )
