"""What the page asks of a run, read from its folder as it grows. Every answer is plain JSON, and bounded."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reroll.errors import RunFolderError
from reroll.observe.journal import read_stored
from reroll.observe.run_folder import RunFolder
from reroll_zoo.folder_lock import living_holder
from reroll_zoo.page.differences import between, from_defaults
from reroll_zoo.page.journal_follower import JournalFollower
from reroll_zoo.page.rows import RowFollower
from reroll_zoo.samples.decoder import RunDecoder
from reroll_zoo.samples.lifecycles import Lifecycle, Lifecycles, Phase
from reroll_zoo.samples.pictures import RasterPicture, read_picture
from reroll_zoo.samples.run_samples import read_sample

Json = dict[str, Any]

MAX_LIVES_SENT = 10_000
MAX_MARKS_SENT = 10_000
MAX_ROWS_SENT = 1_000
MAX_SAMPLES_SENT = 200
MAX_RUNS = 200
"""Other runs that are offered for comparison, the newest."""
_MAX_FOLLOWED_RUNS = 16
_MAX_EVENT_BYTES = 1 << 28
"""Of the journal's events, the newest: about half a million samples."""
_BYTES_AT_ONCE = 1 << 22
_MAX_SEARCHED = 3_000
"""Samples whose words are searched, the newest that fit the other wishes."""
_MAX_WORDS = 4_000
"""Characters of a sample that are kept for the search."""


class Unknown(Exception):
    """What is asked for is not there."""


