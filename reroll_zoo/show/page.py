"""A logged sample as one HTML file: no script, no network, and nothing that a model wrote is markup."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path

from reroll.errors import RunFolderError, printable
from reroll_zoo.samples.episode import LIKELY, EpisodeTurn, LoggedEpisode, Token, Told, shade
from reroll_zoo.samples.pictures import read_picture
from reroll_zoo.show.terminal import facts, last_words, number, title_of, weights_of
from reroll_zoo.vision.store import MARK

_EMPTY = frozenset("_.-·")
_WALL = frozenset("#")
_MIN_CELLS = 2
_MIN_CELLS_WITHOUT_SPACES = 3
_LAST_WORDS = 100
"""Characters; the page cuts them further, to the width that there is."""
_HUE_STEP = 249
"""Spreads the symbols of the bundled games over the colour circle; a symbol has the same colour on every page."""


@dataclass(frozen=True, slots=True)
class Board:
    """A grid of symbols found in a text: equally long rows of single characters."""

    rows: tuple[tuple[str, ...], ...]


def render_page(episode: LoggedEpisode, *, run: str, folder: Path | None = None) -> str:
    """The whole page, with the pictures that the run in `folder` keeps. It may be mailed, or opened from a disk."""
    title = title_of(episode)
    header = f'<p class="run">{text(run)}</p>\n<h1>{text(title)}</h1>\n{fact_list(facts(episode))}'
    body = f"{_overview(episode)}\n<main>\n{turns_of(episode, folder=folder)}\n</main>"
    has_pictures = any(told.images for turn in episode.turns for told in turn.shown)
    return document(f"{title} · {run}", header=header, body=body, may_load="img-src data:" if has_pictures else "")


def document(title: str, *, header: str, body: str, may_load: str = "") -> str:
    """A whole page that needs nothing beside it: no script, no network. `may_load` widens what a browser lets it show."""
    policy = "; ".join(["default-src 'none'", "style-src 'unsafe-inline'", *([may_load] if may_load else [])])
    style = files("reroll_zoo.show").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{text(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
{header}
</header>
{body}
</body>
</html>
"""


def turns_of(episode: LoggedEpisode, *, anchor: str = "turn", folder: Path | None = None) -> str:
    """What happened, turn by turn. `anchor` begins the names that links lead to: unique on a page of several samples. Pictures
    are those that the run in `folder` keeps."""
    turns = "\n".join(_turn(place, turn, anchor=anchor, folder=folder) for place, turn in enumerate(episode.turns, start=1))
    return turns or _unplayed(episode)


def write_page(episode: LoggedEpisode, folder: Path, *, file: Path | None = None) -> Path:
    """Write the page of a sample of the run in `folder`, by default into that folder. Returns where it is."""
    file = file or folder / f"episode-{re.sub(r'[^A-Za-z0-9_.-]', '-', episode.id)}.html"
    return write_document(file, render_page(episode, run=folder.resolve().name, folder=folder))


def write_document(file: Path, page: str) -> Path:
    """Write a page. Returns where it is."""
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"cannot write {file}: {error.strerror} (choose another file with --html)") from error
    return file


def split_boards(text: str) -> list[str | Board]:
    """A text and the boards in it, in order.

    Rows follow each other line by line. Their symbols are separated by single spaces; without spaces it takes three rows
    of three, and one symbol that looks like floor or wall, or any short words would be a board.
    """
    parts: list[str | Board] = []
    words: list[str] = []
    lines = text.split("\n")
    place = 0
    while place < len(lines):
        rows = _rows_from(lines, place)
        if not rows:
            words.append(lines[place])
            place += 1
            continue
        if words:
            parts.append("\n".join(words))
            words = []
        parts.append(Board(rows))
        place += len(rows)
    return [*parts, "\n".join(words)] if words else parts


def _rows_from(lines: Sequence[str], start: int) -> tuple[tuple[str, ...], ...]:
    """The rows of the board that starts at this line; none if none does."""
    for cells_of, at_least in ((_spaced, _MIN_CELLS), (_unspaced, _MIN_CELLS_WITHOUT_SPACES)):
        rows: list[tuple[str, ...]] = []
        for line in lines[start:]:
            cells = cells_of(line)
            if len(cells) < at_least or (rows and len(cells) != len(rows[0])):
                break
            rows.append(cells)
        is_drawn = cells_of is _spaced or any(cell in _EMPTY | _WALL for row in rows for cell in row)
        if len(rows) >= at_least and is_drawn:
            return tuple(rows)
    return ()


def _spaced(line: str) -> tuple[str, ...]:
    line = line.rstrip()
    return tuple(line[::2]) if re.fullmatch(r"\S(?: \S)+", line) else ()


def _unspaced(line: str) -> tuple[str, ...]:
    line = line.rstrip()
    return tuple(line) if re.fullmatch(r"\S+", line) else ()


