"""Which prompts may start, which groups may be trained on, and when a slot frees. Pure decisions: no clock, no I/O, no tasks.

A group may be trained on if the weights have advanced by at most `max_staleness` versions since its admission. Two rules ensure
that without wasted work. First, no more groups are open than the coming steps can take within the staleness budget. Second, the
oldest groups go first; younger ones from a window may go before them only if the coming steps can still take the older ones in
time. The surplus of over-sampling, and groups that fall behind because their domain lost slots, are evicted and their prompts
queued again; samples of them that are fresh enough continue later.

With long rounds, the surplus of synchronous steps is deferred instead. As soon as a step's worth of groups is, they get a round
of their own; its surplus is deferred to a longer one, until `max_tries` says to await all. So few steps await the slowest.

Every slot of the coming steps belongs to a domain, in the order that the prompt mix gives. A domain's groups fill its slots,
oldest first, and a dropped group is replaced by one of the same domain: so the mix that is trained on is the mix of the config.
Only a domain that drops group after group loses slots to others, in the step that waits for it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
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
        """The domain of the next slot."""

    def next(self, domain: str) -> P_co:
        """The next prompt of a domain, whatever `next_domain` says."""


@dataclass(slots=True, eq=False)
class AdmittedGroup(Generic[P]):
    """An admitted prompt: it holds a slot until its group is trained on, dropped or sent back."""

    number: int
    """Counts admissions within its domain, independent of other domains: the samples' seeds derive from it. A group that is
    sent back keeps its number."""
    prompt: P
    domain: str
    version: int
    """The current weight version at admission, or the oldest one among the kept samples of the group."""
    num_tries: int
    """How often this prompt was admitted, this time included."""
    is_finished: bool = False
    goes_on: bool = False
    """It was sent back, and its kept samples can still be trained on after the next admission."""
    is_promised: bool = False
    """`promise` returned it: the next `take` does so too."""

    def queued(self, num_tries: int, level: int) -> Queued[P]:
        """Its prompt, to be admitted again. With another number it would have other samples, biased towards quick ones."""
        return Queued(prompt=self.prompt, domain=self.domain, num_tries=num_tries, number=self.number, level=level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued(Generic[P]):
    """A prompt that was drawn from the data and not trained on yet."""

    prompt: P
    domain: str
    num_tries: int = 0
    number: int | None = None
    """Its group number, if it was admitted before: it is sampled with the same seeds again."""
    level: int = 0
    """Which rounds it waits for: 0 the ordinary ones, 1 those of groups that were deferred once, and so on."""


@dataclass(frozen=True, slots=True)
class Taken(Generic[P]):
    """The groups of one step, and the groups that must stop because of it."""

    groups: list[AdmittedGroup[P]]
    """By number. They keep their slots until `release`."""
    returned: list[AdmittedGroup[P]]
    """Surplus of over-sampling, or too old for the step after this one. Their prompts are deferred, or first in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Generic[P]):
    """All that a resumed run needs: the prompts that were drawn and not yet trained on or dropped, and the coming slots."""

    version: int
    num_issued: dict[str, int]
    """Group numbers used, by domain."""
    queue: list[Queued[P]]
    slot_domains: list[str]
    """The domain of each coming slot."""
    num_dropped: dict[str, int]
    """Groups by domain, since the last step was taken."""
    num_reassigned_to: dict[str, int]
    """Slots that each domain got from others."""


KeptVersions = Callable[[int, P], Sequence[int]]
"""(group number, prompt) -> the oldest weight version of each kept sample of the group, finished or not."""


