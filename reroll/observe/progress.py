"""A run as it is watched: a live panel in a terminal, one plain line a step everywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reroll.observe.screen import NotebookScreen, Screen, in_notebook, open_screen

SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 24
NARROW_SPARKLINE_WIDTH = 12
NARROW_CONSOLE = 90
ECHO_WIDTH = len("^C")
STEPS_FOR_SPEED = 20
"""The time left follows this many of the newest steps, so that a slow start is soon forgotten."""

TIME_PARTS = (
    ("time/wait_s", "waiting for samples", "cyan"),
    ("time/train_s", "training", "green"),
    ("time/push_s", "pushing weights", "magenta"),
)
"""The parts of a step, one after the other; samples are generated and scored beside them."""


class TrainView:
    """Shows a run's progress: `with TrainView(100, "demo") as view: view.update(1, {"reward/mean": 0.3})`.

    Any metric may be missing; one that was seen stays on show until a newer value comes.
    """

    def __init__(self, total_steps: int, title: str, start_step: int = 0, *, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._title = title
        self._step = start_step
        self._console = console or Console()
        self._latest: dict[str, float] = {}
        self._rewards: list[float] = []
        self._losses: list[float] = []
        self._first_pass_rate: float | None = None
        self._finish_times: deque[tuple[int, float]] = deque(maxlen=STEPS_FOR_SPEED)
        self._live: Screen | None = None
        self._activity: Callable[[], str] = lambda: "loading models and workers"
        self._remark = ""

    def __enter__(self) -> TrainView:
        self._finish_times.append((self._step, time.monotonic()))
        self._live = open_screen(self._console, self.render)
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def update(self, step: int, values: Mapping[str, float], *, remark: str = "") -> None:
        """Show the numbers of a step. `step` counts finished steps; 0 is before the first. The remark stays until the next."""
        self._remark = remark
        if step == self._step and self._finish_times:
            self._finish_times.pop()  # An evaluation between two steps is no part of the next one.
        self._finish_times.append((step, time.monotonic()))
        self._step = step
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        self._remember(known)
        if self._live:
            self._live.refresh()
        else:
            self._console.print(self._plain_line(known), highlight=False, soft_wrap=True, markup=False)

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
        self._activity = activity
        try:
            yield
        finally:
            self._activity = _nothing

    def note(self, text: str) -> None:
        """A message that stays, above the live area."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def render(self) -> RenderableType:
        """The panel as it stands."""
        body: list[RenderableType] = [self._progress_line()]
        if self._step < self._total_steps:  # The line stays when it is empty: a panel that changes its height flickers.
            body.append(Text(self._activity(), style="dim", no_wrap=True, overflow="ellipsis"))
        if self._remark:
            body.append(Text(self._remark, style="yellow"))
        numbers = self._number_grid()
        if numbers.row_count:
            body += [Text(), numbers]
        if parts := self._time_parts():
            body += [Text(), _time_bar(parts), _time_legend(parts)]
        title = f"[bold]reroll[/bold] [dim]·[/dim] {escape(self._title)}"
        # Room for the ^C that a terminal echoes: it would wrap, and the panel would be redrawn a line too low.
        width = max(20, self._console.width - ECHO_WIDTH)
        return Panel(Group(*body), title=title, title_align="left", border_style="dim", padding=(0, 1), width=width)

    def _remember(self, known: Mapping[str, float]) -> None:
        self._latest |= known
        if "reward/mean" in known:
            self._rewards.append(known["reward/mean"])
        if "train/loss" in known:
            self._losses.append(known["train/loss"])
        if self._first_pass_rate is None:
            self._first_pass_rate = known.get("eval/pass@1")

    def _progress_line(self) -> RenderableType:
        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=self._total_steps, completed=self._step, complete_style="cyan", finished_style="green")
        line.add_row(f"step {self._step}/{self._total_steps}", bar, self._time_left())
        return line

    def _time_left(self) -> str:
        if self._step >= self._total_steps:
            return "done"
        if not self._finish_times:
            return "starting"
        (first_step, first_time), (last_step, last_time) = self._finish_times[0], self._finish_times[-1]
        if last_step == first_step:
            return "starting"
        step_s = (last_time - first_time) / (last_step - first_step)
        since_s = time.monotonic() - last_time
        return f"{format_duration(max(0.0, step_s * (self._total_steps - last_step) - since_s))} left"

    def _number_grid(self) -> Table:
        grid = Table.grid(expand=True, padding=(0, 2))
        for column in range(2):
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(ratio=3 if column == 0 else 2, no_wrap=True)
        cells = self._cells()
        for left, right in zip(cells[::2], [*cells[1::2], ("", "")], strict=False):
            grid.add_row(*left, *right)
        return grid

    def _cells(self) -> list[tuple[str, str]]:
        """(label, value) of everything known, in reading order."""
        shown: tuple[tuple[str, str, Callable[[float], str]], ...] = (
            ("reward", "reward/mean", lambda value: f"[bold]{value:.3f}[/bold]  [cyan]{self._sparkline(self._rewards)}[/cyan]"),
            ("held-out pass@1", "eval/pass@1", self._pass_rate_text),
            ("response", "rollout/completion_tokens", lambda value: f"{value:,.0f} tokens"),
            ("speed", "throughput/tokens_per_s", lambda value: f"{value:,.0f} tokens/s"),
            ("loss", "train/loss", self._loss_text),
            ("held-out loss", "eval/loss", lambda value: f"[bold green]{value:.4f}[/bold green]"),
            ("held-out accuracy", "eval/accuracy", lambda value: f"[bold green]{value:.1%}[/bold green]"),
            ("gradient norm", "train/grad_norm", lambda value: f"{value:.3g}"),
            ("staleness", "rollout/staleness_max", lambda value: f"at most {value:.0f}"),
            ("step time", "time/step_s", lambda value: f"{value:.2f} s"),
            ("generating", "time/generate_s", lambda value: f"{value:.2f} s a sample"),
            ("scoring", "time/score_s", lambda value: f"{value:.2f} s a sample"),
        )
        return [(label, text(self._latest[name])) for label, name, text in shown if name in self._latest]

    def _pass_rate_text(self, value: float) -> str:
        if self._latest.get("eval/failed") == 1:
            return "[bold red]every sample failed[/bold red]"
        first = self._first_pass_rate
        before = "" if first is None or first == value else f"[dim]{first:.1%} →[/dim] "
        return f"{before}[bold green]{value:.1%}[/bold green]"

    def _loss_text(self, value: float) -> str:
        # Beside a reward the loss is a detail; without one it is what there is to watch.
        return f"{value:.4f}" if self._rewards else f"[bold]{value:.4f}[/bold]  [cyan]{self._sparkline(self._losses)}[/cyan]"

    def _sparkline(self, values: Sequence[float]) -> str:
        return sparkline(values, width=NARROW_SPARKLINE_WIDTH if self._console.width < NARROW_CONSOLE else SPARKLINE_WIDTH)

    def _time_parts(self) -> list[tuple[str, str, float]]:
        """(label, colour, share) of what the last step spent its time on."""
        known = [(label, colour, self._latest[name]) for name, label, colour in TIME_PARTS if name in self._latest]
        total_s = sum(seconds for _, _, seconds in known)
        return [(label, colour, seconds / total_s) for label, colour, seconds in known] if total_s > 0 else []

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
        remark = [self._remark] if self._remark else []
        return "  ".join([f"step {self._step}/{self._total_steps}", *texts, self._time_left(), *remark])


