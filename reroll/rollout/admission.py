"""Which prompts may start, which groups may be trained on, and when a slot frees. Pure decisions: no clock, no I/O, no tasks.

A group may be trained if the weights have moved on by at most `max_staleness` versions since it was admitted. Two rules keep
that true without throwing work away. At most as many groups are open as the coming steps can still take while they are fresh
enough; and the oldest go first. Whatever falls behind all the same is evicted, and its prompt is queued again.

Every place in the coming steps belongs to a domain, in the order in which the prompts' mix gives turns. A domain's groups
fill its places, oldest first, and a group that is dropped is replaced by one of its domain: so the mix that was asked for is
the mix that is trained on. Only a domain that drops group after group cedes its places of the step that waits for it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)


class Supply(Protocol[P_co]):
    """An endless supply of prompts from one domain or several."""

    @property
    def shares(self) -> Mapping[str, float]:
        """The weight of every domain."""

    def next_domain(self) -> str:
        """Whose turn it is."""

    def next(self, domain: str) -> P_co:
        """The next prompt of a domain, whether or not it is its turn."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[P]):
    """A prompt's place in the order of admission, and its slot."""

    number: int
    """Unique. Grows with each admission of a domain, whatever happens in the others: it names the samples' seeds."""
    prompt: P
    domain: str
    version: int
    """The weight version that was current at admission."""
    num_tries: int
    """How often this prompt was admitted, this time included."""
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued(Generic[P]):
    """A prompt that was drawn and is owed a training step."""

    prompt: P
    domain: str
    num_tries: int = 0
    number: int | None = None
    """Set when a run resumes: it gets the ticket it had, so that it is sampled with the same seeds."""


