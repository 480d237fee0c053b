"""A journal whose closed events are compressed says what it said to whoever reads it, and stands being killed at any moment."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from reroll.errors import RunFolderError
from reroll.observe import journal as journal_module
from reroll.observe.files import UNFINISHED_PREFIX
from reroll.observe.journal import Journal, SampleState, read_journal, read_stored, segments
from reroll.observe.run_folder import RunFolder
from reroll.types import Completion, FinishReason, Status, Trajectory, Turn
from reroll_zoo import packed_journal
from reroll_zoo.audit.audit import audit, describe
from reroll_zoo.packed_journal import NUM_PLAIN, pack, packed_form, unpacked_size
from reroll_zoo.page.journal_follower import JournalFollower
from reroll_zoo.replay.recorded_steps import recorded_steps

NUM_STEPS = 30


def write_steps(folder: Path, *, start: int = 0) -> None:
    """One group of two samples a step."""
    with Journal(folder) as journal:
        journal.resume(version=start, max_staleness=0)
        for step in range(start, start + NUM_STEPS):
            journal.record_group(step, (0, 1), SampleState.QUEUED, prompt=f"p/{step}", domain="d", version=step)
            for index in range(2):
                versions = ((step, 1),)
                completion = Completion(token_ids=(step,), logprobs=(-1.0,), finish_reason=FinishReason.STOP, versions=versions)
                turn = Turn(prompt_ids=(1,), completion=completion, text="")
                journal.ended(f"{step}.{index}", Trajectory(id="", turns=(turn,), status=Status.COMPLETED))
            journal.record_group(step, (0, 1), SampleState.TRAINED, version=step + 1)
            journal.stepped(version=step + 1)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good one, of several segments."""
    monkeypatch.setattr(journal_module, "_MAX_SEGMENT_BYTES", 2500)
    write_steps(tmp_path)
    assert len(segments(tmp_path)) > NUM_PLAIN + 2
    return tmp_path


def test_the_audit_says_from_where_on_it_proves_and_finds_what_is_wrong_there(journal: Path) -> None:
    """Also of a journal that was resumed once, whose oldest events are gone."""
    write_steps(journal, start=NUM_STEPS)
    whole = audit(journal, max_staleness=0)
    pack(journal)
    for segment in segments(journal)[:3]:
        packed_form(segment).unlink()
    found = audit(journal, max_staleness=0)
    assert (found.violations, found.num_steps, found.num_lives) == ([], 2 * NUM_STEPS, 2)
    assert 0 < found.num_cut_steps < NUM_STEPS
    assert 0 <= found.trained - (whole.trained - found.num_cut_steps) <= 1
    assert f"events up to step {found.num_cut_steps} are no longer kept" in dict(describe(found))["steps"]
    with pytest.raises(RunFolderError, match=rf"no longer holds all events up to step {found.num_cut_steps}"):
        next(recorded_steps(journal))
    steps = [step for step, _ in recorded_steps(journal, start=found.num_cut_steps)]
    assert steps == list(range(found.num_cut_steps + 1, 2 * NUM_STEPS + 1))
    gone = segments(journal)[4]
    packed_form(gone).unlink()
    assert any("follows step" in violation for violation in audit(journal, max_staleness=0).violations)


def forms(folder: Path) -> list[bool]:
    """Of each segment: whether it is packed, and only that."""
    return [packed_form(path).exists() and not path.exists() for path in segments(folder)]


def test_all_but_the_newest_segments_are_packed_and_say_what_they_said(journal: Path) -> None:
    before, sizes = list(read_journal(journal)), [path.stat().st_size for path in segments(journal)]
    found = audit(journal, max_staleness=0)
    pack(journal)
    assert forms(journal) == [True] * (len(sizes) - NUM_PLAIN) + [False] * NUM_PLAIN
    assert list(read_journal(journal)) == before
    assert audit(journal, max_staleness=0) == found
    assert (found.violations, found.trained, found.num_tokens) == ([], NUM_STEPS, 2 * NUM_STEPS)
    assert [unpacked_size(path) for path in segments(journal)] == sizes


def test_what_is_packed_keeps_its_tokens_and_a_resumed_run_goes_on_behind_it(journal: Path) -> None:
    pack(journal)
    write_steps(journal, start=NUM_STEPS)
    pack(journal)
    done = [event for event in read_journal(journal) if event.state is SampleState.DONE]
    assert [read_stored(event, text_of=str).turns[0].completion.token_ids for event in done] == [  # type: ignore[union-attr]
        (step,) for step in range(2 * NUM_STEPS) for _ in range(2)
    ]
    found = audit(journal, max_staleness=0)
    assert (found.violations, found.trained, found.num_lives) == ([], 2 * NUM_STEPS, 2)


def test_a_run_resumes_from_a_segment_that_is_packed(journal: Path) -> None:
    pack(journal)
    with Journal(journal) as again:
        recorded = again.resume(version=0, max_staleness=0)
    assert len(recorded) == 2 * NUM_STEPS


def test_a_fault_that_was_packed_is_found(journal: Path) -> None:
    first = segments(journal)[0]
    first.write_bytes(first.read_bytes().replace(b"p/1", b"p/9", 1))
    pack(journal)
    assert any("does not match its checksum" in violation for violation in audit(journal, max_staleness=0).violations)


@pytest.mark.parametrize("left", ["unfinished", "both forms"])
def test_what_a_kill_leaves_in_the_midst_of_packing_is_cleared_up_the_next_time(journal: Path, left: str) -> None:
    before, first = list(read_journal(journal)), segments(journal)[0]
    data = first.read_bytes()
    if left == "both forms":
        pack(journal)
        first.write_bytes(data)
    else:
        (journal / f"{UNFINISHED_PREFIX}{first.name}.gz").write_bytes(b"half")
    assert list(read_journal(journal)) == before
    pack(journal)
    assert forms(journal)[0]
    assert not list(journal.glob(f"{UNFINISHED_PREFIX}*"))
    assert list(read_journal(journal)) == before


def test_on_a_full_disk_events_stay_as_they_are(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in journal.iterdir()}

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    pack(journal)
    assert {path: path.read_bytes() for path in journal.iterdir()} == before


def test_a_reader_that_follows_the_run_goes_on_where_it_was(journal: Path) -> None:
    whole = list(read_journal(journal))
    follower = JournalFollower(journal)
    seen = list(follower.new_events(max_bytes=3000))
    assert follower.is_behind
    pack(journal)
    assert not follower.was_replaced
    while follower.is_behind:
        seen += follower.new_events(max_bytes=3000)
    assert seen == whole


def test_a_checkpoint_packs_so_many_at_a_time(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_journal, "MAX_AT_ONCE", 1)
    run = RunFolder(journal)
    run.journal_path = journal
    for step in (1, 2):
        with run.checkpoint(step, keep=1):
            pass
        assert forms(journal).count(True) == step


def test_packed_events_take_less_than_a_quarter_of_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_MAX_SEGMENT_BYTES", 1 << 16)
    for life in range(30):
        write_steps(tmp_path, start=life * NUM_STEPS)
    monkeypatch.setattr(packed_journal, "MAX_AT_ONCE", 100)
    plain = [path.stat().st_size for path in segments(tmp_path)]
    pack(tmp_path)
    packed = [packed_form(path).stat().st_size for path in segments(tmp_path)[:-NUM_PLAIN]]
    assert sum(packed) < sum(plain[:-NUM_PLAIN]) / 4