def _nothing() -> str:
    return ""


def sparkline(values: Sequence[float], *, width: int) -> str:
    """The whole history in at most `width` bars, each the mean of its share of the values."""
    if not values:
        return ""
    num_bars = min(width, len(values))
    edges = [round(bar * len(values) / num_bars) for bar in range(num_bars + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    lowest, highest = min(means), max(means)
    if highest == lowest:
        return SPARKS[0] * num_bars
    return "".join(SPARKS[round((mean - lowest) / (highest - lowest) * (len(SPARKS) - 1))] for mean in means)


def format_duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _time_bar(parts: Sequence[tuple[str, str, float]]) -> RenderableType:
    """One bar over the whole width, cut in proportion."""
    bar = Table.grid(expand=True, padding=0)
    cells = []
    for _, colour, share in parts:
        if share >= 0.005:
            bar.add_column(ratio=max(1, round(share * 200)), no_wrap=True, overflow="crop")
            cells.append(Text("█" * 400, style=colour, no_wrap=True, overflow="crop"))
    bar.add_row(*cells)
    return bar


def _time_legend(parts: Sequence[tuple[str, str, float]]) -> Text:
    space = "\N{NO-BREAK SPACE}"  # holds an entry together where the line breaks
    legend = Text()
    for label, colour, share in parts:
        legend.append(f"■{space}", style=colour).append(f"{label}{space}{share:.0%}", style="dim").append("   ")
    return legend


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar for work of its own. Call what it yields once per item done."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    task = bar.add_task(label, total=total)
    if in_notebook():  # Where rich would ask for widgets.
        screen = NotebookScreen(bar.get_renderable, width=bar.console.width)
        screen.start()
        try:
            yield lambda: bar.advance(task)
        finally:
            screen.stop()
    else:
        with bar:
            yield lambda: bar.advance(task)
