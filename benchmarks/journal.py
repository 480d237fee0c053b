"""What the journal costs the controller: its share of a core at 85,000 tokens/s, and bytes a token; beside SQLite in WAL mode.

"files" and "sqlite" write all events of the samples' lives and what they wrote, once they have ended. "all" is what a run does:
it also keeps the tokens of samples that have not ended, as engines tell of them. Everything is handed to the system as often as
a run does it. Time is that of the writing thread on its core; one that shares it with others has a slower core.
Run: python benchmarks/journal.py
"""

from __future__ import annotations

import gc
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from report import arguments, report

from reroll.observe.journal import Journal, SampleState, read_journal, read_stored
from reroll.observe.partial_samples import PartialTurn
from reroll.observe.trajectory_bytes import encode, encode_ids
from reroll.runtime.cpu import gc_frozen, keep_freed_memory
from reroll.types import Completion, FinishReason, Message, Request, SamplingParams, Status, Trajectory, Turn

TOKENS_PER_S = 85_000
"""What the embedded engine writes on one H200 (Qwen3-0.6B)."""
REPORT_EVERY = 64
"""`engine.report_every`"""
GROUP_SIZE, NUM_GROUPS, NUM_ROUNDS = 8, 64, 5
SHORT, LONG = 256, 1024
"""Tokens of a sample."""
NUM_WAVES = 4
"""Of samples, one after the other: the file of tokens in flight is written anew before the first, as it is once in minutes."""
SIBLINGS = list(range(GROUP_SIZE))
INSERT = "insert into event values (?, ?, ?, ?, ?, ?)"
STATES = (SampleState.QUEUED, SampleState.GENERATING, SampleState.SCORING)

Write = Callable[[Path, list[Trajectory]], None]


