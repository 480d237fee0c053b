"""Everything a run leaves behind, in one folder. What is written here survives a crash, a full disk and a resume.

runs/NAME/config.yaml  metrics.jsonl  samples.jsonl  ledger.jsonl  curve.png  result.json  checkpoints/step-000123/
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from reroll.config.parts import RunConfig
from reroll.errors import RunFolderError
from reroll.observe.episode import Decode, episode_of
from reroll.types import Prompt, Trajectory

STEP_PREFIX = "step-"
UNFINISHED_PREFIX = ".unfinished-"


class Checkpoint(NamedTuple):
    """A complete checkpoint: how many steps were finished, and where it lies."""

    step: int
    path: Path


class RunFolder:
    """The files of one run. Rows and checkpoints carry the number of finished steps: the first step's row is step 1.

    Every failing write raises RunFolderError with the path and the fix.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        self.metrics_path = path / "metrics.jsonl"
        self.samples_path = path / "samples.jsonl"
        self.ledger_path = path / "ledger.jsonl"
        self.curve_path = path / "curve.png"
        self.result_path = path / "result.json"
        self.checkpoints_path = path / "checkpoints"

    @classmethod
    def create(cls, run: RunConfig, *, resolved: Mapping[str, Any], resume: bool = False, overwrite: bool = False) -> RunFolder:
        """Make the folder of a new run, or take up the one of an earlier run.

        `resolved` is the whole config as plain data. A run that got anywhere is an error, unless it is resumed (its rows
        after the last checkpoint are dropped) or may be overwritten (it is deleted). A folder that holds anything but a
        run is never touched.
        """
        if run.name in (".", ".."):
            raise RunFolderError(f"run.name is {run.name!r}, which is no folder of its own (choose another run.name)")
        folder = cls(run.runs_dir / run.name)
        with explained(folder.path):
            is_taken = folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir()))
            if is_taken and not folder._is_run():
                raise RunFolderError(f"{folder.path} exists and is not a run of reroll (choose another run.name)")
            if resume and not is_taken:
                raise RunFolderError(f"{folder.path} holds no run to resume (check run.name, or start without --resume)")
            if is_taken and not resume and not overwrite and folder._has_progress():
                raise RunFolderError(
                    f"{folder.path} already holds a run "
                    "(add --resume to go on, --overwrite to start anew, or choose another run.name)"
                )
            if is_taken and not resume:
                shutil.rmtree(folder.path)
            folder.checkpoints_path.mkdir(parents=True, exist_ok=True)
            if resume:
                folder._rewind()
            folder._write_config(yaml.safe_dump(dict(resolved), sort_keys=False, allow_unicode=True))
            folder.metrics_path.touch()
        return folder

    def write_result(self, result: Mapping[str, Any]) -> None:
        """What the run came to. Its presence says that the run finished."""
        write_json(self.result_path, result)

    def log_sample(self, step: int, prompt: Prompt, trajectory: Trajectory, *, decode: Decode) -> None:
        """Add one sample to samples.jsonl: its words as a person would read them, and its turns token by token."""
        episode = episode_of(step, prompt, trajectory, decode=decode)
        append_jsonl(self.samples_path, episode.model_dump())

    @contextmanager
    def checkpoint(self, step: int, *, keep: int) -> Iterator[Path]:
        """A folder to write a checkpoint into. It gets its name only when the block succeeds and all of it is on disk.

        Then all but the `keep` newest checkpoints are deleted. If the block fails, the earlier checkpoints stand.
        """
        final = self.checkpoints_path / f"{STEP_PREFIX}{step:06d}"
        unfinished = self.checkpoints_path / f"{UNFINISHED_PREFIX}{step:06d}"
        with explained(final):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            try:
                yield unfinished
                _sync_tree(unfinished)
                self._put_in_place(unfinished, final)
            except BaseException as error:
                is_disk_full = isinstance(error, Exception) and _is_disk_full(error, self.checkpoints_path)
                shutil.rmtree(unfinished, ignore_errors=True)
                if is_disk_full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise
            for old in self.all_checkpoints()[:-keep]:
                shutil.rmtree(old.path)

    def all_checkpoints(self) -> list[Checkpoint]:
        """The complete ones, oldest first."""
        names = self.checkpoints_path.glob(f"{STEP_PREFIX}*")
        return sorted(Checkpoint(int(path.name.removeprefix(STEP_PREFIX)), path) for path in names)

    def latest_checkpoint(self) -> Checkpoint | None:
        checkpoints = self.all_checkpoints()
        return checkpoints[-1] if checkpoints else None

    def _put_in_place(self, unfinished: Path, final: Path) -> None:
        replaced = unfinished.with_name(f"{unfinished.name}-replaced")
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        _sync(self.checkpoints_path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _is_run(self) -> bool:
        return self.config_path.is_file() and self.checkpoints_path.is_dir()

    def _has_progress(self) -> bool:
        """Whether anything would be lost with it: a run that failed before its first number may be started again."""
        return bool(self.all_checkpoints()) or (self.metrics_path.exists() and self.metrics_path.stat().st_size > 0)

    def _rewind(self) -> None:
        """Forget what came after the last checkpoint, so that the curve stays that of one run."""
        latest = self.latest_checkpoint()
        last_step = latest.step if latest else -1  # Without one the run starts anew: step 0 is evaluated again.
        for path in (self.metrics_path, self.samples_path):
            if path.exists():
                kept = [row for row in read_jsonl(path) if row["step"] <= last_step]
                write_atomically(path, "".join(_to_line(row) for row in kept))
        self.result_path.unlink(missing_ok=True)
        for leftover in self.checkpoints_path.glob(f"{UNFINISHED_PREFIX}*"):
            shutil.rmtree(leftover)

    def _write_config(self, text: str) -> None:
        """Write the resolved config; a resumed run that changed it keeps the earlier one beside it."""
        if self.config_path.exists() and self.config_path.read_text(encoding="utf-8") != text:
            latest = self.latest_checkpoint()
            self.config_path.rename(self.path / f"config.until-step-{latest.step if latest else 0:06d}.yaml")
        write_atomically(self.config_path, text)


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Add one line of JSON. Numbers that JSON cannot say (nan, inf) become null."""
    with explained(path), path.open("a", encoding="utf-8") as file:
        file.write(_to_line(row))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a last line that a crash tore off is left out. Raises RunFolderError on other damage."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:  # broken JSON or broken UTF-8
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise RunFolderError(f"{path} line {number} is damaged: {error} (delete that line)") from error
    return rows


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """All of it or nothing: readers never see half a file."""
    write_atomically(path, json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, after its new text has reached the disk."""
    unfinished = path.with_name(f"{UNFINISHED_PREFIX}{path.name}")
    with explained(path):
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a RunFolderError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a timeout, say: not the file system's
            raise
        raise RunFolderError(f"cannot write {path}: {error.strerror or error} ({_fix_for(error)})") from error


def _fix_for(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, then --resume; or set run.runs_dir to another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "set run.runs_dir to a folder you may write to"
    return "check the disk, or set run.runs_dir to another folder"


def _is_disk_full(error: Exception, folder: Path) -> bool:
    """Writers in native code (torch, safetensors) hide the error number: ask the message, then the disk."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOSPC
    return "No space left" in str(error) or shutil.disk_usage(folder).free < 64 * 1024


def sync_files(folder: Path) -> None:
    """Wait until the files of this folder, those inside its folders left out, are on disk.

    For whoever wrote them: another machine cannot do it in its place.
    """
    for path in folder.iterdir():
        if path.is_file():
            _sync(path)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_line(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
