"""Logged samples as they are read again: those of a run, found by name, token by token."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from reroll.errors import RunFolderError
from reroll.observe.episode import UNKNOWN, EpisodeTurn, LoggedEpisode

LIKELY = (0.9, 0.5, 0.1, 0.01)
"""Where one shade of a token's probability ends and the next begins."""


class Token(NamedTuple):
    """A token that the policy wrote."""

    text: str
    """Empty where a character takes several tokens, but for the last of them."""
    logp: float | None
    """As sampled; None if it was not finite."""
    version: int
    """Version of the weights that sampled it."""

    @property
    def visible(self) -> str:
        """Its text so that every token can be seen and pointed at, one of a line break too."""
        return printable(self.text).replace("\n", "↵\n") or "·"


def tokens_of(turn: EpisodeTurn) -> list[Token]:
    """What the policy wrote in a turn, token by token."""
    versions = (version for version, count in turn.versions for _ in range(count))
    return [Token(*token) for token in zip(turn.pieces, turn.logp, versions, strict=True)]


def read_episodes(path: Path) -> tuple[list[LoggedEpisode], list[str]]:
    """The samples of a samples.jsonl, oldest first, and a note on each line that had to be skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror} (check its permissions)") from error
    episodes, notes = [], []
    for number, line in enumerate(lines, start=1):
        try:
            episodes.append(LoggedEpisode.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(key) for key in first["loc"])
            notes.append(f"{path} line {number} is damaged and was skipped: {place + ': ' if place else ''}{first['msg']}")
    return episodes, notes


def find_run(run: str, *, runs_dir: Path = Path("runs")) -> Path:
    """The folder of a run, by its path or by its name under `runs_dir`. Raises RunFolderError with names that are close."""
    for folder in (Path(run), runs_dir / run):
        if folder.is_dir():
            return folder
    there = sorted(path.name for path in runs_dir.glob("*") if path.is_dir())
    hint = _hint(Path(run).name, there) or "give the folder of a run, e.g. runs/NAME"
    raise RunFolderError(f"there is no run {run!r}, neither as a folder nor in {runs_dir}/ ({hint})")


def logged_episodes(folder: Path) -> tuple[list[LoggedEpisode], list[str]]:
    """What `read_episodes` finds in a run. Raises RunFolderError if that is nothing."""
    episodes, notes = read_episodes(folder / "samples.jsonl")
    notes += failure_of(folder)
    if not episodes:
        damage = "".join(f"\n{note}" for note in notes)
        raise RunFolderError(
            f"{folder} has no logged samples: its first step is not finished, or its run.log_samples is 0 "
            f"(set run.log_samples to how many to write each step; only pipeline rlvr writes any){damage}"
        )
    return episodes, notes


def failure_of(folder: Path) -> list[str]:
    """Why a run failed, if it did and could say so."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if result["status"] == "failed":
            return [f"this run failed after {result['steps']} steps: {result['error']}: {result['reason']}"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # It runs, was killed, or somebody edited what it left.
    return []


def find_episode(episodes: Sequence[LoggedEpisode], id: str) -> LoggedEpisode:
    """The latest sample of this id. Raises RunFolderError with ids that are close."""
    for episode in reversed(episodes):
        if episode.id == id:
            return episode
    ids = list(dict.fromkeys(episode.id for episode in episodes))
    hint = _hint(id, ids) or f"{len(ids)} samples were logged, from {ids[0]} to {ids[-1]}: leave SAMPLE out to list them"
    raise RunFolderError(f"no sample {id!r} was logged ({hint})")


def _hint(wrong: str, known: Sequence[str]) -> str:
    close = get_close_matches(wrong, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else ""


def shade(logp: float | None) -> int:
    """How surprising a token was, from 0 (all but certain) to 4 (less than one in a hundred)."""
    probability = 0.0 if logp is None else math.exp(logp)
    return sum(probability < bound for bound in LIKELY)


def printable(text: str) -> str:
    """Control characters as pictures: what a model writes must not steer a terminal."""
    return text.translate(_PICTURES)


_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), ord(UNKNOWN)) | {0x7F: ord("␡")}