@dataclass(frozen=True, slots=True)
class Taken(Generic[P]):
    """What one step trains on, and what must stop because of it."""

    tickets: list[Ticket[P]]
    """By number. They keep their slots until `release`."""
    returned: list[Ticket[P]]
    """Surplus of over-sampling, or too old for the step after this one. Their prompts are at the front of the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Generic[P]):
    """All that a resumed run needs: every prompt that was drawn and not yet trained on or dropped, and whose turn is next."""

    version: int
    num_issued: dict[str, int]
    """Tickets by domain."""
    queue: list[Queued[P]]
    places: list[str]
    """The domains of the coming places."""
    num_dropped: dict[str, int]
    """Groups by domain, since the last step was taken."""
    num_ceded_to: dict[str, int]
    """Places that each domain was given by others."""


class Admission(Generic[P]):
    """The slots of a rollout."""

    def __init__(
        self,
        prompts: Supply[P],
        *,
        prompts_per_step: int,
        max_staleness: int = 0,
        oversample: float = 1.0,
        window: int = 1,
        max_tries: int = 3,
        max_drops: int = 20,
    ) -> None:
        self._prompts = prompts
        self._domains = list(prompts.shares)
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._max_tries = max_tries
        self._max_drops = max_drops
        # Less a hair: 100 prompts times 1.1 are 110, but 110.00000000000001 in floats.
        self._num_surplus = math.ceil(prompts_per_step * oversample - 1e-9) - prompts_per_step
        self._num_candidates = window * prompts_per_step + self._num_surplus
        self._version = 0
        self._num_issued = dict.fromkeys(self._domains, 0)
        self._queue: dict[str, deque[Queued[P]]] = {domain: deque() for domain in self._domains}
        self._places: list[str] = []
        """The domains of the coming steps' places; the first `prompts_per_step` are the next step's."""
        self._open: dict[str, dict[int, Ticket[P]]] = {domain: {} for domain in self._domains}
        """Running or finished, by domain, each in order of admission."""
        self._held: dict[int, Ticket[P]] = {}
        """Taken and not yet released."""
        self._num_finished = 0
        self._num_dropped: Counter[str] = Counter()
        self._num_ceded_to = dict.fromkeys(self._domains, 0)

    @property
    def version(self) -> int:
        """The weight version that a group admitted now would be sampled under."""
        return self._version

    @property
    def num_open(self) -> int:
        """Groups running, or finished and not taken."""
        return sum(map(len, self._open.values()))

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
        num_slots = self.num_slots
        if self.num_open >= num_slots:
            return []
        while len(self._places) < num_slots:
            self._places.append(self._prompts.next_domain())
        admitted, num_seen = [], Counter[str]()
        for domain in islice(self._places, num_slots):
            num_seen[domain] += 1
            if num_seen[domain] > len(self._open[domain]):
                admitted.append(self._issue(domain))
        return admitted

    def finish(self, ticket: Ticket[P], *, keep: bool) -> str | None:
        """The group has ended. If it is not kept (filtered, failed), its slot is free at once and its prompt is spent.

        Returns the domain that its place was ceded to, where its own has dropped too many groups for this step.
        """
        groups = self._open[ticket.domain]
        if groups.get(ticket.number) is not ticket or ticket.is_finished:
            raise ValueError(f"ticket {ticket.number} is not running: it ended or was sent back before")
        if keep:
            ticket.is_finished = True
            self._num_finished += 1
            return None
        del groups[ticket.number]
        self._num_dropped[ticket.domain] += 1
        return self._cede(ticket.domain)

    def take(self) -> Taken[P] | None:
        """One step's worth of finished groups, or None if they are not there yet. Release them before the next take."""
        if self._held:
            raise ValueError(f"{len(self._held)} groups are taken and not released: call release before the next take")
        ready = self._ready()
        if ready is None:
            return None
        for ticket in ready:
            self._held[ticket.number] = self._open[ticket.domain].pop(ticket.number)
        self._num_finished -= len(ready)
        self._num_dropped.clear()
        del self._places[: self._prompts_per_step]
        surplus = [
            ticket
            for domain, num in Counter(self._places[: self._num_surplus]).items()
            for ticket in islice(self._open[domain].values(), num)
            if not ticket.is_finished
        ]
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
        live = sorted([*self._held.values(), *self._all_open()], key=lambda ticket: ticket.number)
        replays = [
            Queued(prompt=ticket.prompt, domain=ticket.domain, num_tries=ticket.num_tries - 1, number=ticket.number)
            for ticket in live
        ]
        return Snapshot(
            version=self._version,
            num_issued=dict(self._num_issued),
            queue=[*replays, *(queued for queue in self._queue.values() for queued in queue)],
            places=[*(ticket.domain for ticket in self._held.values()), *self._places],
            num_dropped=dict(self._num_dropped),
            num_ceded_to=dict(self._num_ceded_to),
        )

    def restore(self, snapshot: Snapshot[P]) -> None:
        """Go on from a snapshot. Groups that were open start again under the tickets they had."""
        if self.num_open or self._held or any(self._queue.values()):
            raise ValueError("restore before the first admission: this one already has prompts in flight")
        self._version = snapshot.version
        self._num_issued = dict(snapshot.num_issued)
        self._places = list(snapshot.places)
        self._num_dropped = Counter(snapshot.num_dropped)
        self._num_ceded_to = dict(snapshot.num_ceded_to)
        for queued in snapshot.queue:
            self._queue[queued.domain].append(queued)

    def _issue(self, domain: str) -> Ticket[P]:
        queue = self._queue[domain]
        queued = queue.popleft() if queue else Queued(prompt=self._prompts.next(domain), domain=domain)
        number = queued.number
        if number is None:
            number = self._num_issued[domain] * len(self._domains) + self._domains.index(domain)
            self._num_issued[domain] += 1
        ticket = self._open[domain][number] = Ticket(number, queued.prompt, domain, self._version, queued.num_tries + 1)
        return ticket

    def _cede(self, domain: str) -> str | None:
        """Give a place of the next step to another domain, if this one holds the step up and has had its tries."""
        step = self._places[: self._prompts_per_step]
        num_finished = sum(ticket.is_finished for ticket in self._open[domain].values())
        if not self._is_spent(domain, step) or num_finished >= step.count(domain):
            return None
        heirs = [other for other in self._domains if other != domain and not self._is_spent(other, step)]
        if not heirs:
            return None
        heir = min(heirs, key=lambda other: (self._num_ceded_to[other] + 1) / self._prompts.shares[other])
        # The last of its places, so that those before it keep their order.
        self._places[max(index for index, owner in enumerate(step) if owner == domain)] = heir
        self._num_ceded_to[heir] += 1
        return heir

    def _is_spent(self, domain: str, step: Sequence[str]) -> bool:
        """Whether a domain has dropped as much as it may for this step."""
        return self._num_dropped[domain] > self._max_drops * max(1, step.count(domain))

    def _ready(self) -> list[Ticket[P]] | None:
        """The oldest finished groups inside the window, if they make a step. Prompts sent back most often come first."""
        if self._num_finished < self._prompts_per_step:
            return None
        step: list[Ticket[P]] = []
        num_candidates = Counter(self._places[: self._num_candidates])
        for domain, num in Counter(self._places[: self._prompts_per_step]).items():
            ready: list[Ticket[P]] = []
            num_running = 0
            for ticket in islice(self._open[domain].values(), num_candidates[domain]):
                if ticket.is_finished:
                    ready.append(ticket)
                    continue
                num_running += 1
                if ticket.num_tries >= self._max_tries or num_running > num_candidates[domain] - num:
                    return None
            if len(ready) < num:
                return None
            ready.sort(key=lambda ticket: -ticket.num_tries)
            step += ready[:num]
        return sorted(step, key=lambda ticket: ticket.number)

    def _all_open(self) -> list[Ticket[P]]:
        return [ticket for groups in self._open.values() for ticket in groups.values()]

    def _stale_at(self, version: int) -> list[Ticket[P]]:
        return [ticket for ticket in self._all_open() if version - ticket.version > self._max_staleness]

    def _send_back(self, tickets: Sequence[Ticket[P]]) -> list[Ticket[P]]:
        """Close these tickets, each once, and queue their prompts in front of all others, oldest first."""
        returned = [ticket for ticket in dict.fromkeys(tickets) if self._open[ticket.domain].pop(ticket.number, None)]
        returned.sort(key=lambda ticket: ticket.number)
        self._num_finished -= sum(ticket.is_finished for ticket in returned)
        for ticket in reversed(returned):
            queued = Queued(prompt=ticket.prompt, domain=ticket.domain, num_tries=ticket.num_tries)
            self._queue[ticket.domain].appendleft(queued)
        return returned
