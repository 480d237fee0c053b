"""Before a run goes on: is what it left whole, is it of the same kind, and what is different this time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reroll.config.explain import with_new_names
from reroll.config.pipeline import PipelineConfig
from reroll.errors import RunFolderError
from reroll.observe.manifest import has_manifest
from reroll.observe.run_folder import Checkpoint, RunFolder

STATE_FILE = "state.json"
STATE_VERSION = 1
"""Version of its keys: one more when a key changes its meaning; a new key has a default for files without it."""
_SAME_PIPELINE = {"agentic": "rlvr"}
"""Two names of one pipeline."""


def look_back(folder: RunFolder, config: PipelineConfig, resolved: Mapping[str, Any]) -> list[str]:
    """What the user should know of the run that is about to go on. Raises RunFolderError if it cannot.

    A newest checkpoint that is damaged is renamed and an older one gone on from, which is the first thing that is said.
    """
    earlier = folder.earlier_config()
    if earlier != resolved:  # To know all names there are takes a while, in which a run that heals would stand still.
        earlier = with_new_names(type(config), earlier)
    was, now = (_SAME_PIPELINE.get(name, name) for name in (str(earlier.get("pipeline")), config.pipeline))
    if was != now:
        raise RunFolderError(
            f"{folder.path} is a run of pipeline {was}: pipeline {now} cannot go on with it (choose another run.name)"
        )
    damaged = folder.set_damaged_aside(sums=config.checkpoint.verify)
    latest = folder.newest()
    notes = [f"warning: {found}; it was renamed" for found in damaged]
    if damaged and latest:
        notes.append(f"warning: going back to {latest.path}, which is whole: the steps after {latest.step} are done again")
    if latest is None:
        notes.append(f"{folder.path} has no checkpoint: the run starts anew at step 0")
    elif not has_manifest(latest.path):
        notes.append(f"{latest.path} has no manifest.json, as an earlier version wrote it: it is taken as it is")
    changes = changes_of(earlier, resolved)
    return notes + [f"config: {change}" for change in changes]


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's state.json. Raises RunFolderError if it is damaged or of a later version."""
    path = checkpoint.path / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        version, missing = state.get("version", 0), {"steps", "evals", "pipeline"} - state.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(checkpoint.path, str(error)) from error
    if version > STATE_VERSION:
        raise RunFolderError(
            f"{path} is of version {version}, and this reroll knows {STATE_VERSION} at most: update reroll to go on from it"
        )
    if missing:
        raise _damaged(checkpoint.path, f"{STATE_FILE} has no {', '.join(sorted(missing))}")
    return dict(state)


def finished_before(folder: RunFolder, num_steps: int) -> tuple[Checkpoint, dict[str, Any], dict[str, Any]] | None:
    """The last checkpoint, its state and the result of a run that has finished so many steps and said so; else None."""
    latest = folder.latest_checkpoint()
    if latest is None or latest.step < num_steps or not folder.result_path.is_file():
        return None
    try:
        result = json.loads(folder.result_path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # Written anew.
    return (latest, read_state(latest), result) if result.get("status") == "finished" else None


def sampling_fingerprint(config: PipelineConfig) -> str:
    """Equal for configs that draw the same samples from the same checkpoint, wherever they run and whatever they log."""
    elsewhere = {"run", "checkpoint", "eval", "runtime", "cluster", "reward_workers", "env_workers"}
    places = {"report_every", "devices", "num_workers", "max_workers"}
    deciding = config.model_dump(mode="json", exclude={**dict.fromkeys(elsewhere, True), "engine": places})
    deciding["run"] = {"seed": config.run.seed, "steps": config.run.steps}  # Learning rates may depend on how many there are.
    return hashlib.sha256(json.dumps(deciding, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _damaged(path: Path, reason: str) -> RunFolderError:
    return RunFolderError(f"{path} is damaged: {reason} (delete it to resume from an earlier one)")


class Change(NamedTuple):
    """One value that is another. None stands for null, and for what is not there."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path} {_shown(self.old)} → {_shown(self.new)}"


def changes_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every leaf that differs, in the order of `new`. Lists are leaves, unless they are as long and hold sections."""
    return list(_changes("", old, new))


def _changes(path: str, old: Any, new: Any) -> list[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = dict.fromkeys([*new, *old])
        return [found for name in names for found in _changes(f"{path}.{name}".lstrip("."), old.get(name), new.get(name))]
    if _holds_sections(old) and _holds_sections(new) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [found for index, (before, after) in pairs for found in _changes(f"{path}.{index}", before, after)]
    return [] if old == new else [Change(path, old, new)]


def _holds_sections(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
