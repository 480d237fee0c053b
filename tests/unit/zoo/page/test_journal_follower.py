"""A journal that is read while it is written: every event once, in bounded parts, none that is damaged."""

from __future__ import annotations

from pathlib import Path

from reroll.observe.journal import BEGUN, Journal, SampleState, segments
from reroll_zoo.page.journal_follower import JournalFollower


def only_segment(folder: Path) -> Path:
    [segment] = segments(folder)
    return segment


def test_a_follower_gives_each_event_once_as_it_is_written(tmp_path: Path) -> None:
    follower = JournalFollower(tmp_path)
    assert list(follower.new_events()) == []
    with Journal(tmp_path) as journal:
        journal.record("0.0", SampleState.QUEUED)
        journal.flush()
        assert [event.state for event in follower.new_events()] == [BEGUN, SampleState.QUEUED]
        journal.record("0.0", SampleState.SCORING, tokens=3)
        assert list(follower.new_events()) == []
        journal.flush()
        assert [event.detail for event in follower.new_events()] == [{"tokens": 3}]
    with Journal(tmp_path) as journal:
        journal.record("0.1", SampleState.QUEUED)
    assert [event.sample_id for event in follower.new_events()] == ["", "0.1"]
    assert list(follower.new_events()) == []


def test_a_follower_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for id in ("0.0", "0.1"):
            journal.record(id, SampleState.QUEUED)
            journal.flush()  # Or both were one line.
    segment = only_segment(tmp_path)
    whole = segment.read_bytes()
    follower = JournalFollower(tmp_path)
    segment.write_bytes(whole[:-10])
    assert [event.sample_id for event in follower.new_events()] == ["", "0.0"]
    segment.write_bytes(whole)
    assert [event.sample_id for event in follower.new_events()] == ["0.1"]


def test_a_follower_reads_a_bounded_part_at_a_time_and_only_the_newest_segments(tmp_path: Path) -> None:
    for group in range(3):
        with Journal(tmp_path) as journal:
            for index in range(20):
                journal.record(f"{group}.{index}", SampleState.QUEUED)
                journal.flush()
    size = segments(tmp_path)[-1].stat().st_size
    follower = JournalFollower(tmp_path, max_bytes=int(2.5 * size))
    parts = []
    while part := [event.sample_id for event in follower.new_events(max_bytes=size // 3)]:
        parts.append(part)
    read = [id for part in parts for id in part if id]
    assert len(parts) > 2
    assert sorted(read) == sorted(f"{group}.{index}" for group in (1, 2) for index in range(20))


def test_a_follower_believes_nothing_after_a_damaged_line_and_notices_another_journal(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for index in range(3):
            journal.record(f"0.{index}", SampleState.QUEUED)
            journal.flush()
    segment = only_segment(tmp_path)
    segment.write_bytes(segment.read_bytes().replace(b'"0.1"', b'"0.7"'))
    follower = JournalFollower(tmp_path)
    assert [event.sample_id for event in follower.new_events()] == ["", "0.0"]
    assert not follower.was_replaced
    segment.unlink()
    assert follower.was_replaced
