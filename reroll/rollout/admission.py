"""Which prompts may start, which groups may be trained on, and when a slot frees. Pure decisions: no clock, no I/O, no tasks.

A group may be trained if the weights have moved on by at most `max_staleness` versions since it was admitted. Two rules keep
that true without throwing work away. At most as many groups are open as the coming steps can still take while they are fresh
enough; and the oldest go first. Whatever falls behind all the same is evicted, and its prompt is queued again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

P = TypeVar("P")

MAX_TRIES = 3
"""A prompt that was sent back to the queue twice is waited for the third time, or the slowest would never be learned from."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[P]):
    """A prompt's place in the order of admission, and its slot."""

    number: int
    prompt: P
    version: int
    """The weight version that was current at admission."""
    num_tries: int
    """How often this prompt was admitted, this time included."""
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class Queued(Generic[P]):
    """A prompt that was drawn and is owed a training step."""

    prompt: P
    num_tries: int = 0
    number: int | None = None
    """Set when a run resumes: it gets the ticket it had, so that it is sampled with the same seeds."""


@dataclass(frozen=True, slots=True)
class Taken(Generic[P]):
    """What one step trains on, and what must stop because of it."""

    tickets: list[Ticket[P]]
    """Oldest first. They keep their slots until `release`."""
    returned: list[Ticket[P]]
    """Surplus of over-sampling, or too old for the step after this one. Their prompts are at the front of the queue."""


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[P]):
    """All that a resumed run needs: every prompt that was drawn and not yet trained on or dropped."""

    version: int
    next_number: int
    queue: list[Queued[P]]


class Admission(Generic[P]):
    """The slots of a rollout. `draw` gives the next prompt when none is queued."""

    def __init__(
        self,
        draw: Callable[[], P],
        *,
        prompts_per_step: int,
        max_staleness: int = 0,
        oversample: float = 1.0,
        window: int = 1,
    ) -> None:
        self._draw = draw
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        # Less a hair: 100 prompts times 1.1 are 110, but 110.00000000000001 in floats.
        self._num_surplus = math.ceil(prompts_per_step * oversample - 1e-9) - prompts_per_step
        self._num_candidates = window * prompts_per_step + self._num_surplus
        self._version = 0
        self._next_number = 0
        self._queue: deque[Queued[P]] = deque()
        self._open: dict[int, Ticket[P]] = {}
        """Running or finished, in order of admission."""
        self._held: dict[int, Ticket[P]] = {}
        """Taken and not yet released."""
        self._num_finished = 0

    @property
    def version(self) -> int:
        """The weight version that a group admitted now would be sampled under."""
        return self._version

    @property
    def num_open(self) -> int:
        """Groups running, or finished and not taken."""
        return len(self._open)

    @property
    def num_held(self) -> int:
        """Groups taken and not released."""
        return len(self._held)

    @property
    def num_slots(self) -> int:
        """How many groups may be open now."""
        # A group admitted while a step is training can only join later ones, so it has one step fewer to be taken in.
        num_steps = self._max_staleness + (0 if self._held else 1)
        return num_steps * self._prompts_per_step + self._num_surplus if num_steps else 0

    def admit(self) -> list[Ticket[P]]:
        """Fill the free slots. Start these now."""
        return [self._issue() for _ in range(self.num_slots - len(self._open))]

    def finish(self, ticket: Ticket[P], *, keep: bool) -> None:
        """The group has ended. If it is not kept (filtered, failed), its slot is free at once and its prompt is spent."""
        if self._open.get(ticket.number) is not ticket or ticket.is_finished:
            raise ValueError(f"ticket {ticket.number} is not running: it ended or was sent back before")
        if keep:
            ticket.is_finished = True
            self._num_finished += 1
        else:
            del self._open[ticket.number]

    def take(self) -> Taken[P] | None:
        """One step's worth of finished groups, or None if they are not there yet. Release them before the next take."""
        if self._held:
            raise ValueError(f"{len(self._held)} groups are taken and not released: call release before the next take")
        ready = self._ready()
        if ready is None:
            return None
        for ticket in ready:
            self._held[ticket.number] = self._open.pop(ticket.number)
        self._num_finished -= len(ready)
        surplus = [ticket for ticket in islice(self._open.values(), self._num_surplus) if not ticket.is_finished]
        # The next training can be no earlier than the next version.
        return Taken(ready, self._send_back([*surplus, *self._stale_at(self._version + 1)]))

    def release(self, numbers: Sequence[int], *, version: int) -> list[Ticket[P]]:
        """The taken tickets were trained on and weights of this version were pushed. Returns groups that are too old now:
        stop them; their prompts are at the front of the queue."""
        if set(numbers) != self._held.keys():
            raise ValueError(f"release all that was taken, once: tickets {sorted(self._held)}, got {sorted(numbers)}")
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}: weight versions only grow")
        self._held.clear()
        self._version = version
        return self._send_back(self._stale_at(version))

    def snapshot(self) -> Snapshot[P]:
        """What is owed. A group that is taken and not released counts as not trained on: take the snapshot after release."""
        live = sorted([*self._held.values(), *self._open.values()], key=lambda ticket: ticket.number)
        replays = [Queued(ticket.prompt, ticket.num_tries - 1, ticket.number) for ticket in live]
        return Snapshot(self._version, self._next_number, [*replays, *self._queue])

    def restore(self, snapshot: Snapshot[P]) -> None:
        """Go on from a snapshot. Groups that were open start again under the tickets they had."""
        if self._open or self._held or self._queue:
            raise ValueError("restore before the first admission: this one already has prompts in flight")
        self._version = snapshot.version
        self._next_number = snapshot.next_number
        self._queue.extend(snapshot.queue)

    def _issue(self) -> Ticket[P]:
        queued = self._queue.popleft() if self._queue else Queued(self._draw())
        number = queued.number
        if number is None:
            number = self._next_number
            self._next_number += 1
        ticket = self._open[number] = Ticket(number, queued.prompt, self._version, queued.num_tries + 1)
        return ticket

    def _ready(self) -> list[Ticket[P]] | None:
        """The oldest finished groups inside the window, if they make a step. Prompts sent back most often come first."""
        if self._num_finished < self._prompts_per_step:
            return None
        ready: list[Ticket[P]] = []
        num_running = 0
        for ticket in islice(self._open.values(), self._num_candidates):
            if ticket.is_finished:
                ready.append(ticket)
                continue
            num_running += 1
            if ticket.num_tries >= MAX_TRIES or num_running > self._num_candidates - self._prompts_per_step:
                return None
        if len(ready) < self._prompts_per_step:
            return None
        ready.sort(key=lambda ticket: -ticket.num_tries)
        return sorted(ready[: self._prompts_per_step], key=lambda ticket: ticket.number)

    def _stale_at(self, version: int) -> list[Ticket[P]]:
        return [ticket for ticket in self._open.values() if version - ticket.version > self._max_staleness]

    def _send_back(self, tickets: Sequence[Ticket[P]]) -> list[Ticket[P]]:
        """Close these tickets, each once, and queue their prompts in front of all others, oldest first."""
        returned = [ticket for ticket in dict.fromkeys(tickets) if self._open.pop(ticket.number, None)]
        returned.sort(key=lambda ticket: ticket.number)
        self._num_finished -= sum(ticket.is_finished for ticket in returned)
        self._queue.extendleft(Queued(ticket.prompt, ticket.num_tries) for ticket in reversed(returned))
        return returned