class Admission(Generic[P]):
    """Decides what is sampled and what is trained on; see the module's docstring."""

    def __init__(
        self,
        prompts: Supply[P],
        *,
        prompts_per_step: int,
        max_staleness: int = 0,
        oversample: float = 1.0,
        long_rounds: bool = False,
        take_window: int = 1,
        max_tries: int = 3,
        max_drops: int = 20,
        kept_versions: KeptVersions[P] = lambda number, prompt: (),
    ) -> None:
        """`kept_versions` tells how old the kept samples of a group are: they determine the version of the group."""
        assert not (long_rounds and max_staleness), "long rounds are for synchronous steps"
        self._prompts = prompts
        self._kept_versions = kept_versions
        self._domains = list(prompts.shares)
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._max_tries = max_tries
        self._max_drops = max_drops
        # Minus a little: 100 prompts times 1.1 are 110, but 110.00000000000001 in floats.
        self._most_surplus = math.ceil(prompts_per_step * oversample - 1e-9) - prompts_per_step
        self._take_window = take_window
        self._has_long_rounds = long_rounds
        self._version = 0
        self._num_issued = dict.fromkeys(self._domains, 0)
        self._queue: dict[tuple[int, str], deque[Queued[P]]] = defaultdict(deque)
        """By level and domain."""
        self._slot_domains: list[str] = []
        """The domain of each coming slot; the first `prompts_per_step` are the next step's."""
        self._open: dict[str, dict[int, AdmittedGroup[P]]] = {domain: {} for domain in self._domains}
        """Running or finished, by domain, each by number."""
        self._held: dict[int, AdmittedGroup[P]] = {}
        """Taken and not yet released."""
        self._num_finished = 0
        self._num_dropped: Counter[str] = Counter()
        self._num_reassigned_to = dict.fromkeys(self._domains, 0)
        self._begin_round()

    @property
    def version(self) -> int:
        """The current weight version: that of a group admitted now."""
        return self._version

    @property
    def num_open(self) -> int:
        """Groups running, or finished and not taken."""
        return sum(map(len, self._open.values()))

    @property
    def num_deferred(self) -> int:
        """Prompts that wait for a long round."""
        return sum(len(queue) for (level, _), queue in self._queue.items() if level)

    @property
    def num_slots(self) -> int:
        """How many groups may be open now."""
        # A group admitted during training can join later steps only, so one step fewer can take it.
        num_steps = self._max_staleness + (0 if self._held else 1)
        return num_steps * self._prompts_per_step + self._num_surplus if num_steps else 0

    def admit(self) -> list[AdmittedGroup[P]]:
        """Fill the free slots. Returns the groups to start now."""
        num_slots = self.num_slots
        if self.num_open >= num_slots:
            return []
        while len(self._slot_domains) < num_slots:
            self._slot_domains.append(self._prompts.next_domain())
        admitted, num_seen = [], Counter[str]()
        for domain in islice(self._slot_domains, num_slots):
            num_seen[domain] += 1
            if num_seen[domain] > len(self._open[domain]):
                admitted.append(self._issue(domain))
        return admitted

    def finish(self, group: AdmittedGroup[P], *, keep: bool) -> str | None:
        """Record that a group has ended. If it is not kept (filtered, failed), its slot frees at once and its prompt is spent.

        Returns the domain that its slot was given to, if its own has dropped too many groups for this step.
        """
        groups = self._open[group.domain]
        if groups.get(group.number) is not group or group.is_finished:
            raise ValueError(f"group {group.number} is not running: it ended or was sent back before")
        if keep:
            group.is_finished = True
            self._num_finished += 1
            return None
        del groups[group.number]
        self._num_dropped[group.domain] += 1
        return self._reassign_slot(group.domain)

    def promise(self) -> list[AdmittedGroup[P]]:
        """Finished groups that the next `take` will return, whatever the others do; each of them once."""
        promised = []
        num_candidates = Counter(self._slot_domains[: self._num_candidates])
        for domain, num in Counter(self._slot_domains[: self._prompts_per_step]).items():
            candidates = self._candidates(domain, num_candidates[domain])
            for group in candidates:
                if group.is_finished and not group.is_promised and self._can_promise(group, candidates, num):
                    group.is_promised = True
                    promised.append(group)
        return promised

    def take(self) -> Taken[P] | None:
        """The finished groups of one step, or None if there are not enough yet. Release them before the next take."""
        if self._held:
            raise ValueError(f"{len(self._held)} groups are taken and not released: call release before the next take")
        ready = self._next_step()
        if ready is None:
            return None
        for group in ready:
            self._held[group.number] = self._open[group.domain].pop(group.number)
        self._num_finished -= len(ready)
        self._num_dropped.clear()
        del self._slot_domains[: self._prompts_per_step]
        surplus = [
            group
            for domain, num in Counter(self._slot_domains[: self._num_surplus]).items()
            for group in islice(self._open[domain].values(), num)
            if not group.is_finished
        ]
        # The next step trains at the next version at the earliest.
        return Taken(ready, self._send_back([*surplus, *self._stale_at(self._version + 1)]))

    def release(self, numbers: Sequence[int], *, version: int) -> list[AdmittedGroup[P]]:
        """Call after the taken groups were trained on and weights of this version were pushed. Returns the groups that are too
        old now: stop them; their prompts are at the front of the queue."""
        if set(numbers) != self._held.keys():
            raise ValueError(f"release all that was taken, once: groups {sorted(self._held)}, got {sorted(numbers)}")
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}: weight versions only grow")
        self._held.clear()
        self._version = version
        outdated = self._send_back(self._stale_at(version))
        self._begin_round()
        return outdated

    def snapshot(self) -> Snapshot[P]:
        """The state to resume from. Take it after `release`: groups not released count as not trained on."""
        live = sorted([*self._held.values(), *self._all_open()], key=lambda group: group.number)
        replays = [group.queued(group.num_tries - 1, self._level) for group in live]
        return Snapshot(
            version=self._version,
            num_issued=dict(self._num_issued),
            queue=[*replays, *(queued for queue in self._queue.values() for queued in queue)],
            slot_domains=[*(group.domain for group in self._held.values()), *self._slot_domains],
            num_dropped=dict(self._num_dropped),
            num_reassigned_to=dict(self._num_reassigned_to),
        )

    def restore(self, snapshot: Snapshot[P]) -> None:
        """Continue from a snapshot. Groups that were open start again under their numbers."""
        if self.num_open or self._held or any(self._queue.values()):
            raise ValueError("restore before the first admission: this one already has prompts in flight")
        self._version = snapshot.version
        self._num_issued = dict(snapshot.num_issued)
        self._slot_domains = list(snapshot.slot_domains)
        self._num_dropped = Counter(snapshot.num_dropped)
        self._num_reassigned_to = dict(snapshot.num_reassigned_to)
        for queued in snapshot.queue:
            self._queue[queued.level if self._has_long_rounds else 0, queued.domain].append(queued)
        self._begin_round()

    def _begin_round(self) -> None:
        """Choose the longest round that has enough groups. The last try has no surplus: all of it is awaited."""
        waiting = Counter(queued.level for queue in self._queue.values() for queued in queue)
        surplus = {level: 0 if level and level >= self._max_tries - 1 else self._most_surplus for level in (0, *waiting)}
        self._level = max((level for level in waiting if waiting[level] >= self._prompts_per_step + surplus[level]), default=0)
        self._num_surplus = surplus[self._level]
        self._num_candidates = self._take_window * self._prompts_per_step + self._num_surplus

    def _issue(self, domain: str) -> AdmittedGroup[P]:
        queue = self._queue[self._level, domain] or self._queue[0, domain]
        queued = queue.popleft() if queue else Queued(prompt=self._prompts.next(domain), domain=domain)
        number = queued.number
        if number is None:
            number = self._num_issued[domain] * len(self._domains) + self._domains.index(domain)
            self._num_issued[domain] += 1
        version = min(self._usable_versions(number, queued.prompt), default=self._version)
        group = self._open[domain][number] = AdmittedGroup(number, queued.prompt, domain, version, queued.num_tries + 1)
        if queued.number is not None:  # It may be older than the open ones.
            self._open[domain] = dict(sorted(self._open[domain].items()))
        return group

    def _usable_versions(self, number: int, prompt: P) -> list[int]:
        """The versions of a group's kept samples that can still be trained on."""
        oldest = self._version + bool(self._held) - self._max_staleness  # The held groups are trained on first.
        return [version for version in self._kept_versions(number, prompt) if oldest <= version <= self._version]

    def _reassign_slot(self, domain: str) -> str | None:
        """Give one slot of the next step to another domain, if this one delays the step and has exhausted its drops."""
        step = self._slot_domains[: self._prompts_per_step]
        num_finished = sum(group.is_finished for group in self._open[domain].values())
        if not self._is_exhausted(domain, step) or num_finished >= step.count(domain):
            return None
        recipients = [other for other in self._domains if other != domain and not self._is_exhausted(other, step)]
        if not recipients:
            return None
        recipient = min(recipients, key=lambda other: (self._num_reassigned_to[other] + 1) / self._prompts.shares[other])
        # The last of its slots, so that those before it keep their order.
        self._slot_domains[max(index for index, owner in enumerate(step) if owner == domain)] = recipient
        self._num_reassigned_to[recipient] += 1
        return recipient

    def _is_exhausted(self, domain: str, step: Sequence[str]) -> bool:
        """Whether a domain has dropped more groups than it may for this step."""
        return self._num_dropped[domain] > self._max_drops * max(1, step.count(domain))

    def _next_step(self) -> list[AdmittedGroup[P]] | None:
        """The finished groups in the window that form the next step and leave none behind to become too old; or None."""
        if self._num_finished < self._prompts_per_step:
            return None
        step: list[AdmittedGroup[P]] = []
        num_candidates = Counter(self._slot_domains[: self._num_candidates])
        for domain, num in Counter(self._slot_domains[: self._prompts_per_step]).items():
            chosen = self._choose(domain, num, num_candidates=num_candidates[domain])
            if chosen is None:
                return None
            step += chosen
        return sorted(step, key=lambda group: group.number)

    def _choose(self, domain: str, num: int, *, num_candidates: int) -> list[AdmittedGroup[P]] | None:
        """A domain's groups for the next step: those sent back most often, unless older ones cannot wait. None: not yet."""
        candidates = self._candidates(domain, num_candidates)
        running = [group for group in candidates if not group.is_finished]
        ready = [group for group in candidates if group.is_finished]
        if len(ready) < num or any(group.num_tries >= self._max_tries for group in running):
            return None
        most_tried = sorted(ready, key=lambda group: (not group.is_promised, -group.num_tries))[:num]
        oldest = sorted(ready, key=_oldest_first)[:num]
        for chosen in (most_tried, oldest):
            if self._can_wait(domain, chosen):
                return chosen
        return None if running else oldest  # No running group could change the choice.

    def _candidates(self, domain: str, num: int) -> list[AdmittedGroup[P]]:
        """A domain's oldest open groups, and those that are promised though the domain has lost their slot since."""
        groups = self._open[domain].values()
        return [group for place, group in enumerate(groups) if place < num or group.is_promised]

    def _can_promise(self, group: AdmittedGroup[P], candidates: Sequence[AdmittedGroup[P]], num: int) -> bool:
        """Whether a step with this group and all that are promised can still take every group that has to be in it."""
        if len(candidates) <= num:
            return True
        promised = [one for one in candidates if one.is_promised or one is group]
        others = sorted((one for one in candidates if one not in promised), key=_oldest_first)
        others = sorted(others, key=lambda one: one.is_finished or one.num_tries < self._max_tries)  # Who is waited for first.
        num_awaited = sum(not one.is_finished and one.num_tries >= self._max_tries for one in others)
        num_left = num - len(promised)
        return num_left >= num_awaited and self._can_wait(group.domain, [*promised, *others[:num_left]])

    def _can_wait(self, domain: str, chosen: Sequence[AdmittedGroup[P]]) -> bool:
        """Whether the later steps can take all groups that `chosen` leaves behind within the staleness budget: of those too old
        for the n-th later step, there are no more than the steps before it take. Over-sampling's surplus is aborted anyway."""
        numbers = {group.number for group in chosen}
        others = (group for group in self._open[domain].values() if group.number not in numbers)
        ages = Counter(self._version - group.version for group in others)
        per_step, num_late = self._prompts_per_step, 0
        num_taken = self._slot_domains[per_step : per_step + self._num_surplus].count(domain)
        for num_steps in range(self._max_staleness):
            num_late += ages[self._max_staleness - num_steps]
            if num_late > num_taken:
                return False
            start = (num_steps + 1) * per_step
            num_taken += self._slot_domains[start : start + per_step].count(domain)
        return True

    def _all_open(self) -> list[AdmittedGroup[P]]:
        return [group for groups in self._open.values() for group in groups.values()]

    def _stale_at(self, version: int) -> list[AdmittedGroup[P]]:
        return [group for group in self._all_open() if version - group.version > self._max_staleness]

    def _send_back(self, groups: Sequence[AdmittedGroup[P]]) -> list[AdmittedGroup[P]]:
        """Close these groups and defer their prompts, or queue them in front of all others, oldest first."""
        returned = [group for group in dict.fromkeys(groups) if self._open[group.domain].pop(group.number, None)]
        returned.sort(key=lambda group: group.number)
        self._num_finished -= sum(group.is_finished for group in returned)
        for group in reversed(returned):
            group.goes_on = bool(self._usable_versions(group.number, group.prompt))
            level = min(group.num_tries, self._max_tries - 1) if self._has_long_rounds and not group.is_finished else 0
            queue, queued = self._queue[level, group.domain], group.queued(group.num_tries, level)
            queue.append(queued) if level else queue.appendleft(queued)  # First deferred, first in.
        return returned


def _oldest_first(group: AdmittedGroup[P]) -> tuple[bool, int, int]:
    """Sort key. Promised groups come before all others."""
    return not group.is_promised, group.version, group.number
