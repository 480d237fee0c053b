import os

import pytest

from reroll.errors import RunFolderError
from reroll.observe.ledger import Event, Ledger, SampleState, read_ledger


def test_events_come_back_as_they_were_recorded(tmp_path):
    clock = iter([1.5, 2.25]).__next__
    with Ledger(tmp_path / "run" / "ledger.jsonl", clock=clock) as ledger:
        ledger.record("0.1", SampleState.QUEUED)
        ledger.record("0.1", SampleState.FAILED, reason='a "quoted"\nline', version=3)
    assert list(read_ledger(ledger.path)) == [
        Event(1.5, "0.1", SampleState.QUEUED, {}),
        Event(2.25, "0.1", SampleState.FAILED, {"reason": 'a "quoted"\nline', "version": 3}),
    ]


def test_any_text_is_a_sample_id(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.record('eval/"é"\n', SampleState.DONE)
    assert [event.sample_id for event in read_ledger(ledger.path)] == ['eval/"é"\n']


def test_what_was_flushed_can_be_read_while_the_ledger_is_open(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.record("0.0", SampleState.QUEUED)
        assert list(read_ledger(ledger.path)) == []
        ledger.flush()
        assert len(list(read_ledger(ledger.path))) == 1


def test_a_ledger_opened_again_is_continued(tmp_path):
    for id in ("0.0", "0.1"):
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            ledger.record(id, SampleState.QUEUED)
    assert [event.sample_id for event in read_ledger(ledger.path)] == ["0.0", "0.1"]


@pytest.mark.parametrize("num_bytes_lost", [1, 2, 10, 40])
def test_a_line_torn_by_a_crash_is_left_out_and_cut_off_before_the_next_event(tmp_path, num_bytes_lost):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.record("0.0", SampleState.QUEUED)
        ledger.record("0.1", SampleState.FAILED, reason="ü" * 30)
    os.truncate(path, path.stat().st_size - num_bytes_lost)
    assert [event.sample_id for event in read_ledger(path)] == ["0.0"]
    with Ledger(path) as ledger:
        ledger.record("0.2", SampleState.QUEUED)
    assert [event.sample_id for event in read_ledger(path)] == ["0.0", "0.2"]


@pytest.mark.parametrize("torn", [b"{", b'{"t":1.0,"id":"' + b"x" * 10_000])
def test_a_file_that_is_one_torn_line_is_empty(tmp_path, torn):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(torn)
    Ledger(path).close()
    assert path.read_bytes() == b""


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"t":1.0,"id":"0.0","state":"queued"}\nnonsense\n{"t":1.0,"id":"0.0","state":"done"}\n')
    events = read_ledger(path)
    assert next(events).sample_id == "0.0"
    with pytest.raises(RunFolderError, match="line 2"):
        next(events)


def test_a_missing_ledger_says_so(tmp_path):
    with pytest.raises(RunFolderError, match=r"none\.jsonl: cannot read the ledger"):
        list(read_ledger(tmp_path / "none.jsonl"))


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot write the ledger"):
        Ledger(tmp_path / "file" / "ledger.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_reported_by_record_flush_and_close(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.symlink_to("/dev/full")
    ledger = Ledger(path)
    ledger.record("0.0", SampleState.QUEUED)
    with pytest.raises(RunFolderError, match="No space left on device"):
        ledger.flush()
    with pytest.raises(RunFolderError, match="No space left on device"):
        ledger.record("0.1", SampleState.FAILED, reason="more than the buffer holds" * 20_000)
    with pytest.raises(RunFolderError, match="No space left on device"):
        ledger.close()
    ledger.close()


def test_events_are_gathered_before_they_are_written(tmp_path):
    """A controller records 25,000 events a second at full speed: a call of the system for each would be felt."""
    path, sizes = tmp_path / "ledger.jsonl", set()
    with Ledger(path) as ledger:
        for number in range(10_000):
            ledger.record(f"{number}.0", SampleState.SCORING, tokens=number)
            sizes.add(path.stat().st_size)
    assert 1 < len(sizes) < 20
    assert path.stat().st_size > 500_000
