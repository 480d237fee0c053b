"""When drafts pay: the ways to step, from none to bold ones, measured against each other while an engine writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

BARS = (None, 0.4, 0.2, 0.05)
"""How likely a guess must be to be read with a step; None: no draft at all."""

_BLOCK_STEPS = 6
"""Steps of one way before another may be chosen. The first of them, which the way before has prepared, is not timed."""

_FIRST_PAUSE, _LONGEST_PAUSE = 4, 256
"""Blocks until a way that is slower is tried again; doubled each time that it is slower still."""

_MAX_DRAFTING = 64
"""With as many running, a step has work enough for the device without drafts."""

_FORGET_SHARE = 0.3
_PAUSED = 5.0
"""A step that took so many times as long as usual says nothing of drafts: kernels were compiled, or the engine stood still."""


@dataclass(slots=True)
class _Way:
    """A way to step, and how long it took for a token of each sequence."""

    seconds: float = 0.0
    num_blocks: int = 0
    pause: int = _FIRST_PAUSE
    next_try: int = 0

    def add(self, seconds: float) -> None:
        self.seconds = seconds if not self.num_blocks else (1 - _FORGET_SHARE) * self.seconds + _FORGET_SHARE * seconds
        self.num_blocks += 1


@dataclass(slots=True)
class _DraftChoice:
    """Which way is quickest for about so many sequences, by measurement."""

    ways: list[_Way] = field(default_factory=lambda: [_Way() for _ in BARS])
    now: int = 0
    num_blocks: int = 0
    num_steps: int = 0
    num_timed: int = 0
    seconds: float = 0.0
    tokens_each: float = 0.0

    def add(self, *, seconds: float, tokens_each: float) -> None:
        """A step of the present way: its seconds, and the tokens that it wrote for each sequence."""
        self.num_steps += 1
        usual = self.seconds / self.num_timed if self.num_timed else seconds
        if self.num_steps > 1 and seconds < _PAUSED * usual:
            self.num_timed += 1
            self.seconds += seconds
            self.tokens_each += tokens_each
        if self.num_steps >= _BLOCK_STEPS:
            self._end_block()

    def _end_block(self) -> None:
        self.num_blocks += 1
        if self.tokens_each:
            self.ways[self.now].add(self.seconds / self.tokens_each)
        self.num_steps, self.num_timed, self.seconds, self.tokens_each = 0, 0, 0.0, 0.0
        fresh = [place for place, way in enumerate(self.ways) if way.num_blocks < 2]
        if fresh:
            self.now = min(fresh, key=lambda place: self.ways[place].num_blocks)
            return
        best = min(range(len(BARS)), key=lambda place: self.ways[place].seconds)
        tried = self.ways[self.now]
        if self.now != best:
            tried.pause = min(2 * tried.pause, _LONGEST_PAUSE)
            tried.next_try = self.num_blocks + tried.pause
        self.ways[best].pause = _FIRST_PAUSE
        due = [place for place, way in enumerate(self.ways) if place != best and way.next_try <= self.num_blocks]
        self.now = due[0] if due else best


class MeasuredPace:
    """A `DraftPace` that tries the ways in turn, keeps to the quickest, looks again at the others ever more seldom.
    It does so for each number of running sequences: what pays for one does not for fifty."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._choices: dict[int, _DraftChoice] = {}
        self._last: tuple[float, int] | None = None

    def bar(self, num_running: int) -> float | None:
        """How likely a guess must be now; None: no drafts."""
        if num_running >= _MAX_DRAFTING:
            return None
        return BARS[self._choice(num_running).now]

    def stepped(self, num_running: int, *, num_tokens: int) -> None:
        """A step is over that wrote so many tokens, and read nothing but what was written last, and drafts."""
        now = self._clock()
        if self._last is not None and self._last[1] == num_running and num_running < _MAX_DRAFTING:
            self._choice(num_running).add(seconds=now - self._last[0], tokens_each=num_tokens / num_running)
        self._last = (now, num_running)

    def interrupted(self) -> None:
        """What comes next says nothing of how long a step takes."""
        self._last = None

    def _choice(self, num_running: int) -> _DraftChoice:
        return self._choices.setdefault(num_running if num_running < 8 else 8 * num_running.bit_length(), _DraftChoice())


class SteadyPace(MeasuredPace):
    """Always drafts, whatever it costs."""

    def bar(self, num_running: int) -> float | None:
        return BARS[-1]
