"""A whole run as one HTML file: how it ended, its curve, its numbers, and samples to read. It may be mailed."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reroll.observe.files import read_jsonl
from reroll.observe.run_folder import RunFolder
from reroll_zoo.samples.episode import LoggedEpisode
from reroll_zoo.samples.run_samples import RunSamples
from reroll_zoo.show.curve import Series, draw_curve, series_of
from reroll_zoo.show.page import document, earned, fact_list, text, turns_of, write_document
from reroll_zoo.show.terminal import facts, last_words, number

HEADLINES = {
    "reward/mean": "training reward",
    "eval/pass@1": "held-out pass@1",
    "rollout/completion_tokens": "response length, tokens",
    "train/loss": "loss",
    "train/entropy": "entropy",
    "kl/reference": "KL to the reference",
    "train/sampler_gap": "gap between trainer and sampler",
    "rollout/groups_with_signal": "groups with a signal",
    "train/grad_norm": "gradient norm",
    "rollout/staleness": "staleness, versions",
    "time/step_s": "seconds per step",
}
"""The numbers to look at first, those of them that a run has, and what they are called."""

_NUM_SAMPLES = 8
"""How many samples are shown of each choice: the newest, the worst and the best of late."""
_LATE = 0.25
"""The last part of a run, from which the worst and the best are taken: the policy as it has become."""
_WIDTH, _HEIGHT = 160, 28
"""Size of the small curve of a metric, in pixels."""


def write_report(folder: Path, chosen: Mapping[str, Sequence[LoggedEpisode]], *, file: Path | None = None) -> Path:
    """Write the report of the run in `folder`, by default as report.html into it. Returns where it is."""
    return write_document(file or folder / "report.html", render_report(RunFolder(folder), chosen))


def choose_samples(samples: RunSamples) -> dict[str, list[LoggedEpisode]]:
    """What to show, by its title: the newest, and of the policy as it has become the best and the worst."""
    scored = [life for life in samples.lives if life.stored is not None]
    last = max((life.trained_version or 0 for life in scored), default=0)
    late = [life for life in scored if (life.trained_version or 0) > (1 - _LATE) * last]
    by_reward = sorted(late, key=lambda life: life.reward or 0.0)
    first = min((life.trained_version or 0 for life in late), default=0)
    chosen = {
        "newest samples": scored[::-1][:_NUM_SAMPLES],
        f"best samples since step {first}": by_reward[::-1][:_NUM_SAMPLES],
        f"worst samples since step {first}": by_reward[:_NUM_SAMPLES],
    }
    return {title: [samples.read(life) for life in lives] for title, lives in chosen.items() if lives}


def render_report(run: RunFolder, chosen: Mapping[str, Sequence[LoggedEpisode]]) -> str:
    """The whole page, from what lies in the run's folder and samples by what they are called together."""
    rows = read_jsonl(run.metrics_path) if run.metrics_path.exists() else []
    name = run.path.resolve().name
    header = f"<h1>{text(name)}</h1>\n{fact_list(_outcome(run, rows))}"
    body = "\n".join([_curve(run), _headlines(rows), _samples(chosen, run.path), _all_numbers(rows), _config(run)])
    return document(f"{name} · report", header=header, body=f"<main>\n{body}\n</main>", may_load="img-src data:")