class RunData:
    """One run's folder. May be asked from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self._lock = threading.RLock()
        self._decoder = RunDecoder(self.folder)
        self._words: OrderedDict[int, str] = OrderedDict()
        """What samples wrote, by their serial number, as far as it was searched."""
        self._metrics: OrderedDict[str, RowFollower] = OrderedDict()
        self._read_config: tuple[tuple[int, int, int], Json] | None = None
        """Which file it was, and what it said."""
        self._start()

    def _start(self) -> None:
        self.boot = secrets.token_hex(4)
        """Another one means that what was told before is void."""
        self._journal = JournalFollower(self.folder.journal_path, max_bytes=_MAX_EVENT_BYTES)
        self._lives = Lifecycles()
        self._words.clear()

    def refresh(self) -> None:
        """Read what the run has written since the last time; of much, a part that takes no longer than a second."""
        if self._journal.was_replaced:
            self._start()
        self._lives.take(self._journal.new_events(_BYTES_AT_ONCE))

    def _catch_up(self) -> None:
        """Read all that there is."""
        self.refresh()
        while self._journal.is_behind:
            self.refresh()

    def run(self) -> Json:
        """What the run is, how far it came, and whether it goes on."""
        with self._lock:
            self.refresh()
            metrics = self._rows_of("").rows
        config, result = self._config(), _read_result(self.folder.result_path)
        is_running = living_holder(self.folder.path) is not None
        status = "running" if is_running else str(result.get("status", "finished" if result else "ended without a word"))
        rollout, run = config.get("rollout") or {}, config.get("run") or {}
        return {
            "boot": self.boot,
            "name": self.folder.path.resolve().name,
            "status": status,
            "reason": f"{result.get('error')}: {result.get('reason')}" if status == "failed" else "",
            "step": metrics[-1].get("step", 0) if metrics else 0,
            "steps": run.get("steps"),
            "pipeline": config.get("pipeline"),
            "algorithm": config.get("algorithm"),
            "model": (config.get("policy") or {}).get("model"),
            "rollout": {name: rollout.get(name) for name in ("prompts_per_step", "group_size", "max_staleness", "max_tokens")},
            "checkpoints": self._checkpoints(),
            "runs": self._other_runs(),
            "now_s": time.time(),
            "first_s": self._lives.first_s,
            "last_s": self._lives.last_s,
            "has_journal": self._lives.revision > 0,
            "has_envs": bool(config.get("envs")),
        }

    def events(self, *, since: int, marks: int, activity: int = 0) -> Json:
        """The samples that changed after revision `since`, the marks after that many, what roles did from that number on."""
        with self._lock:
            self.refresh()
            lives = self._lives.changed_since(since, limit=MAX_LIVES_SENT)
            new_marks = self._lives.marks[marks : marks + MAX_MARKS_SENT]
            next_activity, rows = self._lives.activity.since(activity, limit=MAX_MARKS_SENT)
            first_s = self._lives.first_s or 0.0
            revision = lives[-1].revision if lives else self._lives.revision
            return {
                "boot": self.boot,
                "first_s": first_s,
                "last_s": self._lives.last_s or first_s,
                "revision": revision,
                "more": self._journal.is_behind
                or revision < self._lives.revision
                or marks + len(new_marks) < len(self._lives.marks)
                or next_activity < len(self._lives.activity),
                "lives": [_life_row(life, first_s) for life in lives],
                "marks": [[_after(mark.time_s, first_s), mark.kind, mark.version, mark.engine] for mark in new_marks],
                "activity": {
                    "next": next_activity,
                    "rows": [[_after(time_s, first_s), *told] for time_s, *told in rows],
                },
            }

    def metrics(self, *, run: str, since: int, generation: int) -> Json:
        """Rows of metrics.jsonl from number `since` on; from the first if the file is another than that of `generation`."""
        with self._lock:
            follower = self._rows_of(run)
            start = since if generation == follower.generation else 0
            rows = follower.rows[start : start + MAX_ROWS_SENT]
            more = start + len(rows) < len(follower.rows)
            return {"generation": follower.generation, "start": start, "rows": rows, "more": more}

    def samples(
        self,
        *,
        sort: str = "newest",
        domain: str = "",
        phase: str = "",
        step: int | None = None,
        search: str = "",
        offset: int = 0,
        limit: int = 50,
    ) -> Json:
        """A part of the table of samples that have ended."""
        with self._lock:
            self._catch_up()
            rows = [_sample_row(life) for life in self._lives.newest_first() if life.phase >= Phase.DONE]
            domains = sorted({row["domain"] for row in rows})
            phases = sorted({row["phase"] for row in rows})
            rows = [row for row in rows if domain in ("", row["domain"]) and _is_in(row, phase) and step in (None, row["step"])]
            if search:
                rows = self._found(rows, search.casefold())
        if sort in _ORDERS:
            name, sign = _ORDERS[sort]
            rows = [row for row in rows if row[name] is not None]
            rows.sort(key=lambda row: sign * row[name])
        limit = min(limit, MAX_SAMPLES_SENT)
        shown = [{key: value for key, value in row.items() if key != "serial"} for row in rows[offset : offset + limit]]
        self._decoder.warm_up()
        return {"total": len(rows), "offset": offset, "rows": shown, "domains": domains, "phases": phases}

    def sample(self, id: str) -> Json:
        """One sample turn by turn, token by token, and its siblings. Raises Unknown."""
        with self._lock:
            self._catch_up()
            life = self._lives.find(id)
            siblings = [_sample_row(sibling) for sibling in self._lives.group(life.group)] if life else []
        episode = None if life is None else read_sample(life, self._decoder)
        if episode is None:
            raise Unknown(f"there is nothing to read of sample {id}: it has not ended, or its tokens were deleted")
        rewards = [row["reward"] for row in siblings if row["reward"] is not None]
        return {
            "episode": episode.model_dump(mode="json"),
            "life": _sample_row(life) if life else None,
            "advantage": life.advantage if life else None,
            "siblings": siblings,
            "group_mean": sum(rewards) / len(rewards) if rewards else None,
            "note": self._decoder.problem,
        }

    def picture(self, name: str) -> RasterPicture:
        """A picture that samples were shown. Raises Unknown, also where it is nothing that a browser should be given."""
        found = read_picture(self.folder.path, name)
        if found is None:
            raise Unknown(f"there is no picture {name} that could be shown")
        return found

    def config(self, *, against: str) -> Json:
        """What differs from the defaults, or from another run."""
        here = self._config()
        if not against:
            return {"against": "", "rows": from_defaults(here)}
        there = RunFolder(self._run_named(against)).earlier_config()
        return {"against": against, "rows": between(here, there)}

    def _config(self) -> Json:
        """Read again only when the file is another: YAML takes longer than all else that is asked every second."""
        try:
            about = self.folder.config_path.stat()
            which = about.st_ino, about.st_size, about.st_mtime_ns
            if self._read_config is None or self._read_config[0] != which:
                self._read_config = which, self.folder.earlier_config()
        except (OSError, RunFolderError):
            return {}  # Just being written, or lost.
        return self._read_config[1]

    def _checkpoints(self) -> list[Json]:
        found = []
        for checkpoint in self.folder.all_checkpoints():
            try:
                found.append({"step": checkpoint.step, "time_s": checkpoint.path.stat().st_mtime})
            except FileNotFoundError:
                continue  # Deleted meanwhile.
        return found

    def _other_runs(self) -> list[str]:
        """The runs beside this one, the newest first."""
        here = self.folder.path.resolve()
        found = []
        for metrics in here.parent.glob("*/metrics.jsonl"):
            try:
                found.append((metrics.stat().st_mtime, metrics.parent.name))
            except FileNotFoundError:
                continue
        return [name for _, name in sorted(found, reverse=True) if name != here.name][:MAX_RUNS]

    def _run_named(self, name: str) -> Path:
        """The folder of a run beside this one: a name of the list, never a path."""
        if name not in self._other_runs():
            raise Unknown(f"there is no run {name!r} beside this one")
        return self.folder.path.resolve().parent / name

    def _rows_of(self, run: str) -> RowFollower:
        """A run's metrics so far; those of this one under the empty name."""
        if run not in self._metrics:
            folder = self.folder if not run else RunFolder(self._run_named(run))
            self._metrics[run] = RowFollower(folder.metrics_path)
            while len(self._metrics) > _MAX_FOLLOWED_RUNS:
                self._metrics.popitem(last=False)
        self._metrics.move_to_end(run)
        self._metrics[run].refresh()
        return self._metrics[run]

    def _found(self, rows: Sequence[Json], words: str) -> list[Json]:
        """Those that have these words in what they are called, or in what was written."""
        by_name = [row for row in rows if any(words in str(row[key]).casefold() for key in ("id", "prompt", "reason"))]
        seen = {id(row) for row in by_name}
        for row in rows[:_MAX_SEARCHED]:
            if id(row) not in seen and words in self._words_of(row).casefold():
                by_name.append(row)
        return by_name

    def _words_of(self, row: Json) -> str:
        life = self._lives.find(row["id"])
        if life is None or life.done is None:
            return ""
        if life.serial not in self._words:
            trajectory = read_stored(life.done, text_of=self._decoder.text)
            shown = [message["content"] for turn in trajectory.turns for message in turn.shown] if trajectory else []
            texts = [*shown, trajectory.text] if trajectory else []
            self._words[life.serial] = "\n".join(texts)[:_MAX_WORDS]
            if len(self._words) > 2 * _MAX_SEARCHED:
                self._words.popitem(last=False)
        return self._words[life.serial]


