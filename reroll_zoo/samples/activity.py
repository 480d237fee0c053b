"""What a run's roles did, by the events of its journal that `reroll_zoo/run_watch.py` writes: leases, engines, faults.

Events of the state ACTIVITY are of no sample. They tell one of three things: that a role begins or ends something
(`role`, `is_on`): it holds its devices, or it is the run's evaluation or checkpoint; how busy each engine was since the last
time and how many requests it has (`busy` in percent, `load`); or what became of an engine (`engine`, `fate`). One of the state
CREDITED tells of `samples` the `advantages` that they are trained with: each a number, null where none of the sample's
tokens is in the loss, or runs of [number or null, tokens].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from reroll.observe.journal import BEGUN, Event

ACTIVITY, CREDITED = "activity", "credited"
LOST, RESTARTED, JOINED = "lost", "restarted", "joined"
"""What becomes of an engine."""
MAX_ROWS = 50_000
"""How many events are remembered, the newest: engines are told of once a second."""

Advantage = float | list[list[Any]] | None
Row = list[Any]
"""[time, BEGUN]; [time, role, whether it begins]; [time, "engines", percent busy, requests]."""
ENGINES = "engines"


@dataclass(frozen=True, slots=True)
class RoleSpan:
    """What a role held or did, from when until when."""

    role: str
    start_s: float
    end_s: float


class Activity:
    """Takes events in their order, and keeps the newest as rows."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque()
        self.num_forgotten = 0

    def take(self, event: Event) -> None:
        """One of ACTIVITY, or BEGUN: then whatever went on is over."""
        detail = event.detail
        if event.state == BEGUN:
            self._rows.append([event.time_s, BEGUN])
        elif "role" in detail:
            self._rows.append([event.time_s, detail["role"], detail["is_on"]])
        elif "busy" in detail:
            self._rows.append([event.time_s, ENGINES, detail["busy"], detail["load"]])
        while len(self._rows) > MAX_ROWS:
            self._rows.popleft()
            self.num_forgotten += 1

    def since(self, number: int, *, limit: int) -> tuple[int, list[Row]]:
        """At most so many rows from this number on, counted from the first that ever was, and the number of the next."""
        start = max(0, number - self.num_forgotten)
        rows = list(islice(self._rows, start, start + limit))
        return self.num_forgotten + start + len(rows), rows

    def __len__(self) -> int:
        """How many there ever were."""
        return self.num_forgotten + len(self._rows)

    def spans(self, *, last_s: float) -> Iterator[RoleSpan]:
        """In the order of their ends. What is not over lasts until `last_s`, or until the run was begun again."""
        open_since: dict[str, float] = {}
        newest_s = last_s
        for time_s, what, *told in self._rows:
            if what == BEGUN:
                yield from (RoleSpan(role, start_s, newest_s) for role, start_s in open_since.items())
                open_since.clear()
            elif what != ENGINES and told[0]:
                open_since[what] = time_s
            elif what != ENGINES and what in open_since:
                yield RoleSpan(what, open_since.pop(what), time_s)
            newest_s = time_s
        yield from (RoleSpan(role, start_s, last_s) for role, start_s in open_since.items())

    def engines(self) -> Iterator[tuple[float, Sequence[int | None], Sequence[int]]]:
        """When, percent busy by engine since the time before, requests by engine."""
        return ((row[0], row[2], row[3]) for row in self._rows if row[1] == ENGINES)
