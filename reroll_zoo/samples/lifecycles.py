"""The life of every sample as spans of time, put together from the journal's events: what the page and the trace draw."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from reroll.observe.journal import BEGUN, STEPPED, TAKEN, Event, SampleState
from reroll_zoo.samples.activity import ACTIVITY, CREDITED, Activity, Advantage

MAX_LIVES = 150_000
"""How many samples are remembered: those that changed last."""


class Phase(IntEnum):
    """What a sample does, more finely than its journal: that its group is whole, or is being trained on, follows from others'
    events. From TRAINED on it is over."""

    QUEUED = 0
    GENERATING = 1
    SCORING = 2
    DONE = 3
    """Scored; waits for its siblings."""
    READY = 4
    """Its group is whole, and waits for its step."""
    TRAINING = 5
    TRAINED = 6
    FILTERED = 7
    ABORTED = 8
    FAILED = 9
    LOST = 10
    """The run ended before it did."""


_PHASES = {state: Phase[state.name] for state in SampleState}


@dataclass(slots=True, eq=False)
class Lifecycle:
    """One sample from its admission on. A run that was resumed may give a sample a second life under the same id."""

    serial: int
    id: str
    group: int
    prompt: str
    domain: str
    version: int | None
    """Of the weights, at its admission."""
    phases: list[Phase]
    times_s: list[float]
    """When each phase began."""
    tokens: int | None = None
    reward: float | None = None
    status: str = ""
    """How its episode ended, once it is scored."""
    reason: str = ""
    answer: str | None = None
    """The right one, where its prompt has one."""
    seed: int | None = None
    """Of its environment."""
    trained_version: int | None = None
    """Of the weights that came of it."""
    advantage: Advantage = None
    """That it was trained with: a number, or [number or None, tokens] one after the other, empty where no token of it is in
    the loss. None while it is not trained on."""
    segment: Path | None = None
    stored: Sequence[int] | None = None
    """Where its tokens lie in the segment."""
    revision: int = 0

    @property
    def phase(self) -> Phase:
        return self.phases[-1]

    @property
    def is_over(self) -> bool:
        return self.phase >= Phase.TRAINED

    @property
    def done(self) -> Event | None:
        """The event that says where its tokens are; None while there are none."""
        if self.stored is None or self.segment is None:
            return None
        return Event(self.times_s[-1], self.id, SampleState.DONE, {"stored": self.stored}, self.segment)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to the whole run."""

    time_s: float
    kind: str
    """BEGUN, TAKEN or STEPPED; LOST, RESTARTED or JOINED of an engine."""
    version: int | None = None
    engine: int | None = None
    num_groups: int = 0


@dataclass(slots=True)
class _OpenFlight:
    """A group of which not all samples are over."""

    lives: list[Lifecycle] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return all(life.phase >= Phase.DONE for life in self.lives)