_ORDERS = {
    "best": ("reward", -1),
    "worst": ("reward", 1),
    "longest": ("tokens", -1),
    "shortest": ("tokens", 1),
    "oldest": ("time_s", 1),
}


def _life_row(life: Lifecycle, first_s: float) -> list[Any]:
    """A sample for the swim-lanes. Hundreds of thousands are sent: no names."""
    course: list[Any] = []
    for phase, time_s in zip(life.phases, life.times_s, strict=True):
        course += [int(phase), _after(time_s, first_s)]
    return [life.serial, life.id, life.domain, life.version, life.trained_version, life.reward, life.tokens, course]


def _after(time_s: float, first_s: float) -> float:
    return round(time_s - first_s, 3)


def _sample_row(life: Lifecycle) -> Json:
    return {
        "serial": life.serial,
        "id": life.id,
        "prompt": life.prompt,
        "domain": life.domain,
        "phase": life.phase.name.lower(),
        "status": life.status,
        "reason": life.reason,
        "reward": life.reward,
        "tokens": life.tokens,
        "version": life.version,
        "step": life.trained_version,
        "time_s": life.times_s[-1],
        "is_readable": life.stored is not None,
    }


def _is_in(row: Json, phase: str) -> bool:
    """Whether a sample is in this state; `scored` are all whose tokens are kept."""
    return row["is_readable"] if phase == "scored" else phase in ("", row["phase"], row["status"])


def _read_result(path: Path) -> Json:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}
