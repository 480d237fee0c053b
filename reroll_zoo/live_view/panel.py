"""The panel: a run's bar, numbers and times, drawn over and over where the output can be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reroll.observe.progress import TrainView, in_notebook
from reroll_zoo.live_view.screen import NotebookScreen, Screen, open_screen

SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 24
NARROW_SPARKLINE_WIDTH = 12
NARROW_CONSOLE = 90
ECHO_WIDTH = len("^C")

TIME_PARTS = (
    ("time/wait_s", "waiting for samples", "cyan"),
    ("time/train_s", "training", "green"),
    ("time/push_s", "pushing weights", "magenta"),
)
"""The parts of a step, one after the other; samples are generated and scored beside them."""


class RunPanel:
    """Shows all that a view knows. Any metric may be missing; one that was seen stays on show until a newer value comes."""

    def __init__(self, view: TrainView) -> None:
        self._view = view
        self._latest: dict[str, float] = {}
        self._rewards: list[float] = []
        self._losses: list[float] = []
        self._first_pass_rate: float | None = None
        self._live: Screen | None = None

    def start(self) -> bool:
        self._live = open_screen(self._view.console, self.render)
        if self._live:
            self._live.start(refresh=True)
        return self._live is not None

    def refresh(self) -> None:
        if self._live:
            self._live.refresh()

    def stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def remember(self, values: Mapping[str, float]) -> None:
        self._latest |= values
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
        if "train/loss" in values:
            self._losses.append(values["train/loss"])
        if self._first_pass_rate is None:
            self._first_pass_rate = values.get("eval/pass@1")

    def render(self) -> RenderableType:
        """The panel as it stands."""
        body: list[RenderableType] = [self._progress_line()]
        if (
            self._view.step < self._view.total_steps
        ):  # The line stays when it is empty: a panel that changes its height flickers.
            activity = " · ".join(filter(None, (self._view.activity(), _kernels_under_way())))
            body.append(Text(activity, style="dim", no_wrap=True, overflow="ellipsis"))
        if self._view.remark:
            body.append(Text(self._view.remark, style="yellow"))
        numbers = self._number_grid()
        if numbers.row_count:
            body += [Text(), numbers]
        if parts := self._time_parts():
            body += [Text(), _time_bar(parts), _time_legend(parts)]
        title = f"[bold]reroll[/bold] [dim]·[/dim] {escape(self._view.title)}"
        # Room for the ^C that a terminal echoes: it would wrap, and the panel would be redrawn a line too low.
        width = max(20, self._view.console.width - ECHO_WIDTH)
        return Panel(Group(*body), title=title, title_align="left", border_style="dim", padding=(0, 1), width=width)

    def _progress_line(self) -> RenderableType:
        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(
            total=self._view.total_steps, completed=self._view.step, complete_style="cyan", finished_style="green"
        )
        line.add_row(f"step {self._view.step}/{self._view.total_steps}", bar, self._view.time_left())
        return line

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
        return sparkline(values, width=NARROW_SPARKLINE_WIDTH if self._view.console.width < NARROW_CONSOLE else SPARKLINE_WIDTH)

    def _time_parts(self) -> list[tuple[str, str, float]]:
        """(label, colour, share) of what the last step spent its time on."""
        known = [(label, colour, self._latest[name]) for name, label, colour in TIME_PARTS if name in self._latest]
        total_s = sum(seconds for _, _, seconds in known)
        return [(label, colour, seconds / total_s) for label, colour, seconds in known] if total_s > 0 else []


def _kernels_under_way() -> str:
    """What this process compiles for a GPU, if it has come to that: looked up, since it is loaded with Triton."""
    cache = sys.modules.get("reroll_zoo.kernel_cache")
    return str(cache.kernel_cache().words()) if cache else ""


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
