"""What the journal costs the controller: its share of a core at 85,000 tokens/s, and bytes a token; beside SQLite in WAL mode.

All events of a sample's life and its tokens are written, one after the other, and handed to the system as a run does;
"in-flight" is what it takes beside that to keep the tokens of samples that have not ended. Time is
that of the writing thread on its core, so a busy machine changes little.
Run: python benchmarks/journal.py
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from report import arguments, report

from reroll.observe.journal import Journal, SampleState, read_journal, read_stored
from reroll.observe.trajectory_bytes import encode, encode_ids
from reroll.types import Completion, FinishReason, Message, Request, SamplingParams, Status, Trajectory, Turn

TOKENS_PER_S = 85_000
"""What the embedded engine writes on one H200 (Qwen3-0.6B)."""
REPORT_EVERY = 64
"""`engine.report_every`"""
NUM_TOKENS, GROUP_SIZE, NUM_GROUPS, NUM_ROUNDS = 256, 8, 64, 5
STATES = (SampleState.QUEUED, SampleState.GENERATING, SampleState.SCORING)

Write = Callable[[Path, list[Trajectory]], None]


def make_samples() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    samples = []
    for group in range(NUM_GROUPS):
        prompt = tuple(rng.integers(0, 150_000, 128).tolist())
        for index in range(GROUP_SIZE):
            ids = tuple(rng.integers(0, 150_000, NUM_TOKENS).tolist())
            logprobs = tuple(rng.normal(size=NUM_TOKENS).astype(np.float32).astype(float).tolist())
            completion = Completion(
                token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP, versions=((3, NUM_TOKENS),)
            )
            turn = Turn(
                prompt_ids=prompt,
                completion=completion,
                text="",
                shown=(Message(role="user", content="What is 7 + 8?"),),
            )
            samples.append(Trajectory(id=f"{group}.{index}", turns=(turn,), status=Status.COMPLETED, reward=1.0))
    return samples


def write_journal(folder: Path, samples: list[Trajectory]) -> None:
    """What ended samples wrote, and all events of their lives."""
    groups = [samples[start : start + GROUP_SIZE] for start in range(0, len(samples), GROUP_SIZE)]
    with Journal(folder) as journal:
        for group in groups:
            journal.record_all([sample.id for sample in group], SampleState.QUEUED, prompt="gsm8k/1234", version=3)
            for sample in group:
                journal.record(sample.id, SampleState.GENERATING)
                journal.record(sample.id, SampleState.SCORING, tokens=NUM_TOKENS)
                journal.ended(sample.id, sample)
            journal.flush()  # Samples that end in one turn of the event loop are flushed together.
        for group in groups:
            journal.record_all([sample.id for sample in group], SampleState.TRAINED, version=4)
        journal.stepped(version=4)


def in_flight_writer(samples: list[Trajectory]) -> Write:
    """Writes what all samples write as engines tell of it: in turn, a block of the next tokens of each."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    requests = [Request(id=f"{one.id}.0", prompt_ids=one.turns[0].prompt_ids, sampling=sampling) for one in samples]
    ids = np.array([sample.turns[0].completion.token_ids for sample in samples], dtype=np.uint32)
    logprobs = np.array([sample.turns[0].completion.logprobs for sample in samples])

    def write(folder: Path, samples: list[Trajectory]) -> None:
        with Journal(folder) as journal:
            kept = journal.partial
            turns = [kept.turn(request)[0] for request in requests]
            for start in range(0, NUM_TOKENS - REPORT_EVERY, REPORT_EVERY):
                end = start + REPORT_EVERY
                for row, (request, turn) in enumerate(zip(requests, turns, strict=True)):
                    kept.add(request.id, turn, ids[row, start:end], logprobs[row, start:end], 3)
                journal.flush()
            for request, turn, sample in zip(requests, turns, samples, strict=True):
                kept.end(request.id, turn, sample.turns[0].completion)
                kept.forget(sample.id)
            journal.flush()

    return write


def write_sqlite(folder: Path, samples: list[Trajectory]) -> None:
    folder.mkdir()
    database = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
    database.execute("pragma journal_mode=wal")
    database.execute("pragma synchronous=off")  # A process that is killed loses nothing by it; nor does a file it has flushed.
    database.execute("create table event (time_s real, sample text, state text, prompt text, version int, tokens blob)")
    insert = "insert into event values (?, ?, ?, ?, ?, ?)"
    for sample in samples:
        if sample.id.endswith(".0"):
            database.execute("begin")
        for state in STATES:
            database.execute(insert, (time.time(), sample.id, state.value, "gsm8k/1234", 3, None))
        ids = encode_ids(sample.turns[0].prompt_ids) if sample.id.endswith(".0") else b""
        database.execute(insert, (time.time(), sample.id, "done", None, None, encode(sample) + ids))
        if sample.id.endswith(f".{GROUP_SIZE - 1}"):
            database.execute("commit")
    database.execute("begin")
    for sample in samples:
        database.execute(insert, (time.time(), sample.id, "trained", None, 4, None))
    database.execute("commit")
    database.close()


def measure(name: str, write: Write, samples: list[Trajectory], folder: Path) -> dict[str, Any]:
    best_s = float("inf")
    for number in range(NUM_ROUNDS):
        started_s = time.thread_time()
        write(folder / f"{name}-{number}", samples)
        best_s = min(best_s, time.thread_time() - started_s)
    size = sum(path.stat().st_size for path in (folder / f"{name}-0").iterdir())
    return {
        "written to": name,
        "us_per_sample": round(1e6 * best_s / len(samples), 1),
        "percent_of_a_core_at_85k_tokens_per_s": round(100 * best_s * TOKENS_PER_S / (len(samples) * NUM_TOKENS), 2),
        "bytes_per_token": round(size / (len(samples) * NUM_TOKENS), 2),
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
    samples = make_samples()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            measure("files", write_journal, samples, folder),
            measure("in-flight", in_flight_writer(samples), samples, folder),
            measure("sqlite", write_sqlite, samples, folder),
        ]
        tokens = (folder / "files-0" / "000000.tokens").stat().st_size / (len(samples) * NUM_TOKENS)
        read_us = measure_reading(folder / "files-0", len(samples))
    report(
        "journal",
        rows,
        title=f"The journal, {len(samples)} samples of {NUM_TOKENS} tokens, best of {NUM_ROUNDS}",
        note=f"files: {tokens:.2f} bytes a token without the events; {read_us:.0f} us to read a sample back",
        facts={"token_bytes_per_token": round(tokens, 2), "read_us_per_sample": round(read_us, 1)},
        save=given.save,
    )


if __name__ == "__main__":
    main()