def make_samples(num_tokens: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    samples = []
    for group in range(NUM_GROUPS):
        prompt = tuple(rng.integers(0, 150_000, 128).tolist())
        for index in range(GROUP_SIZE):
            ids = tuple(rng.integers(0, 150_000, num_tokens).tolist())
            logprobs = tuple(rng.normal(size=num_tokens).astype(np.float32).astype(float).tolist())
            completion = Completion(
                token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP, versions=((3, num_tokens),)
            )
            shown = (Message(role="user", content="What is 7 + 8?"),)
            turn = Turn(prompt_ids=prompt, completion=completion, text="", shown=shown)
            samples.append(Trajectory(id=f"{group}.{index}", turns=(turn,), status=Status.COMPLETED, reward=1.0))
    return samples


def groups_of(samples: list[Trajectory]) -> list[list[Trajectory]]:
    return [samples[start : start + GROUP_SIZE] for start in range(0, len(samples), GROUP_SIZE)]


def record_begun(journal: Journal, samples: list[Trajectory]) -> None:
    about = {"prompt": "gsm8k/1234", "domain": "gsm8k", "version": 3, "answer": "15"}
    for number, group in enumerate(groups_of(samples)):
        journal.record_group(number, SIBLINGS, SampleState.QUEUED, **about)
        for sample in group:
            journal.record(sample.id, SampleState.GENERATING)


def record_ended(journal: Journal, samples: list[Trajectory]) -> None:
    groups = groups_of(samples)
    for group in groups:
        for sample in group:
            journal.record(sample.id, SampleState.SCORING, tokens=sample.num_completion_tokens)
            journal.ended(sample.id, sample)
        journal.flush()  # Samples that end in one turn of the event loop are flushed together.
    for number in range(len(groups)):
        journal.record_group(number, SIBLINGS, SampleState.TRAINED, version=4)
    journal.stepped(version=4)


def write_journal(folder: Path, samples: list[Trajectory]) -> None:
    """What ended samples wrote, and all events of their lives."""
    with Journal(folder) as journal:
        for _ in range(NUM_WAVES):
            record_begun(journal, samples)
            record_ended(journal, samples)


class WriteAll:
    """The same, and what they wrote as engines tell of it: in turn, a block of the next tokens of each."""

    def __init__(self, samples: list[Trajectory]) -> None:
        completions = [sample.turns[0].completion for sample in samples]
        sampling = SamplingParams(max_tokens=len(completions[0].token_ids))
        self._requests = [
            Request(id=f"{sample.id}.0", prompt_ids=sample.turns[0].prompt_ids, sampling=sampling) for sample in samples
        ]
        self._ids = np.array([completion.token_ids for completion in completions], dtype=np.uint32)
        self._logprobs = np.array([completion.logprobs for completion in completions])

    def __call__(self, folder: Path, samples: list[Trajectory]) -> None:
        with Journal(folder) as journal:
            for _ in range(NUM_WAVES):
                record_begun(journal, samples)
                for turn, sample in zip(self._write_tokens(journal), samples, strict=True):
                    journal.partial.end(turn, sample.turns[0].completion)
                record_ended(journal, samples)

    def _write_tokens(self, journal: Journal) -> list[PartialTurn]:
        kept = journal.partial
        turns = [kept.turn(request)[0] for request in self._requests]
        for start in range(0, self._ids.shape[1] - REPORT_EVERY, REPORT_EVERY):
            block = slice(start, start + REPORT_EVERY)
            for row, (request, turn) in enumerate(zip(self._requests, turns, strict=True)):
                kept.add(request.id, turn, self._ids[row, block], self._logprobs[row, block], 3)
            journal.flush()
        return turns


def write_sqlite(folder: Path, samples: list[Trajectory]) -> None:
    """As `write_journal`."""
    folder.mkdir()
    database = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
    database.execute("pragma journal_mode=wal")
    database.execute("pragma synchronous=off")  # A process that is killed loses nothing by it; nor does a file it has flushed.
    database.execute("create table event (time_s real, sample text, state text, prompt text, version int, tokens blob)")
    for _ in range(NUM_WAVES):
        for group in groups_of(samples):
            _write_group(database, group)
        database.execute("begin")
        for sample in samples:
            database.execute(INSERT, (time.time(), sample.id, "trained", None, 4, None))
        database.execute("commit")
    database.close()


def _write_group(database: sqlite3.Connection, group: list[Trajectory]) -> None:
    database.execute("begin")
    ids = encode_ids(group[0].turns[0].prompt_ids)
    for sample in group:
        for state in STATES:
            database.execute(INSERT, (time.time(), sample.id, state.value, "gsm8k/1234", 3, None))
        database.execute(INSERT, (time.time(), sample.id, "done", None, None, encode(sample) + ids))
        ids = b""
    database.execute("commit")


def measure(name: str, write: Write, samples: list[Trajectory], folder: Path) -> dict[str, Any]:
    best_s, num_tokens = float("inf"), samples[0].num_completion_tokens
    gc.collect()
    with gc_frozen():  # As in a run.
        for number in range(NUM_ROUNDS):
            started_s = time.thread_time()
            write(folder / f"{name}-{num_tokens}-{number}", samples)
            best_s = min(best_s, time.thread_time() - started_s)
    num_samples = NUM_WAVES * len(samples)
    size = sum(path.stat().st_size for path in (folder / f"{name}-{num_tokens}-0").iterdir())
    return {
        "written": name,
        "tokens_per_sample": num_tokens,
        "us_per_sample": round(1e6 * best_s / num_samples, 1),
        "percent_of_a_core_at_85k_tokens_per_s": round(100 * best_s * TOKENS_PER_S / (num_samples * num_tokens), 2),
        "bytes_per_token": round(size / (num_samples * num_tokens), 2),
    }


def measure_reading(folder: Path, num_samples: int) -> float:
    """Microseconds to read one sample back."""
    started_s = time.thread_time()
    events = [event for event in read_journal(folder) if event.state is SampleState.DONE]
    found = [read_stored(event, text_of=lambda ids: "") for event in events]
    assert len(found) == num_samples
    assert None not in found
    return 1e6 * (time.thread_time() - started_s) / num_samples


def main() -> None:
    given = arguments(__doc__).parse_args()
    keep_freed_memory()  # As a controller does.
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for num_tokens in (SHORT, LONG):
            samples = make_samples(num_tokens)
            rows += [
                measure("all", WriteAll(samples), samples, folder),
                measure("files", write_journal, samples, folder),
                measure("sqlite", write_sqlite, samples, folder),
            ]
        num_samples = NUM_WAVES * NUM_GROUPS * GROUP_SIZE
        tokens = (folder / f"files-{SHORT}-0" / "000000.tokens").stat().st_size / (num_samples * SHORT)
        read_us = measure_reading(folder / f"files-{SHORT}-0", num_samples)
    report(
        "journal",
        rows,
        title=f"The journal, {num_samples} samples, best of {NUM_ROUNDS}",
        note=f"files, {SHORT} tokens: {tokens:.2f} bytes a token without the events; {read_us:.0f} us to read a sample back",
        facts={"token_bytes_per_token": round(tokens, 2), "read_us_per_sample": round(read_us, 1)},
        save=given.save,
    )


if __name__ == "__main__":
    main()
