"""The journal: events and ended samples come back as they were, whatever a crash tears or a disk refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reroll.errors import RunFolderError
from reroll.observe import journal as journal_module
from reroll.observe.journal import (
    BEGUN,
    CONTINUED,
    STEPPED,
    Journal,
    RecordedSamples,
    SampleState,
    read_events,
    read_journal,
    read_stored,
    segments,
)
from reroll.observe.trajectory_bytes import decode, encode, encode_all, encode_ids, encode_prompt
from reroll.types import Completion, FinishReason, Request, SamplingParams, Status, Trajectory, Turn, Versions
from reroll_zoo.audit.audit import damage_of


def text_of(ids: object) -> str:
    return f"text of {ids}"


def completion(ids: tuple[int, ...], logprobs: tuple[float, ...] | None = None, *, version: int = 0) -> Completion:
    logprobs = tuple(-0.5 * n for n in range(len(ids))) if logprobs is None else logprobs
    return Completion(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP, versions=((version, len(ids)),))


def turn(prompt_ids: tuple[int, ...], ids: tuple[int, ...], **fields: object) -> Turn:
    return Turn(prompt_ids=prompt_ids, completion=completion(ids), text=text_of(ids), **fields)  # type: ignore[arg-type]


def sample(id: str = "0.0", *turns: Turn, reward: float = 1.0, **fields: object) -> Trajectory:
    turns = turns or (turn((1, 2, 3), (4, 5)),)
    return Trajectory(id=id, turns=turns, status=Status.COMPLETED, reward=reward, **fields)  # type: ignore[arg-type]


def only_segment(folder: Path) -> Path:
    [segment] = segments(folder)
    return segment


def states(folder: Path) -> list[tuple[str, str]]:
    return [(event.sample_id, str(event.state)) for event in read_journal(folder)]


def test_events_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    clock = iter([1.25, 1.5, 2.25]).__next__
    with Journal(tmp_path / "run" / "journal", config="abc", clock=clock) as journal:
        journal.record("0.1", SampleState.QUEUED)
        journal.record("0.1", SampleState.FAILED, reason='a "quoted"\nline', version=3)
    begun, queued, failed = read_journal(journal.folder)
    assert (begun.state, begun.detail) == (BEGUN, {"version": 0, "config": "abc", "attempt": 1})
    assert (queued.time_s, queued.sample_id, queued.state, queued.detail) == (1.5, "0.1", SampleState.QUEUED, {})
    assert failed.state is SampleState.FAILED
    assert failed.detail == {"reason": 'a "quoted"\nline', "version": 3}


def test_what_happens_to_a_group_is_one_line_and_an_event_of_each_of_its_samples(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.record_group(12, [0, 1, 3], SampleState.TRAINED, version=4)
        journal.record_group(13, [], SampleState.TRAINED, version=4)
    path = only_segment(tmp_path)
    assert len(path.read_bytes().splitlines()) == 2
    _, *events = read_journal(tmp_path)
    assert [(event.sample_id, event.state, event.detail) for event in events] == [
        (f"12.{index}", SampleState.TRAINED, {"version": 4}) for index in (0, 1, 3)
    ]
    assert damage_of(path) is None


def test_samples_that_begin_together_are_one_line(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for id in ("1.0", "1.1", "2.0"):
            journal.record(id, SampleState.GENERATING)
        journal.record("2.1", SampleState.GENERATING, kept=3)
        journal.record("2.2", SampleState.GENERATING)
        journal.flush()
        journal.record("2.3", SampleState.GENERATING)
    assert len(only_segment(tmp_path).read_bytes().splitlines()) == 5
    _, *events = read_journal(tmp_path)
    ids = ["1.0", "1.1", "2.0", "2.1", "2.2", "2.3"]
    assert [(event.sample_id, event.state) for event in events] == [(id, SampleState.GENERATING) for id in ids]
    assert [event.detail for event in events if event.detail] == [{"kept": 3}]


def test_samples_that_are_judged_at_once_are_two_lines_and_each_has_its_events_in_their_order(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.ended("0.0", sample())
        for index in (1, 2):
            journal.record(f"0.{index}", SampleState.SCORING, tokens=index)
            journal.ended(f"0.{index}", sample(f"0.{index}", reward=float(index)))
        journal.record_group(0, [0, 1], SampleState.TRAINED, version=1)
        journal.record("0.3", SampleState.SCORING, tokens=3)
        journal.ended("0.3", sample("0.3", reward=3.0))
    assert len(only_segment(tmp_path).read_bytes().splitlines()) == 1 + 3 + 1 + 2
    _, *events = read_journal(tmp_path)
    assert [(event.sample_id, str(event.state)) for event in events] == [
        ("0.0", "done"), ("0.1", "scoring"), ("0.2", "scoring"), ("0.1", "done"), ("0.2", "done"),
        ("0.0", "trained"), ("0.1", "trained"), ("0.3", "scoring"), ("0.3", "done"),
    ]  # fmt: skip
    assert [event.detail["reward"] for event in events if event.state is SampleState.DONE] == [1.0, 1.0, 2.0, 3.0]
    assert [event.detail["tokens"] for event in events if event.state is SampleState.SCORING] == [1, 2, 3]


def test_events_of_one_line_have_their_own_times_where_those_differ(tmp_path: Path) -> None:
    times = iter([0.0, 1.0, 1.0001, 1.0002, 2.0, 2.5])
    with Journal(tmp_path, clock=lambda: next(times)) as journal:
        for id in ("1.0", "1.1"):
            journal.record(id, SampleState.GENERATING)
        journal.flush()
        for id in ("1.2", "1.3"):
            journal.record(id, SampleState.GENERATING)
    assert [event.time_s for event in read_journal(tmp_path)] == [0.0, 1.0, 1.0, 1.0002, 2.0]


def test_nothing_is_written_before_the_first_event(tmp_path: Path) -> None:
    Journal(tmp_path / "journal").close()
    assert not (tmp_path / "journal").exists()


def test_what_was_flushed_can_be_read_while_the_journal_is_open(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.record("0.0", SampleState.QUEUED)
        assert states(tmp_path) == [("", BEGUN)]
        journal.flush()
        assert states(tmp_path) == [("", BEGUN), ("0.0", "queued")]


def test_an_ended_sample_that_was_flushed_can_be_read_while_the_journal_is_open(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.ended("0.0", sample())
        journal.flush()
        *_, event = read_journal(tmp_path)
        assert read_stored(event, text_of=text_of) == sample()


@pytest.mark.parametrize("logprobs", [(-0.5, -0.25, -1.0), (-0.1, -0.2, -0.3)], ids=["single precision", "double precision"])
def test_a_sample_whose_tokens_engines_told_of_is_kept_to_the_bit(tmp_path: Path, logprobs: tuple[float, ...]) -> None:
    request = Request(id="0.0.0", prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=9))
    wrote = completion((4, 150_000, 6), logprobs)
    with Journal(tmp_path) as journal:
        turn, _ = journal.partial.turn(request)
        journal.partial.add(request.id, turn, np.array(wrote.token_ids[:2], np.uint32), np.array(wrote.logprobs[:2]), 0)
        journal.partial.end(turn, wrote)
        ended = sample("0.0", Turn(prompt_ids=(1, 2, 3), completion=wrote, text=text_of(wrote.token_ids)))
        journal.ended("0.0", ended)
        assert journal.partial.num_tokens("0.0") == 0
    *_, event = read_journal(tmp_path)
    assert read_stored(event, text_of=text_of) == ended


def test_of_a_turn_that_is_not_what_engines_told_of_its_own_tokens_are_kept(tmp_path: Path) -> None:
    request = Request(id="0.0.0", prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=9))
    with Journal(tmp_path) as journal:
        journal.partial.end(journal.partial.turn(request)[0], completion((7, 8)))
        journal.ended("0.0", sample())
    *_, event = read_journal(tmp_path)
    assert read_stored(event, text_of=text_of) == sample()


def test_a_journal_opened_again_begins_a_segment(tmp_path: Path) -> None:
    for id in ("0.0", "0.1"):
        with Journal(tmp_path) as journal:
            journal.record(id, SampleState.QUEUED)
    assert states(tmp_path) == [("", BEGUN), ("0.0", "queued"), ("", BEGUN), ("0.1", "queued")]


@pytest.mark.parametrize("num_bytes_lost", [1, 2, 10, 40])
def test_a_line_torn_by_a_crash_is_left_out(tmp_path: Path, num_bytes_lost: int) -> None:
    with Journal(tmp_path) as journal:
        journal.record("0.0", SampleState.QUEUED)
        journal.record("0.1", SampleState.FAILED, reason="ü" * 30)
    path = only_segment(tmp_path)
    os.truncate(path, path.stat().st_size - num_bytes_lost)
    assert states(tmp_path) == [("", BEGUN), ("0.0", "queued")]
    assert damage_of(path) is None


def test_what_follows_a_damaged_line_is_not_believed_and_the_damage_is_named(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for index in range(3):
            journal.record(f"0.{index}", SampleState.QUEUED)
            journal.flush()
    path = only_segment(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"0.1"', b'"0.7"'))
    assert states(tmp_path) == [("", BEGUN), ("0.0", "queued")]
    assert "line 3 does not match its checksum, and 1 lines follow" in str(damage_of(path))


@pytest.mark.parametrize("where", ["prompt", "tokens"])
def test_a_flipped_bit_in_the_tokens_is_noticed(tmp_path: Path, where: str) -> None:
    with Journal(tmp_path) as journal:
        journal.ended("0.0", sample())
    path = only_segment(tmp_path).with_suffix(".tokens")
    content = bytearray(path.read_bytes())
    content[0 if where == "prompt" else -1] ^= 1
    path.write_bytes(content)
    *_, event = read_journal(tmp_path)
    assert read_stored(event, text_of=text_of) is None


def test_deleted_tokens_are_not_there(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.ended("0.0", sample())
    only_segment(tmp_path).with_suffix(".tokens").unlink()
    *_, event = read_journal(tmp_path)
    assert read_stored(event, text_of=text_of) is None


def test_a_place_that_cannot_be_written_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write .*file.journal.*run\.runs_dir"):
        Journal(tmp_path / "file" / "journal").record("0.0", SampleState.QUEUED)


def end_and_flush(journal: Journal) -> None:
    journal.ended("0.0", sample())
    journal.flush()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("suffix", [".jsonl", ".tokens"])
def test_a_full_disk_is_reported_with_the_fix(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = Path.open

    def always_full(path: Path, *args: object, **kwargs: object) -> object:
        return real_open(Path("/dev/full"), "wb") if path.suffix == suffix else real_open(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", always_full)
    with pytest.raises(RunFolderError, match=r"No space left on device.*free some space"):
        end_and_flush(Journal(tmp_path))


def test_events_are_gathered_before_they_are_written(tmp_path: Path) -> None:
    """A controller records 25,000 events a second at full speed: a call of the system for each would be felt."""
    sizes = set()
    with Journal(tmp_path) as journal:
        for number in range(10_000):
            journal.record(f"{number}.0", SampleState.SCORING, tokens=number, note="x" * 30)
            sizes.add(only_segment(tmp_path).stat().st_size)
    assert 1 < len(sizes) < 20
    assert only_segment(tmp_path).stat().st_size > 500_000


def test_full_segments_are_followed_by_others_and_the_oldest_tokens_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_MAX_SEGMENT_BYTES", 1000)
    monkeypatch.setattr(journal_module, "_EVENTS_SHARE", 0.01)  # Samples are short: events are most of it.
    with Journal(tmp_path, max_bytes=4000) as journal:
        for number in range(100):
            journal.ended(f"{number}.0", sample(f"{number}.0"))
            journal.flush()
    files = segments(tmp_path)
    assert [next(read_events(file)).state for file in files] == [BEGUN] + [CONTINUED] * (len(files) - 1)
    kept = [file for file in files if file.with_suffix(".tokens").exists()]
    assert 2 <= len(kept) < len(files)
    assert kept == files[-len(kept) :]
    done = [event for event in read_journal(tmp_path) if event.state is SampleState.DONE]
    assert [event.sample_id for event in done] == [f"{number}.0" for number in range(100)]
    found = [read_stored(event, text_of=text_of) for event in done]
    assert found[0] is None
    assert found[-1] == sample("99.0")


def test_the_oldest_events_go_where_they_outgrow_a_tenth_of_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_MAX_SEGMENT_BYTES", 1000)
    with Journal(tmp_path, max_bytes=50_000) as journal:
        for number in range(400):
            journal.record(f"{number}.0", SampleState.GENERATING, note="x" * (number % 7))
            journal.flush()
            assert sum(path.stat().st_size for path in segments(tmp_path)) < 50_000 // 10 + 2 * 1200
    kept = [int(event.sample_id.partition(".")[0]) for event in read_journal(tmp_path) if event.sample_id]
    assert kept == list(range(400 - len(kept), 400))
    assert len(kept) > 30
    assert segments(tmp_path)[0].name != "000000.jsonl"


def test_siblings_share_one_copy_of_their_prompt(tmp_path: Path) -> None:
    prompt, shown = tuple(range(1000)), ({"role": "user", "content": "a long question " * 100},)
    samples = [sample(f"0.{index}", turn(prompt, (index,), shown=shown)) for index in range(8)]
    samples.append(sample("0.8", turn(prompt, (9,), shown=({"role": "user", "content": "another"},))))
    with Journal(tmp_path) as journal:
        for one in samples:
            journal.ended(one.id, one)
    assert only_segment(tmp_path).with_suffix(".tokens").stat().st_size < 2 * 3 * 1000 + 1700 + 9 * 100
    done = [event for event in read_journal(tmp_path) if event.state is SampleState.DONE]
    assert [read_stored(event, text_of=text_of) for event in done] == samples


def test_what_earlier_versions_wrote_is_read(tmp_path: Path) -> None:
    """Each sample with its own copy of what it was told, and all that is left out now."""
    head = {"status": "completed", "reward": 1.0, "turns": [
        {"num": 2, "finish": "stop", "versions": [[0, 2]], "shared": 3, "shown": [{"role": "user", "content": "hi"}]}
    ]}  # fmt: skip
    header = json.dumps(head).encode()
    data = len(header).to_bytes(4, "little") + header + encode_ids((4, 5)) + np.array([0.0, -0.5], "<f4").tobytes()
    read = decode(data, id="0.0", prompt_ids=(1, 2, 3), text_of=text_of)
    assert read == sample("0.0", turn((1, 2, 3), (4, 5), shown=({"role": "user", "content": "hi"},)))


def test_a_token_takes_at_most_eight_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(0, 200_000, 256).tolist())
    logprobs = tuple(rng.normal(size=256).astype(np.float32).astype(float).tolist())
    opening = ({"role": "user", "content": "What is 7 + 8?"},)
    written = Turn(
        prompt_ids=tuple(range(100)),
        completion=completion(ids, logprobs),
        text=text_of(ids),
        shown=opening,  # type: ignore[arg-type]
    )
    with Journal(tmp_path) as journal:
        for index in range(64):
            journal.ended(f"0.{index}", sample(f"0.{index}", written, reward_parts={"math": 1.0}))
    assert only_segment(tmp_path).with_suffix(".tokens").stat().st_size <= 8 * 64 * 256


ids = st.lists(st.integers(0, 2**24 - 1), max_size=5).map(tuple)
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
doubles = st.floats(allow_nan=False, allow_infinity=False)
messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=5)}), max_size=2).map(tuple)
numbers = st.dictionaries(st.text(max_size=3), doubles, max_size=2)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    written = draw(ids)
    logprobs = tuple(draw(st.lists(draw(st.sampled_from([singles, doubles])), min_size=len(written), max_size=len(written))))
    runs = ((draw(st.integers(0, 5)), len(written)),) if written else ()
    return Turn(
        prompt_ids=draw(ids),
        completion=Completion(
            token_ids=written, logprobs=logprobs, finish_reason=draw(st.sampled_from(FinishReason)), versions=runs
        ),
        text=text_of(written),
        shown=draw(messages),
        reply=draw(messages),
        reward=draw(doubles),
        info=draw(numbers),
        state=draw(st.none() | st.text(max_size=3)),
    )


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@given(
    st.builds(
        Trajectory,
        id=st.just("3.1"),
        turns=st.lists(turns(), max_size=3).map(tuple),
        status=st.sampled_from(Status),
        reason=st.text(max_size=3),
        reward=doubles,
        reward_parts=numbers,
        part_weights=numbers,
        reward_info=numbers,
        answer=st.none() | st.text(max_size=3),
    )
)
def test_any_trajectory_comes_back_to_the_bit(trajectory: Trajectory) -> None:
    prompt_ids = trajectory.turns[0].prompt_ids if trajectory.turns else ()
    _, shown = encode_prompt(trajectory.turns)
    assert decode(encode(trajectory), id="3.1", prompt_ids=prompt_ids, shown=shown, text_of=text_of) == trajectory


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@given(st.lists(turns(), max_size=4))
def test_samples_that_are_encoded_together_come_out_as_each_alone(some: list[Turn]) -> None:
    samples = [sample("0.0", one) for one in some]
    assert encode_all([(one, {}) for one in samples]) == [encode(one) for one in samples]


def test_what_an_agent_has_seen_is_stored_once_however_long_its_context_grows() -> None:
    context: tuple[int, ...] = tuple(range(100))
    grown = []
    for number in range(20):
        grown.append(turn(context, (number,) * 50))
        context = (*context, *grown[-1].completion.token_ids, 7, 7)
    trajectory = sample("0.0", *grown)
    assert len(encode(trajectory)) < 20 * (52 * 7 + 200)
    assert decode(encode(trajectory), id="0.0", prompt_ids=grown[0].prompt_ids, text_of=text_of) == trajectory


def record_group(journal: Journal, number: int, prompt: str, *, version: int, num_ended: int, num: int = 2) -> None:
    for index in range(num):
        journal.record(f"{number}.{index}", SampleState.QUEUED, prompt=prompt, version=version)
    for index in range(num_ended):
        journal.ended(f"{number}.{index}", sample(f"{number}.{index}", reward=float(number)))


def recorded(folder: Path, *, version: int = 0, max_staleness: int = 0, config: str = "c") -> RecordedSamples:
    return Journal(folder, config=config, text_of=text_of).resume(version=version, max_staleness=max_staleness)


def always(versions: Versions) -> bool:
    return True


def test_a_resumed_run_finds_what_had_ended_under_the_same_number_and_prompt(tmp_path: Path) -> None:
    with Journal(tmp_path, config="c") as journal:
        record_group(journal, 4, "p/4", version=0, num_ended=1)
    found = recorded(tmp_path)
    assert len(found) == 1
    assert found.versions(4, "p/4") == [sample("4.0").versions]
    assert found.versions(4, "p/5") == found.versions(5, "p/4") == []
    assert found.take(4, "p/5", index=0, fits=always) is None
    assert found.take(4, "p/4", index=1, fits=always) is None
    assert found.take(4, "p/4", index=0, fits=always) == sample("4.0", reward=4.0)
    assert found.take(4, "p/4", index=0, fits=always) is None  # Once: another try is another sample.


@pytest.mark.parametrize("newest", [1, 2])
def test_what_weights_wrote_that_do_not_fit_is_not_taken(tmp_path: Path, newest: int) -> None:
    late = Turn(prompt_ids=(1,), completion=completion((4, 5), version=2), text=text_of((4, 5)))
    with Journal(tmp_path, config="c") as journal:
        journal.record("4.0", SampleState.QUEUED, prompt="p", version=1)
        journal.ended("4.0", sample("4.0", late))
    found = recorded(tmp_path, version=1).take(4, "p", index=0, fits=lambda versions: versions.newest <= newest)
    assert found == (sample("4.0", late) if newest == 2 else None)


def test_of_a_run_with_another_config_nothing_is_taken(tmp_path: Path) -> None:
    with Journal(tmp_path, config="c") as journal:
        record_group(journal, 0, "p", version=0, num_ended=2)
    assert len(recorded(tmp_path, config="other")) == 0


def test_only_the_segments_that_matter_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(5):
        with Journal(tmp_path, config="c") as journal:
            record_group(journal, version, "p", version=version, num_ended=2)
            journal.stepped(version=version + 1)
    read: list[str] = []
    real = journal_module.read_events
    monkeypatch.setattr(journal_module, "read_events", lambda segment: (read.append(segment.stem), real(segment))[1])
    recorded(tmp_path, version=4, max_staleness=1)
    assert read == ["000004", "000003", "000002"]


def test_a_journal_does_not_take_from_itself(tmp_path: Path) -> None:
    with Journal(tmp_path, config="c") as journal:
        record_group(journal, 0, "p", version=0, num_ended=2)
        assert len(journal.resume(version=0, max_staleness=0)) == 0


def test_a_step_is_marked_for_whoever_goes_on_from_it(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.stepped(version=3)
        *_, event = read_journal(tmp_path)
        assert (event.state, event.detail) == (STEPPED, {"version": 3})


def test_replacing_a_prompt_between_turns_is_kept_as_it_was() -> None:
    first, second = turn((1, 2, 3), (4,)), turn((9, 2, 3, 4), (5,))
    trajectory = replace(sample("0.0", first, second), answer="")
    assert decode(encode(trajectory), id="0.0", prompt_ids=(1, 2, 3), text_of=text_of) == trajectory


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_the_experts_of_tokens_come_back_to_the_bit_and_take_what_they_take(dtype: type) -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 200, size=(num, 3, 2)).astype(dtype) for num in (4, 5))
    turns = [
        turn((1, 2, 3), (4, 5)),
        turn((1, 2, 3, 4, 5, 6), (7, 8, 9)),
        turn((1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (11,)),  # Of which nobody told.
    ]
    told = [
        replace(one, completion=replace(one.completion, routes=routes))
        for one, routes in zip(turns, (first, second, None), strict=True)
    ]
    plain, data = encode(sample("0.0", *turns)), encode(sample("0.0", *told))
    back = decode(data, id="0.0", prompt_ids=(1, 2, 3), text_of=text_of)
    assert back == sample("0.0", *told)
    for routes, one in zip((first, second), back.turns, strict=False):
        assert one.completion.routes is not None
        assert one.completion.routes.dtype == dtype
        assert np.array_equal(one.completion.routes, routes)
    assert back.turns[2].completion.routes is None
    assert 0 < len(data) - len(plain) - first.nbytes - second.nbytes < 60
