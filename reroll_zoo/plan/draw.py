"""A plan as a picture: what every device does during one step, and what it holds at its fullest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reroll.errors import RunFolderError
from reroll_zoo.plan.memory import GIB
from reroll_zoo.plan.peaks import DeviceLoad
from reroll_zoo.plan.phases import Bar
from reroll_zoo.plan.plan import Plan
from reroll_zoo.plan.search import as_devices

INK, FAINT, RED = "#24292f", "#8c959f", "#cf222e"
COLOURS = {"policy": "#0969da", "engine": "#1a7f37", "push": "#bf8700", "reference": "#8250df", "critic": "#bc4c00"}
OTHERS = ("#1b7c83", "#a475f9", "#e16f24", "#6e7781")
_MAX_SHADES = 7


class Lane(NamedTuple):
    """Devices that do and hold the same: one row of the picture."""

    devices: tuple[str, ...]
    load: DeviceLoad
    bars: tuple[Bar, ...]


def lanes_of(plan: Plan) -> list[Lane]:
    """The devices of a plan, equal neighbours together."""
    lanes: list[Lane] = []
    for load in plan.loads:
        bars = tuple(bar for bar in plan.bars if load.device in bar.devices)
        before = lanes[-1] if lanes else None
        alike = before and plan.cluster.spec_of(before.devices[0]) == plan.cluster.spec_of(load.device)
        if before and alike and before.bars == bars and before.load.terms == load.terms:
            lanes[-1] = Lane((*before.devices, load.device), before.load, bars)
        else:
            lanes.append(Lane((load.device,), load, bars))
    return lanes


def draw_plan(plan: Plan, out: Path, *, title: str) -> None:
    """Write the picture; its ending (.svg, .png, .pdf) says as what. Raises RunFolderError if it cannot be written."""
    # Only here, or every command would wait for matplotlib to load.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = lanes_of(plan)
    figure = Figure(figsize=(12, 1.9 + 0.62 * len(lanes)), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    time_axes, memory_axes = figure.subplots(1, 2, sharey=True, width_ratios=[1.25, 1])
    colours = _colours(plan)
    _draw_time(time_axes, lanes, plan, colours)
    _draw_memory(memory_axes, lanes, plan, colours)
    names = [name for name in colours if any(name in (bar.role, *_roles(lane)) for lane in lanes for bar in lane.bars)]
    handles = [_patch(colours[name]) for name in names]
    figure.legend(handles, names, loc="outside lower left", ncols=len(names), frameon=False, fontsize=8.5)
    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # Words stay words: to search, and to read aloud.
            figure.savefig(out)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot write {out}: {error}: give a file that ends in .svg or .png") from error


def _colours(plan: Plan) -> dict[str, str]:
    others = iter(OTHERS * len(plan.roles))
    found = {role.name: COLOURS.get(role.name) or next(others) for role in plan.roles}
    return {**found, "push": COLOURS["push"], "process": FAINT}


def _draw_time(axes: Any, lanes: Sequence[Lane], plan: Plan, colours: dict[str, str]) -> None:
    for row, lane in enumerate(lanes):
        axes.barh(row, plan.step_s, height=0.62, color="#f6f8fa", edgecolor="#d0d7de", linewidth=0.5)
        for bar in lane.bars:
            axes.barh(
                row, bar.seconds, left=bar.start_s, height=0.62, color=colours[bar.role], edgecolor="white", linewidth=0.6
            )
            if bar.seconds > 0.07 * plan.step_s:
                label = bar.phase if bar.role in ("policy", "engine", "push") else f"{bar.phase} {bar.role}"
                middle = bar.start_s + bar.seconds / 2
                text = f"{label}\n{in_seconds(bar.seconds)}"
                axes.text(middle, row, text, ha="center", va="center", fontsize=7.5, color="white")
    axes.set_yticks(range(len(lanes)), [_label(lane, plan) for lane in lanes], fontsize=9)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, plan.step_s * 1.01)
    axes.set_xlabel("seconds of one step", fontsize=9, color=INK)
    axes.set_title(f"time: {in_seconds(plan.step_s)} a step", loc="left", fontsize=10, color=INK)
    _style(axes)


def _draw_memory(axes: Any, lanes: Sequence[Lane], plan: Plan, colours: dict[str, str]) -> None:
    sizes = [plan.cluster.spec_of(lane.devices[0]).memory_gib for lane in lanes]
    widest = max(*sizes, plan.fullest.num_bytes / GIB)
    for row, lane in enumerate(lanes):
        left = 0.0
        shades = dict.fromkeys(colours, 0)
        for term in sorted(lane.load.terms, key=lambda term: list(colours).index(term.role)):
            width, shade = term.num_bytes / GIB, shades[term.role]
            shades[term.role] = min(shade + 1, _MAX_SHADES)
            axes.barh(
                row,
                width,
                left=left,
                height=0.62,
                color=colours[term.role],
                alpha=1 - 0.11 * shade,
                edgecolor="white",
                linewidth=0.6,
            )
            lines = [*term.name.split(" ", 1), f"{width:.1f}"]
            if width > 0.013 * widest * max(map(len, lines)):
                text = "\n".join(lines)
                axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=6.5, color="white")
            left += width
        full = lane.load in plan.overfull
        note = f"{left:.1f} GiB, {lane.load.phase}" + (": too much" if full else "")
        beside = max(left, sizes[row]) + 0.01 * widest  # Right of the limits, so that no line runs through the words.
        axes.text(beside, row, note, va="center", fontsize=8, color=RED if full else INK)
        room = plan.cluster.memory_bytes_of(lane.devices[0]) / GIB
        axes.vlines(room, row - 0.5, row + 0.5, color=RED, linewidth=1, linestyle="--", zorder=3)
        axes.vlines(sizes[row], row - 0.5, row + 0.5, color=INK, linewidth=1, zorder=3)
    axes.set_xlim(0, widest * 1.42)
    names = {plan.cluster.spec_of(lane.devices[0]).name: size for lane, size in zip(lanes, sizes, strict=True)}
    known = ", ".join(f"{name}: {size:g}" for name, size in names.items())
    share = f"{plan.cluster.efficiency.memory:.0%}"
    axes.set_xlabel(f"GiB; {known}, of which {share} are planned with", fontsize=9, color=INK)
    axes.set_title("memory at its fullest", loc="left", fontsize=10, color=INK)
    _style(axes)


def in_seconds(value: float) -> str:
    """A duration with as many digits as say something."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _label(lane: Lane, plan: Plan) -> str:
    if lane.devices == ("cpu",):
        return "CPU"
    nodes = sorted({plan.cluster.node_of(device) for device in lane.devices})
    where = "" if len(plan.cluster.machines) == 1 else f"\nnode {nodes[0]}" + (f"-{nodes[-1]}" if len(nodes) > 1 else "")
    return f"GPU {as_devices(lane.devices)}{where}"


def _roles(lane: Lane) -> tuple[str, ...]:
    return tuple(dict.fromkeys(term.role for term in lane.load.terms))


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour)


def _style(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0, labelsize=8.5)
