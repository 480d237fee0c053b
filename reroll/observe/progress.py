"""A run as it is watched: a plain line a step; where the output can be drawn over, a panel.

The panel, and the bar of work beside a run, are the entry points `panel` and `bar` of the group `reroll.views`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console

from reroll.config.registry import load_entry

STEPS_FOR_SPEED = 20
"""The time left follows this many of the newest steps, so that a slow start is soon forgotten."""


class LivePanel(Protocol):
    """Draws what a view knows again and again. What `reroll.views` names as `panel` is called with the view."""

    def start(self) -> bool:
        """Begin. False where the output cannot be drawn over: a file, a pipe, a log."""

    def remember(self, values: Mapping[str, float]) -> None:
        """Numbers of a step, to be on show from now on."""

    def refresh(self) -> None:
        """Draw it now."""

    def stop(self) -> None:
        """Draw it once more, and leave it there."""


class TrainView:
    """Shows a run's progress: `with TrainView(100, "demo") as view: view.update(1, {"reward/mean": 0.3})`."""

    def __init__(self, total_steps: int, title: str, start_step: int = 0, *, console: Console | None = None) -> None:
        self.total_steps = total_steps
        self.title = title
        self.step = start_step
        self.console = console or Console()
        self.activity: Callable[[], str] = lambda: "loading models and workers"
        """What the run is at."""
        self.remark = ""
        self._finish_times: deque[tuple[int, float]] = deque(maxlen=STEPS_FOR_SPEED)
        make_panel = load_entry("reroll.views", "panel")
        self.panel: LivePanel | None = make_panel(self) if make_panel else None
        self._is_live = False

    def __enter__(self) -> TrainView:
        self._finish_times.append((self.step, time.monotonic()))
        self._is_live = self.panel is not None and self.panel.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.panel:
            self.panel.stop()
        self._is_live = False

    def update(self, step: int, values: Mapping[str, float], *, remark: str = "") -> None:
        """Show the numbers of a step. `step` counts finished steps; 0 is before the first. The remark stays until the next."""
        self.remark = remark
        if step == self.step and self._finish_times:
            self._finish_times.pop()  # An evaluation between two steps is no part of the next one.
        self._finish_times.append((step, time.monotonic()))
        self.step = step
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        self._remember(known)
        if self._is_live and self.panel:
            self.panel.refresh()
        else:
            self.console.print(self._plain_line(known), highlight=False, soft_wrap=True, markup=False)

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in what an earlier part of the run has logged, without showing its steps again."""
        for row in rows:
            self._remember({name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)})

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Callable[[], None]]:
        """Show long work inside a step, such as an evaluation. Call what it yields once per item done."""
        num_done = 0

        def advance() -> None:
            nonlocal num_done
            num_done += 1

        with self.doing(lambda: f"{label} {num_done}/{total}"):
            yield advance

    @contextmanager
    def doing(self, activity: Callable[[], str]) -> Iterator[None]:
        """Show what the run is at, below the bar. `activity` is asked whenever the panel is drawn."""
        self.activity = activity
        try:
            yield
        finally:
            self.activity = _nothing

    def note(self, text: str) -> None:
        """A message that stays, above the live area."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _remember(self, values: Mapping[str, float]) -> None:
        if self.panel:
            self.panel.remember(values)

    def time_left(self) -> str:
        """How long the other steps will take, in words."""
        if self.step >= self.total_steps:
            return "done"
        if not self._finish_times:
            return "starting"
        (first_step, first_time), (last_step, last_time) = self._finish_times[0], self._finish_times[-1]
        if last_step == first_step:
            return "starting"
        step_s = (last_time - first_time) / (last_step - first_step)
        since_s = time.monotonic() - last_time
        return f"{format_duration(max(0.0, step_s * (self.total_steps - last_step) - since_s))} left"

    def _plain_line(self, values: Mapping[str, float]) -> str:
        shown = (
            ("reward/mean", "reward {:.3f}"),
            ("eval/pass@1", "held-out pass@1 {:.1%}"),
            ("rollout/completion_tokens", "response {:,.0f} tokens"),
            ("train/loss", "loss {:.4f}"),
            ("eval/loss", "held-out loss {:.4f}"),
            ("eval/accuracy", "held-out accuracy {:.1%}"),
            ("train/grad_norm", "gradient {:.3g}"),
            ("rollout/staleness_max", "staleness {:.0f}"),
            ("throughput/tokens_per_s", "{:,.0f} tokens/s"),
            ("time/step_s", "{:.2f} s"),
        )
        texts = [form.format(values[name]) for name, form in shown if name in values]
        if values.get("eval/failed") == 1:
            texts = ["held-out: every sample failed" if text.startswith("held-out pass@1") else text for text in texts]
        remark = [self.remark] if self.remark else []
        return "  ".join([f"step {self.step}/{self.total_steps}", *texts, self.time_left(), *remark])


def _nothing() -> str:
    return ""


def format_duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def in_notebook() -> bool:
    """Whether this is a kernel with a front end, rather than a terminal."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar for work of its own. Call what it yields once per item done."""
    open_bar = load_entry("reroll.views", "bar")
    if open_bar is None:
        yield lambda: None
    else:
        with open_bar(label, total) as advance:
            yield advance