def _outcome(run: RunFolder, rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """How far the run got, and what it says of its end, if it has ended."""
    result = json.loads(run.result_path.read_text(encoding="utf-8")) if run.result_path.exists() else {}
    known = {"status": "no result yet: running, or ended without a word", "steps": rows[-1]["step"] if rows else 0} | result
    shown = {key: value for key, value in known.items() if isinstance(value, str | int | float)}
    return [(key, number(value) if isinstance(value, float) else str(value)) for key, value in shown.items()]


def _curve(run: RunFolder) -> str:
    with TemporaryDirectory() as scratch:
        picture = Path(scratch) / "curve.png"
        if not run.metrics_path.exists() or not draw_curve(run.metrics_path, picture, title=""):
            return '<section class="overview"><p>No step has been logged yet.</p></section>'
        data = b64encode(picture.read_bytes()).decode()
    return f'<section class="overview"><img alt="learning curve" src="data:image/png;base64,{data}"></section>'


def _headlines(rows: Sequence[dict[str, Any]]) -> str:
    table = _numbers(rows, {name: label for name, label in HEADLINES.items() if series_of(rows, name).steps})
    return f'<section class="overview"><h2>numbers</h2>{table}</section>' if table else ""


def _all_numbers(rows: Sequence[dict[str, Any]]) -> str:
    names = sorted({name for row in rows for name in row if name != "step"})
    table = _numbers(rows, {name: name for name in names if series_of(rows, name).steps})
    return f"<article><details><summary>all {len(names)} numbers</summary>{table}</details></article>" if table else ""


def _numbers(rows: Sequence[dict[str, Any]], labels: Mapping[str, str]) -> str:
    """A row a metric: its course, and its first, least, greatest and last value."""
    if not labels:
        return ""
    lines = []
    for name, label in labels.items():
        series = series_of(rows, name)
        values = series.values[0], min(series.values), max(series.values), series.values[-1]
        cells = "".join(f"<td>{number(value)}</td>" for value in values)
        lines.append(f'<tr><th title="{text(name)}">{text(label)}</th><td>{_course(series)}</td>{cells}</tr>')
    head = "".join(f"<td>{word}</td>" for word in ("", "", "first", "least", "greatest", "last"))
    return f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _course(series: Series) -> str:
    """The values over the steps as a line."""
    low, high = min(series.values), max(series.values)
    first, last = series.steps[0], series.steps[-1]
    points = " ".join(
        f"{(step - first) / ((last - first) or 1) * _WIDTH:.1f},{_HEIGHT - (value - low) / ((high - low) or 1) * _HEIGHT:.1f}"
        for step, value in zip(*series, strict=True)
    )
    box = f"-2 -2 {_WIDTH + 4} {_HEIGHT + 4}"
    line = (
        f'<polyline points="{points}"/>' if len(series.steps) > 1 else f'<circle cx="{_WIDTH / 2}" cy="{_HEIGHT / 2}" r="2"/>'
    )
    return f'<svg class="course" viewBox="{box}" width="{_WIDTH}" height="{_HEIGHT}" aria-hidden="true">{line}</svg>'


def _samples(chosen: Mapping[str, Sequence[LoggedEpisode]], folder: Path) -> str:
    if not chosen:
        return '<section class="overview"><h2>samples</h2><p>None has ended yet.</p></section>'
    sections = []
    for place, (title, episodes) in enumerate(chosen.items()):
        lines = "".join(_sample(episode, f"c{place}", folder) for episode in episodes)
        sections.append(f'<section class="overview"><h2>{text(title)}</h2>{lines}</section>')
    return "\n".join(sections)


def _sample(episode: LoggedEpisode, choice: str, folder: Path) -> str:
    """A line that opens: what was asked and answered, then every turn."""
    asked = " ".join(episode.prompt.split())
    summary = (
        f'<span class="place">{"–" if episode.step is None else episode.step}</span><span class="asked">{text(asked)}</span>'
        f'<span class="answered">{text(last_words(episode.turns))}</span>'
        f'<span class="earned">{number(episode.reward)}</span>'
    )
    told = f'{fact_list(facts(episode))}<p class="measures">{earned(episode.reward, episode.parts)}</p>'
    turns = turns_of(episode, anchor=text(f"{choice}-{episode.step}-{episode.id}"), folder=folder)
    return f'<details class="sample"><summary>{summary}</summary>{told}{turns}</details>'


def _config(run: RunFolder) -> str:
    if not run.config_path.exists():
        return ""
    summary = "<summary>config.yaml, presets and defaults written out</summary>"
    config = f"<pre>{text(run.config_path.read_text(encoding='utf-8'))}</pre>"
    return f"<article><details>{summary}{config}</details></article>"
