"""Everything a run leaves behind, in one folder. What is written here survives a crash, a full disk and a resume.

runs/NAME/config.yaml  metrics.jsonl  journal/  curve.png  result.json  checkpoints/step-000123/
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import yaml

from reroll.config.parts import RunConfig
from reroll.config.registry import load_entry
from reroll.errors import RunFolderError
from reroll.observe.files import (
    UNFINISHED_PREFIX,
    explained,
    is_disk_full,
    read_jsonl,
    sync,
    sync_tree,
    to_line,
    write_atomically,
    write_json,
)
from reroll.observe.journal import JOURNAL_FOLDER, sync_journal
from reroll.observe.manifest import FileSum, find_damage, write_manifest

LOCK_FILE = ".lock"
"""Who works in a folder; also the prefix of what is needed to make it."""
STEP_PREFIX = "step-"
DAMAGED_PREFIX = "damaged-"
"""Prefix of a checkpoint that is damaged: kept for inspection, and never resumed from."""
DELETED_PREFIX = ".deleted-"
"""Prefix of a folder that is being deleted: half of it must not look like all of it."""
REPLACED_PREFIX = ".replaced-"
"""Prefix of a checkpoint while another takes its name."""


class Checkpoint(NamedTuple):
    """A complete checkpoint: how many steps were finished, and where it lies."""

    step: int
    path: Path


class FolderLock(Protocol):
    """Held by the one run that works in a folder."""

    def check(self) -> None:
        """Raise RunFolderError if the folder is no longer ours: nothing more may be written there."""


def hold_folder(place: Path, *, waits: bool) -> AbstractContextManager[FolderLock | None]:
    """`with hold_folder(place):` nobody else works there, or RunFolderError says who does. A run that is to go on waits for its
    predecessor to end. Found by the entry point `folder` of the group `reroll.locks`."""
    hold: Callable[..., AbstractContextManager[FolderLock]] | None = load_entry("reroll.locks", "folder")
    return hold(place, waits=waits) if hold else nullcontext()


class RunFolder:
    """The files of one run. Rows and checkpoints carry the number of finished steps: the first step's row is step 1.

    Every failing write raises RunFolderError with the path and the fix. With a lock, so does every checkpoint of a run whose
    folder was taken by another.
    """

    def __init__(self, path: Path, *, lock: FolderLock | None = None) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        self.metrics_path = path / "metrics.jsonl"
        self.journal_path = path / JOURNAL_FOLDER
        self.curve_path = path / "curve.png"
        self.result_path = path / "result.json"
        self.checkpoints_path = path / "checkpoints"
        self._doomed_path = path / f"{DELETED_PREFIX}run"
        self._lock = lock
        self._resolved: Mapping[str, Any] = {}
        self.replica: Checkpoint | None = None
        """One that lies elsewhere, from which this run may go on."""
        self.has_begun = False
        """Whether this run's own rows are written here: until then an earlier run's are left as they are."""

    @classmethod
    def create(
        cls,
        run: RunConfig,
        *,
        resolved: Mapping[str, Any],
        resume: bool = False,
        overwrite: bool = False,
        lock: FolderLock | None = None,
    ) -> RunFolder:
        """Make the folder of a new run, or take up the one of an earlier run.

        `resolved` is the whole config as plain data. A run that got anywhere is an error, unless it is to be resumed (call
        `go_on` once its checkpoint is loaded) or may be overwritten (it is deleted). A folder that holds anything but a run
        is never touched.
        """
        folder = cls(cls.place_of(run, resume=resume, overwrite=overwrite), lock=lock)
        folder._resolved = resolved
        with explained(folder.path):
            if resume:
                folder._sweep()
                return folder
            folder._clear()
            folder.checkpoints_path.mkdir(parents=True, exist_ok=True)
            folder._write_config()
            folder.metrics_path.touch()
        folder.has_begun = True
        return folder

    @classmethod
    def place_of(cls, run: RunConfig, *, resume: bool, overwrite: bool) -> Path:
        """Where the run goes. Raises RunFolderError if it must not, and changes nothing."""
        if resume and overwrite:
            raise RunFolderError("--resume goes on with a run, --overwrite deletes it: give one of them")
        folder = cls(run.runs_dir / run.name)
        with explained(folder.path):
            is_taken = folder._is_taken()
            if is_taken and not folder._is_run():
                raise RunFolderError(f"{folder.path} exists and is not a run of reroll (choose another run.name)")
            if resume and not is_taken:
                raise RunFolderError(f"{folder.path} holds no run to resume (check run.name, or start without --resume)")
            if is_taken and not resume and not overwrite and folder._has_progress():
                raise RunFolderError(
                    f"{folder.path} already holds a run "
                    "(add --resume to go on, --overwrite to start anew, or choose another run.name)"
                )
        return folder.path

    def go_on(self) -> None:
        """From now on the files are a resumed run's: what came after the last checkpoint is forgotten, so that the curve
        stays that of one run. The earlier config, if it was another, stays beside the new one.
        """
        if self.has_begun:
            return
        with explained(self.path):
            self.checkpoints_path.mkdir(exist_ok=True)
            latest = self.newest()
            last_step = latest.step if latest else -1  # Without one the run starts anew: step 0 is evaluated again.
            if self.metrics_path.exists():
                kept = [row for row in read_jsonl(self.metrics_path) if row["step"] <= last_step]
                write_atomically(self.metrics_path, "".join(to_line(row) for row in kept))
            self._write_config()
            self.result_path.unlink(missing_ok=True)
        self.has_begun = True

    def earlier_config(self) -> dict[str, Any]:
        """The whole config of the run that is to be resumed, as plain data. Raises RunFolderError if it is damaged."""
        try:
            config = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RunFolderError(f"cannot read {self.config_path}: {error} (put a copy of the config there)") from error
        return config if isinstance(config, dict) else {}

    def write_result(self, result: Mapping[str, Any]) -> None:
        """What the run came to: finished, interrupted or failed. A run that was killed leaves none."""
        write_json(self.result_path, result)

    def check_owned(self) -> None:
        """Raise RunFolderError if another run has taken this folder."""
        if self._lock is not None:
            self._lock.check()

    @contextmanager
    def checkpoint(self, step: int, *, keep: int | None, sums: Mapping[str, FileSum] | None = None) -> Iterator[Path]:
        """A folder to write a checkpoint into. It gets its name only when the block succeeds and all of it is on disk.

        Before that its manifest is written (`sums`: what the writers know of their files when the block ends), and the rows of
        the steps that it holds are on disk too. Then all but the `keep` newest checkpoints are deleted; None keeps all. If the
        block fails, the earlier checkpoints stand.
        """
        final = self.checkpoints_path / f"{STEP_PREFIX}{step:06d}"
        unfinished = self.checkpoints_path / f"{UNFINISHED_PREFIX}{step:06d}"
        with explained(final):
            self.check_owned()
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            try:
                yield unfinished
                write_manifest(unfinished, sums or {})
                sync_tree(unfinished)
                self._sync_rows()
                self.check_owned()
                self._put_in_place(unfinished, final)
            except BaseException as error:
                is_full = isinstance(error, Exception) and is_disk_full(error, self.checkpoints_path)
                shutil.rmtree(unfinished, ignore_errors=True)
                if is_full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise
            if keep is not None:
                for old in self.all_checkpoints()[:-keep]:
                    self._delete(old.path)
        if pack := load_entry("reroll.journals", "pack"):
            pack(self.journal_path)

    def all_checkpoints(self) -> list[Checkpoint]:
        """The complete ones, oldest first."""
        paths = self.checkpoints_path.glob(f"{STEP_PREFIX}*")
        found = [(re.fullmatch(rf"{STEP_PREFIX}(\d+)", path.name), path) for path in paths]
        return sorted(Checkpoint(int(match[1]), path) for match, path in found if match)

    def latest_checkpoint(self) -> Checkpoint | None:
        checkpoints = self.all_checkpoints()
        return checkpoints[-1] if checkpoints else None

    def newest(self) -> Checkpoint | None:
        """What the run goes on from: its latest checkpoint, or the replica if that is of a later step."""
        latest = self.latest_checkpoint()
        return self.replica if self.replica and (latest is None or latest.step < self.replica.step) else latest

    def set_damaged_aside(self, *, sums: bool = True) -> list[str]:
        """Look at the newest checkpoint as it is on disk, and if it is not what was written, rename it and look at the next.

        Returns what was found, one sentence each. Raises RunFolderError if there are checkpoints and none is whole: then all
        keep their names.
        """
        damaged: dict[Path, str] = {}
        for checkpoint in reversed(self.all_checkpoints()):
            try:
                damage = find_damage(checkpoint.path, sums=sums)
            except OSError as error:
                raise RunFolderError(
                    f"cannot read {error.filename}: {error.strerror} (check the disk, then try again)"
                ) from error
            if not damage:
                break
            damaged[checkpoint.path] = f"{checkpoint.path} is damaged: {'; '.join(damage)}"
        else:
            if damaged:
                raise RunFolderError(
                    "\n".join(damaged.values())
                    + "\nno checkpoint of this run is whole (start anew with --overwrite; or delete "
                    "the manifest.json of one to go on from it as it is)"
                )
        with explained(self.checkpoints_path):
            for path in damaged:
                path.rename(_unused(path.with_name(DAMAGED_PREFIX + path.name)))
        return list(damaged.values())

    def _sync_rows(self) -> None:
        """What a checkpoint's steps wrote must not be lost to a power cut that the checkpoint survives."""
        if self.metrics_path.exists():
            sync(self.metrics_path)
        sync_journal(self.journal_path)

    def _put_in_place(self, unfinished: Path, final: Path) -> None:
        replaced = final.with_name(REPLACED_PREFIX + final.name)
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        sync(self.checkpoints_path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _delete(self, path: Path) -> None:
        """Nothing that is half deleted has the name of something whole, whenever the process is killed."""
        doomed = _unused(path.with_name(DELETED_PREFIX + path.name))
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _sweep(self) -> None:
        """Finish what a killed process left half done."""
        for replaced in self.checkpoints_path.glob(f"{REPLACED_PREFIX}*"):
            final = replaced.with_name(replaced.name.removeprefix(REPLACED_PREFIX))
            if not final.exists():
                replaced.rename(final)
        for prefix in (UNFINISHED_PREFIX, DELETED_PREFIX, REPLACED_PREFIX):
            for leftover in [*self.path.glob(f"{prefix}*"), *self.checkpoints_path.glob(f"{prefix}*")]:
                shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink()

    def _clear(self) -> None:
        """Delete the run that is here. Its config goes last: until all is gone it stays known as a run."""
        if not self.path.exists():
            return
        self._sweep()
        for path in sorted(self._contents(), key=lambda path: path == self.config_path):
            self._doomed_path.mkdir(exist_ok=True)
            path.rename(self._doomed_path / path.name)
        shutil.rmtree(self._doomed_path, ignore_errors=True)

    def _contents(self) -> list[Path]:
        """What lies here, apart from its lock."""
        return [path for path in self.path.iterdir() if not path.name.startswith(LOCK_FILE)]

    def _is_taken(self) -> bool:
        """Whether anything is here but what a run leaves that was killed as it started, or while it was deleted."""
        if not self.path.is_dir():
            return self.path.exists()
        leftovers = {self._doomed_path.name, f"{UNFINISHED_PREFIX}{self.config_path.name}"}
        found = [path for path in self._contents() if path.name not in leftovers]
        return any(path != self.checkpoints_path or not path.is_dir() or any(path.iterdir()) for path in found)

    def _is_run(self) -> bool:
        traces = (self.checkpoints_path, self.metrics_path, self._doomed_path)
        return self.config_path.is_file() and any(path.exists() for path in traces)

    def _has_progress(self) -> bool:
        """Whether anything would be lost with it: a run that failed before its first number may be started again."""
        return bool(self.all_checkpoints()) or (self.metrics_path.exists() and self.metrics_path.stat().st_size > 0)

    def _write_config(self) -> None:
        """Write the resolved config; a resumed run that changed it keeps the earlier one beside it. One is always there."""
        text = yaml.safe_dump(dict(self._resolved), sort_keys=False, allow_unicode=True)
        if self.config_path.exists() and (earlier := self.config_path.read_text(encoding="utf-8")) != text:
            latest = self.newest()
            kept = self.path / f"config.until-step-{latest.step if latest else 0:06d}.yaml"
            if not kept.exists():  # Else what is there now has not finished a step: the steps are the one's that is kept.
                write_atomically(kept, earlier)
        write_atomically(self.config_path, text)


def _unused(path: Path) -> Path:
    """This path, or one like it that nothing has."""
    number, free = 1, path
    while free.exists():
        number, free = number + 1, path.with_name(f"{path.name}.{number}")
    return free
