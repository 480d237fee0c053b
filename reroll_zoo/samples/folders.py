"""Where a run lies, and why it failed, for the commands that look at runs."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path

from reroll.errors import RunFolderError


def find_run(run: str, *, runs_dir: Path = Path("runs")) -> Path:
    """The folder of a run, by its path or by its name under `runs_dir`. Raises RunFolderError with names that are close."""
    for folder in (Path(run), runs_dir / run):
        if folder.is_dir():
            return folder
    there = sorted(path.name for path in runs_dir.glob("*") if path.is_dir())
    close = get_close_matches(Path(run).name, there, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "give the folder of a run, e.g. runs/NAME"
    raise RunFolderError(f"there is no run {run!r}, neither as a folder nor in {runs_dir}/ ({hint})")


def failure_of(folder: Path) -> list[str]:
    """Why a run failed, if it did and could say so."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if result["status"] == "failed":
            return [f"this run failed after {result['steps']} steps: {result['error']}: {result['reason']}"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # It runs, was killed, or somebody edited what it left.
    return []