def fact_list(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, side by side."""
    items = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs)
    return f"<dl>{items}</dl>"


def _overview(episode: LoggedEpisode) -> str:
    """Every turn in a line: its last words, and a bar for what it earned. Then the total, and what the shades mean."""
    rewards = [turn.reward or 0.0 for turn in episode.turns]
    low, high = min([0.0, *rewards]), max([0.0, *rewards])
    rows = "\n".join(
        f'<li><a href="#turn-{place}"><span class="place">{place}</span>'
        f'<span class="said"><bdi dir="ltr">{text(last_words([turn])[-_LAST_WORDS:])}</bdi></span>'
        f'{_bar(turn.reward or 0.0, low=low, high=high)}<span class="earned">{number(turn.reward)}</span></a></li>'
        for place, turn in enumerate(episode.turns, start=1)
    )
    labels = [f"p ≥ {bound:g}" for bound in LIKELY] + [f"p < {LIKELY[-1]:g}"]
    legend = "".join(f'<span class="t s{place}">{text(label)}</span>' for place, label in enumerate(labels))
    total = f'<p class="total measures">{earned(episode.reward, episode.measured)}</p>'
    return f'<section class="overview"><ol>\n{rows}\n</ol>{total}<p class="legend">{legend}</p></section>'


def _unplayed(episode: LoggedEpisode) -> str:
    return f"<article><h2>no turn was played</h2><pre>{text(episode.prompt)}</pre></article>"


def _bar(value: float, *, low: float, high: float) -> str:
    """A bar from zero to the value, on a track from the lowest to the highest reward of the episode."""
    span = (high - low) or 1.0
    left, width = (min(value, 0.0) - low) / span * 100, abs(value) / span * 100
    sign = "minus" if value < 0 else "plus"
    return f'<span class="track"><span class="bar {sign}" style="left:{left:.1f}%;width:{width:.1f}%"></span></span>'


def _turn(place: int, turn: EpisodeTurn, *, anchor: str, folder: Path | None) -> str:
    afresh = '<p class="note">Its prompt does not continue the turn before: a training row of its own.</p>'
    about = " · ".join(word for word in (weights_of(turn), turn.finish_reason) if word)
    is_seen = turn.state is None or any(turn.state == told.content for told in turn.shown)
    state = "" if is_seen else f"<details><summary>state</summary><pre>{text(turn.state or '')}</pre></details>"
    return f"""<article id="{anchor}-{place}">
<h2>turn {place}</h2>
{afresh if turn.is_rendered_afresh else ""}<div class="sides">
<section class="shown">{"".join(_told(told, folder) for told in turn.shown)}{state}</section>
<section class="wrote"><h3>policy <small>{text(about)}</small></h3>{_words(turn)}
<p class="measures">{earned(turn.reward, turn.info)}</p></section>
</div>
</article>"""


def _told(told: Told, folder: Path | None) -> str:
    tools = f'<p class="note">may call {text(", ".join(told.tools))}</p>' if told.tools else ""
    texts = told.content.split(MARK) if told.images else [told.content]
    parts = [_words_and_boards(texts[0])]
    for words, name in zip_longest(texts[1:], told.images, fillvalue=""):
        parts += [_picture(name, folder), _words_and_boards(words)]
    return f"<h3>{text(told.role)}</h3>{''.join(parts)}{tools}"


def _words_and_boards(words: str) -> str:
    parts = split_boards(words) if words else []
    return "".join(_board(part) if isinstance(part, Board) else f"<pre>{text(part)}</pre>" for part in parts)


def _picture(name: str, folder: Path | None) -> str:
    found = read_picture(folder, name) if folder is not None else None
    if found is None:
        return '<p class="note">a picture that is not kept with the run</p>'
    return f'<p><img class="picture" alt="a picture that the policy was shown" src="{found.url}"></p>'


def _board(board: Board) -> str:
    cells = "".join(_cell(symbol) for row in board.rows for symbol in row)
    label = text("; ".join(" ".join(row) for row in board.rows))
    return f'<div class="board" role="img" aria-label="{label}" style="--columns:{len(board.rows[0])}">{cells}</div>'


def _cell(symbol: str) -> str:
    if symbol in _EMPTY:
        return f'<i class="empty">{text(symbol)}</i>'
    if symbol in _WALL:
        return f'<i class="wall">{text(symbol)}</i>'
    return f'<i style="--hue:{ord(symbol) * _HUE_STEP % 360}">{text(symbol)}</i>'


def _words(turn: EpisodeTurn) -> str:
    words = "".join(_token(token) for token in turn.tokens) if turn.pieces else text(turn.text)
    return f'<pre class="words">{words}</pre>'


def _token(token: Token) -> str:
    spelled = json.dumps(printable(token.text), ensure_ascii=False) if token.text else "part of a character"
    tip = f"{spelled}  log-prob {number(token.logp)}  weights v{token.version}"
    return f'<span class="t s{shade(token.logp)}" tabindex="-1" data-tip="{text(tip)}">{text(token.visible)}</span>'


def earned(reward: float | None, measured: Mapping[str, float | None]) -> str:
    """A reward, and what was measured beside it."""
    measures = "".join(f" <span>{text(name)} {number(value)}</span>" for name, value in measured.items())
    return f"<span>reward <b>{number(reward)}</b></span>{measures}"


def text(words: str) -> str:
    """Words as HTML shows them, in an element or in an attribute's quotes."""
    return escape(printable(words), quote=True)
