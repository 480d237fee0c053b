"""What simulated runs came to: a table in a terminal, and one HTML page without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from reroll.errors import RunFolderError
from reroll_zoo.simulate.compare import Compared, cheapest
from reroll_zoo.simulate.run import Prediction

PARTS = (("wait_s", "waiting for samples", "#1a7f37"), ("train_s", "training", "#0969da"), ("push_s", "push", "#bf8700"))
_STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --faint: #6e7781; --line: #d0d7de; --back: #fff; --bar: #8c959f }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #8b949e; --line: #30363d; --back: #0d1117;
  --bar: #6e7681 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 64rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: var(--faint); font-weight: 500 }
.best td { font-weight: 600 } .note { color: var(--faint) }
.track { display: flex; height: 1.3rem; border-radius: 3px; overflow: hidden }
.row { display: grid; grid-template-columns: minmax(7rem, 16rem) 1fr 5rem; gap: .8rem; align-items: center; margin: .35rem 0 }
.row span:last-child { text-align: right; color: var(--faint) } .key { display: inline-block; width: .8rem; height: .8rem;
  border-radius: 2px; margin: 0 .3rem 0 1rem }
@media (max-width: 40rem) { .row { grid-template-columns: 1fr auto } .row .track { grid-row: 2; grid-column: 1 / 3 } }
.hist { display: flex; gap: .4rem; align-items: flex-end; height: 6rem }
.hist div { flex: 0 0 3rem; display: flex; flex-direction: column; justify-content: flex-end; height: 100%; text-align: center;
  font-size: .8rem; color: var(--faint) }
.hist i { display: block; background: var(--bar); border-radius: 2px 2px 0 0 }
"""


def columns_of(one: Prediction) -> dict[str, str]:
    """A run in one line."""
    return {
        "step": seconds(one.step_s),
        "bound by": one.bound,
        "samples /s": f"{one.samples_per_s:,.3g}",
        "engines idle": f"{one.idle['engines']:.0%}",
        "trainer idle": f"{one.idle['trainer']:.0%}",
        "stale": f"{one.mean_staleness:.2f}",
        "wasted": f"{one.wasted_tokens / max(1, one.written_tokens):.1%}",
        "device-s /sample": f"{one.device_s_per_sample:,.3g}",
    }


def print_outcomes(console: Console, outcomes: Sequence[Compared], *, title: str) -> None:
    """A line for each run; of a single one more than that."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    several = len(outcomes) > 1
    if several:
        table.add_column("setting", overflow="fold", min_width=16)
    # Beside settings a narrow terminal has no room for the rate, which is the cost per sample the other way round.
    left_out = {"samples /s"} if several and console.width < 90 else set()
    for name in (name for name in columns_of(outcomes[0].outcome) if name not in left_out):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for compared in outcomes:
        label = [compared.label.replace("rollout.", "")] if several else []
        cells = columns_of(compared.outcome).items()
        table.add_row(*label, *(cell for name, cell in cells if name not in left_out))
    console.print(table)
    if len(outcomes) == 1:
        one = outcomes[0].outcome
        parts = ", ".join(f"{name} {seconds(one.mean(key))}" for key, name, _ in PARTS)
        console.print(f"a step: {parts}; {one.num_running:,.1f} sequences run in each engine")
        life = ", ".join(f"{name} {share:.0%}" for name, share in one.life.items())
        console.print(f"a sample's life: {life}")
        shares = ", ".join(f"{age}: {num / one.staleness.total():.0%}" for age, num in sorted(one.staleness.items()))
        console.print(f"staleness of trained groups: {shares}")
        console.print(
            f"{one.written_tokens:,} tokens written, {one.trained_tokens:,} trained on, {one.wasted_tokens:,} wasted; "
            f"at most {one.max_in_flight:,} samples in flight"
        )
        spent_s = one.controller_s + one.models_s
        console.print(f"simulated {one.wall_s:,.0f} s of {one.num_devices:,} devices in {spent_s:,.1f} s of this CPU")


def write_page(path: Path, outcomes: Sequence[Compared], *, title: str, notes: Sequence[str] = ()) -> None:
    """Raises RunFolderError if it cannot be written."""
    try:
        path.write_text(page_of(outcomes, title=title, notes=notes), encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}: give a file in a folder that exists") from error


def page_of(outcomes: Sequence[Compared], *, title: str, notes: Sequence[str] = ()) -> str:
    """The page as text."""
    best = cheapest(outcomes)
    names = list(columns_of(outcomes[0].outcome))
    head = "".join(f"<th>{escape(name)}</th>" for name in ("setting", *names))
    rows = "".join(
        f"<tr{' class=best' if one is best and len(outcomes) > 1 else ''}><td>{escape(one.label)}</td>"
        + "".join(f"<td>{escape(value)}</td>" for value in columns_of(one.outcome).values())
        + "</tr>"
        for one in outcomes
    )
    keys = "".join(f'<span class=key style="background:{colour}"></span>{name}' for _, name, colour in PARTS)
    bold = "<p class=note>Bold: the least cost per trained sample.</p>" if len(outcomes) > 1 else ""
    longest_s = max(one.outcome.step_s for one in outcomes)
    sections = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p class=note>{escape(note)}</p>" for note in notes),
        f"<div class=scroll><table><tr>{head}</tr>{rows}</table></div>{bold}",
        f"<h2>A step</h2><p class=note>{keys}</p>",
        *(_step_bar(one, longest_s) for one in outcomes),
        "<h2>Staleness of the groups trained on</h2><p class=note>Weight versions between admission and training.</p>",
        *(_histogram(one) for one in outcomes),
    ]
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{viewport}<title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><body>{''.join(sections)}</body></html>\n"
    )


def _step_bar(one: Compared, longest_s: float) -> str:
    parts = "".join(
        f'<div title="{name} {seconds(one.outcome.mean(key))}" '
        f'style="background:{colour};width:{100 * one.outcome.mean(key) / longest_s:.2f}%"></div>'
        for key, name, colour in PARTS
    )
    label, total = escape(one.label), seconds(one.outcome.step_s)
    return f"<div class=row><span>{label}</span><div class=track>{parts}</div><span>{total}</span></div>"


def _histogram(one: Compared) -> str:
    groups = one.outcome.staleness
    total = max(1, groups.total())
    bars = "".join(
        f'<div>{groups[age] / total:.0%}<i style="height:{70 * groups[age] / total:.1f}%"></i>{age}</div>'
        for age in range(max(groups, default=0) + 1)
    )
    return f"<p>{escape(one.label)}</p><div class=hist>{bars}</div>"


def seconds(value: float) -> str:
    """A duration with as many digits as say something."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"
