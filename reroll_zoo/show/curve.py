"""The learning curve as a picture, drawn from metrics.jsonl alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reroll.observe.files import explained, read_jsonl
from reroll.observe.run_folder import RunFolder

INK, FAINT, BLUE, GREEN, ORANGE, PURPLE = "#24292f", "#8c959f", "#0969da", "#1a7f37", "#bc4c00", "#8250df"


class Series(NamedTuple):
    """One metric over the steps at which it is known."""

    steps: list[int]
    values: list[float]


def report(folder: RunFolder, *, title: str) -> None:
    """Draw the curve of a run that has ended into its folder."""
    draw_curve(folder.metrics_path, folder.curve_path, title=title)


def draw_curve(metrics_path: Path, out_png: Path, *, title: str) -> bool:
    """Draw reward, held-out pass rate, response length and step time; without rewards, the loss.

    Returns False, and draws nothing, while no step has been logged. Raises RunFolderError if the picture cannot be written.
    """
    # Only here, or every command would wait for matplotlib to load.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_jsonl(metrics_path)
    main, side_panels = _choose_panels(rows)
    if main is None:
        return False

    figure = Figure(figsize=(9, 4.2), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    if side_panels:
        grid = figure.add_gridspec(len(side_panels), 2, width_ratios=[2.2, 1])
        axes = figure.add_subplot(grid[:, 0])
    else:
        axes = figure.add_subplot()
    _draw_main(axes, rows, main)
    for place, (name, label, colour) in enumerate(side_panels):
        side = figure.add_subplot(grid[place, 1])
        series = series_of(rows, name)
        _draw_series(side, series, colour=colour)
        side.set_title(label, loc="left", fontsize=9.5, color=INK)
        side.set_ylim(0, max(series.values) * 1.15 or 1)
        _style(side, has_x_label=place == len(side_panels) - 1)
    with explained(out_png):
        figure.savefig(out_png)
    return True


def series_of(rows: Sequence[dict[str, Any]], name: str) -> Series:
    """The metric wherever it was logged and finite."""
    known = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return Series([step for step, _ in known], [value for _, value in known])


def smooth(values: Sequence[float]) -> list[float]:
    """The trend: a Gaussian mean around each step, wider for longer runs. Unlike a running mean it does not lag behind."""
    width = max(1.0, len(values) / 40)
    reach = math.ceil(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    inside = slice(reach, reach + len(values))
    # Divided by the weights that fell on values, so that the ends are not drawn towards 0.
    trend = np.convolve(values, kernel)[inside] / np.convolve(np.ones(len(values)), kernel)[inside]
    return [float(value) for value in trend]


def _choose_panels(rows: Sequence[dict[str, Any]]) -> tuple[str | None, list[tuple[str, str, str]]]:
    """The main metric, and (name, label, colour) of the small panels that have data."""
    main = next((name for name in ("reward/mean", "train/loss") if series_of(rows, name).steps), None)
    candidates = [
        ("rollout/completion_tokens", "response length, tokens", ORANGE),
        ("time/step_s", "seconds per step", PURPLE),
    ]
    return main, [panel for panel in candidates if series_of(rows, panel[0]).steps]


def _draw_main(axes: Any, rows: Sequence[dict[str, Any]], name: str) -> None:
    is_reward = name == "reward/mean"
    _draw_series(axes, series_of(rows, name), colour=BLUE, label="training reward" if is_reward else "training loss")
    held_out = series_of(rows, "eval/pass@1" if is_reward else "eval/loss")
    if held_out.steps:
        label = "held-out pass@1" if is_reward else "held-out loss"
        axes.plot(*held_out, color=GREEN, marker="o", markersize=6, linewidth=1.2, linestyle=":", label=label, zorder=3)
        for place in {0, len(held_out.steps) - 1}:
            text = f"{held_out.values[place]:{'.0%' if is_reward else '.2f'}}"
            _annotate(axes, text, held_out.steps[place], held_out.values[place], colour=GREEN)
    if is_reward and all(0 <= value <= 1 for value in series_of(rows, name).values):
        axes.set_ylim(0, 1.08)
    axes.set_ylabel("reward and pass rate" if is_reward and held_out.steps else "reward" if is_reward else "loss", color=INK)
    axes.legend(loc="best", frameon=False, fontsize=9.5, labelcolor=INK)
    _style(axes, has_x_label=True)


def _draw_series(axes: Any, series: Series, *, colour: str, label: str | None = None) -> None:
    """Every value faintly, the trend on top."""
    axes.plot(*series, color=colour, alpha=0.25, linewidth=1)
    marker = "o" if len(series.steps) == 1 else ""
    axes.plot(series.steps, smooth(series.values), color=colour, linewidth=2, label=label, marker=marker)


def _annotate(axes: Any, text: str, step: int, value: float, *, colour: str) -> None:
    """Write over a point, on a white edge that keeps it readable where lines cross it."""
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text,
        (step, value),
        textcoords="offset points",
        xytext=(0, 9),
        ha="center",
        fontsize=9.5,
        fontweight="bold",
        color=colour,
        zorder=4,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )


def _style(axes: Any, *, has_x_label: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT, labelbottom=has_x_label)
    axes.grid(axis="y", color=FAINT, alpha=0.2, linewidth=0.8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if has_x_label:
        axes.set_xlabel("step", fontsize=9.5, color=INK)