class Lifecycles:
    """Takes a journal's events in their order. States that it does not know are passed over."""

    def __init__(self, *, max_lives: int = MAX_LIVES) -> None:
        self._max_lives = max_lives
        self._lives: OrderedDict[int, Lifecycle] = OrderedDict()
        """By serial number, the last changed last."""
        self._by_id: dict[str, Lifecycle] = {}
        """The newest life of each sample."""
        self._groups: dict[int, _OpenFlight] = {}
        self._num_lives = 0
        self.marks: list[Mark] = []
        self.activity = Activity()
        """What the roles did."""
        self.revision = 0
        """Counts changes."""
        self.first_s: float | None = None
        self.last_s: float | None = None

    def take(self, events: Iterable[Event]) -> None:
        """Go on with these."""
        for event in events:
            self._take(event)

    def changed_since(self, revision: int, *, limit: int) -> list[Lifecycle]:
        """At most so many of the lives that changed after this revision, in the order of their last change."""
        found = []
        for life in reversed(self._lives.values()):
            if life.revision <= revision:
                break
            found.append(life)
        return found[: -limit - 1 : -1]

    def newest_first(self) -> Iterable[Lifecycle]:
        """All that are remembered."""
        return reversed(self._lives.values())

    def find(self, id: str) -> Lifecycle | None:
        """The newest life of a sample."""
        return self._by_id.get(id)

    def group(self, number: int) -> list[Lifecycle]:
        """The newest lives of a group's samples, in their order."""
        lives = (self._by_id.get(f"{number}.{index}") for index in count())
        return [life for life in takewhile(lambda life: life is not None, lives) if life]

    def __len__(self) -> int:
        return len(self._lives)

    def _take(self, event: Event) -> None:
        if self.first_s is None:
            self.first_s = event.time_s
        if event.state == BEGUN:
            self._lose_all(self.last_s or event.time_s)
            self.marks.append(Mark(event.time_s, BEGUN, event.detail.get("version")))
            self.activity.take(event)
        elif event.state == TAKEN:
            numbers = event.detail["groups"]
            self.marks.append(Mark(event.time_s, TAKEN, num_groups=len(numbers)))
            for number in numbers:
                self._move_group(number, Phase.TRAINING, event.time_s)
        elif event.state == STEPPED:
            self.marks.append(Mark(event.time_s, STEPPED, event.detail["version"]))
        elif event.state == ACTIVITY and "fate" in event.detail:
            self.marks.append(Mark(event.time_s, event.detail["fate"], engine=event.detail["engine"]))
        elif event.state == ACTIVITY:
            self.activity.take(event)
        elif event.state == CREDITED:
            for id, advantage in zip(event.detail["samples"], event.detail["advantages"], strict=True):
                if life := self.find(id):
                    life.advantage = [] if advantage is None else advantage
        elif event.state == SampleState.QUEUED:
            self._begin(event)
        elif isinstance(event.state, SampleState):
            self._go_on(event, _PHASES[event.state])
        self.last_s = event.time_s

    def _begin(self, event: Event) -> None:
        about = event.detail
        self._num_lives += 1
        life = Lifecycle(
            serial=self._num_lives,
            id=event.sample_id,
            group=event.group,
            prompt=about.get("prompt", ""),
            domain=about.get("domain", ""),
            version=about.get("version"),
            answer=about.get("answer"),
            seed=about.get("seed"),
            phases=[Phase.QUEUED],
            times_s=[event.time_s],
        )
        flight = self._groups.setdefault(event.group, _OpenFlight())
        if flight.lives and flight.lives[-1].phase is not Phase.QUEUED:  # Admitted again, under the number that it had.
            flight = self._groups[event.group] = _OpenFlight()
        flight.lives.append(life)
        self._by_id[life.id] = life
        self._touch(life)
        if len(self._lives) > self._max_lives:
            _, oldest = self._lives.popitem(last=False)
            if self._by_id.get(oldest.id) is oldest:
                del self._by_id[oldest.id]

    def _go_on(self, event: Event, phase: Phase) -> None:
        life = self._by_id.get(event.sample_id)
        if life is None or life.is_over:
            return  # Its beginning was not read.
        about: dict[str, Any] = dict(event.detail)
        life.tokens = about.get("tokens", life.tokens)
        life.reward = about.get("reward", life.reward)
        life.status = about.get("status", life.status)
        life.reason = about.get("reason", life.reason)
        if "stored" in about:
            life.stored, life.segment = about["stored"], event.segment
        if phase is Phase.TRAINED:
            life.trained_version = about.get("version")
        self._move(life, phase, event.time_s)
        flight = self._groups.get(life.group)
        if flight is None:
            return
        if phase in (Phase.DONE, Phase.FAILED, Phase.ABORTED) and flight.is_whole:
            self._move_group(life.group, Phase.READY, event.time_s)
        if all(sibling.is_over for sibling in flight.lives):
            del self._groups[life.group]

    def _move_group(self, number: int, phase: Phase, time_s: float) -> None:
        """All of a group's samples that are not over."""
        flight = self._groups.get(number)
        for life in flight.lives if flight else ():
            if not life.is_over:
                self._move(life, phase, time_s)

    def _lose_all(self, time_s: float) -> None:
        """The run was interrupted: nothing goes on that was not over."""
        for number in self._groups:
            self._move_group(number, Phase.LOST, time_s)
        self._groups.clear()

    def _move(self, life: Lifecycle, phase: Phase, time_s: float) -> None:
        if life.phase is not phase:
            life.phases.append(phase)
            life.times_s.append(time_s)
        self._touch(life)

    def _touch(self, life: Lifecycle) -> None:
        self.revision += 1
        life.revision = self.revision
        self._lives[life.serial] = life
        self._lives.move_to_end(life.serial)
