"""Logged samples in a terminal: a list of them, or one turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from reroll.errors import printable
from reroll_zoo.samples.episode import LIKELY, EpisodeTurn, LoggedEpisode, Token, Told, shade

SHADES = ("", "#1b1f24 on #fff3bf", "#1b1f24 on #ffd43b", "#1b1f24 on #ff922b", "#1b1f24 on #ff8787")
"""By `shade`: the surprising tokens stand out, on a dark and on a light terminal."""
COLUMNS = {"step": True, "sample": True, "domain": False, "status": False, "turns": True, "reward": True, "success": False}
"""Columns of the list, and whether they hold numbers. The end of the policy's text follows, in what is left of the width."""
STATUS_COLOURS = {"completed": "green", "truncated": "yellow", "aborted": "magenta", "filtered": "dim", "failed": "red"}


def print_samples(console: Console, episodes: Sequence[LoggedEpisode], *, folder: Path, num_ended: int) -> None:
    """A table of these samples, in their order."""
    table = Table(title=str(folder), title_justify="left")
    for column, is_number in COLUMNS.items():
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    table.add_column("last words", no_wrap=True, overflow="ellipsis", ratio=1)
    for episode in episodes:
        status = Text(episode.fate or episode.status, STATUS_COLOURS.get(episode.fate or episode.status, ""))
        step = "–" if episode.step is None else str(episode.step)
        left = (step, episode.id, printable(episode.domain))
        right = (str(len(episode.turns)), number(episode.reward), mark(episode.success), printable(last_words(episode.turns)))
        table.add_row(*map(Text, left), status, *map(Text, right))
    console.print(table)
    rest = f"{len(episodes)} of {num_ended} samples (-n, --step, --worst and --best choose others); "
    console.print(Text(f"{rest}reroll show {folder} SAMPLE prints one, --page makes a page for a browser", "dim"))


def last_words(turns: Sequence[EpisodeTurn]) -> str:
    """The last line that the policy wrote: where an answer or an action stands, if one does."""
    return turns[-1].text.strip().rpartition("\n")[2] if turns else ""


def print_episode(console: Console, episode: LoggedEpisode) -> None:
    """One sample, turn by turn. The likelier a token was, the fainter is its shade."""
    console.print(Rule(Text(title_of(episode), "bold"), align="left"))
    console.print(Text("  ").join(Text.assemble((f"{name} ", "dim"), printable(value)) for name, value in facts(episode)))
    for turn_number, turn in enumerate(episode.turns, start=1):
        console.print()
        console.print(Rule(Text(f"turn {turn_number}", "bold"), align="left", style="dim"))
        for line in _turn_lines(turn):
            console.print(line)
    if not episode.turns:
        console.print(Text(f"\nno turn was played\n{printable(episode.prompt)}"))
    console.print()
    console.print(Text.assemble("reward ", (number(episode.reward), "bold"), *_measures(episode.measured)))
    console.print(_legend())


def title_of(episode: LoggedEpisode) -> str:
    """Which sample it is, and where it was trained on."""
    trained = episode.fate or "not trained on" if episode.step is None else f"step {episode.step}"
    return f"sample {episode.id} · {trained}"


def facts(episode: LoggedEpisode) -> list[tuple[str, str]]:
    """What a sample was and how it ended, by name; what does not apply is left out."""
    known = {
        "prompt": episode.prompt_id,
        "domain": episode.domain,
        "seed": episode.seed,
        "answer": episode.answer,
        "status": episode.status,
        "reason": episode.reason or None,
        "success": None if episode.success is None else mark(episode.success),
        "tokens": episode.num_tokens,
    }
    return [(name, str(value)) for name, value in known.items() if value is not None]


def number(value: float | None) -> str:
    """Four digits at most; a dash where it is not known or was not finite."""
    return "–" if value is None else f"{value:.4g}"


def mark(success: bool | None) -> str:
    """Yes, no, or nobody says."""
    return {True: "✓", False: "✗", None: ""}[success]


def weights_of(turn: EpisodeTurn) -> str:
    """The weight versions that wrote a turn; empty if its tokens are not known."""
    versions = dict.fromkeys(f"v{version}" for version, _ in turn.versions)
    return "weights " + " → ".join(versions) if versions else ""


def _turn_lines(turn: EpisodeTurn) -> Iterator[Text]:
    if turn.is_rendered_afresh:
        yield Text("its prompt does not continue the turn before: a training row of its own", "yellow")
    for told in turn.shown:
        yield from _told_lines(told)
    yield Text("policy", "bold green")
    yield Text().join(_shaded(token) for token in turn.tokens) if turn.pieces else Text(printable(turn.text))
    end = f" · {weights_of(turn)} · {turn.finish_reason}" if turn.pieces else ""
    yield Text.assemble(("reward ", "cyan"), (number(turn.reward), "bold cyan"), *_measures(turn.info), (end, "dim"))


def _told_lines(told: Told) -> Iterator[Text]:
    yield Text(printable(told.role), "bold blue")
    yield Text(printable(told.content))
    if told.tools:
        yield Text(f"may call {printable(', '.join(told.tools))}", "dim")


def _shaded(token: Token) -> Text:
    return Text(token.visible, SHADES[shade(token.logp)])


def _measures(values: Mapping[str, float | None]) -> list[tuple[str, str]]:
    return [(f"  {printable(name)} {number(value)}", "dim") for name, value in values.items()]


def _legend() -> Text:
    labels = [f"p ≥ {bound:g}" for bound in LIKELY] + [f"p < {LIKELY[-1]:g}"]
    return Text(" ").join(Text(f" {label} ", style or "dim") for label, style in zip(labels, SHADES, strict=True))
