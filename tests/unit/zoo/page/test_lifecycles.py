"""Events of a journal become lives of samples: phases that follow from siblings too, restarts, and a bound on memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from reroll.observe.journal import QUEUED_AGAIN, Journal, SampleState, read_journal
from reroll.types import Completion, FinishReason, Status, Trajectory, Turn
from reroll_zoo.samples.lifecycles import Lifecycles, Phase


def scored(id: str, reward: float = 1.0) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(-0.5,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    turn = Turn(prompt_ids=(7,), completion=completion, text="a")
    return Trajectory(id=id, turns=(turn,), status=Status.TRUNCATED, reward=reward)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    ticks = count()
    with Journal(tmp_path / "journal", clock=lambda: 100.0 + next(ticks)) as journal:
        yield journal


def lives_of(journal: Journal, **options: int) -> Lifecycles:
    journal.flush()
    lives = Lifecycles(**options)
    lives.take(read_journal(journal.folder))
    return lives


def phases(lives: Lifecycles, id: str) -> list[str]:
    life = lives.find(id)
    assert life is not None
    return [phase.name.lower() for phase in life.phases]


def admit(journal: Journal, group: int, num: int = 2, version: int = 0) -> list[str]:
    ids = [f"{group}.{index}" for index in range(num)]
    for id in ids:
        journal.record(id, SampleState.QUEUED, prompt=f"p{group}", domain="sums", version=version)
    return ids


def end(journal: Journal, id: str, reward: float = 1.0) -> None:
    journal.record(id, SampleState.GENERATING)
    journal.record(id, SampleState.SCORING, tokens=9)
    journal.ended(id, scored(id, reward))


def test_a_group_is_ready_when_its_last_sample_is_scored_and_training_when_it_is_taken(journal: Journal) -> None:
    first, second = admit(journal, 4)
    end(journal, first, reward=0.25)
    assert phases(lives_of(journal), first) == ["queued", "generating", "scoring", "done"]
    end(journal, second)
    journal.taken([4])
    for id in (first, second):
        journal.record(id, SampleState.TRAINED, version=1)
    journal.stepped(version=1)
    lives = lives_of(journal)
    whole = ["queued", "generating", "scoring", "done", "ready", "training", "trained"]
    assert phases(lives, first) == phases(lives, second) == whole
    life = lives.find(first)
    assert life is not None
    assert (life.reward, life.tokens, life.status, life.trained_version, life.domain) == (0.25, 9, "truncated", 1, "sums")
    assert life.times_s == sorted(life.times_s)
    assert life.done is not None
    assert [mark.kind for mark in lives.marks] == ["begun", "taken", "stepped"]
    assert [sibling.id for sibling in lives.group(4)] == [first, second]


def test_a_failed_sibling_does_not_hold_up_its_group_and_stays_failed(journal: Journal) -> None:
    first, second = admit(journal, 0)
    end(journal, first)
    journal.record(second, SampleState.FAILED, reason="no answer")
    lives = lives_of(journal)
    assert phases(lives, first)[-1] == "ready"
    assert phases(lives, second) == ["queued", "failed"]


def test_what_was_in_flight_when_the_run_died_is_lost_and_lives_again_under_its_id(journal: Journal) -> None:
    first, second = admit(journal, 0)
    end(journal, first)
    journal.flush()
    with Journal(journal.folder, clock=lambda: 500.0) as again:
        again.resume(version=0, max_staleness=0)
        admit(again, 0)
        lives = lives_of(again)
    assert len(lives) == 4
    assert sorted(life.phase.name for life in lives.newest_first()) == ["LOST", "LOST", "QUEUED", "QUEUED"]
    lost = [life for life in lives.newest_first() if life.phase is Phase.LOST]
    assert all(life.times_s[-1] < 500.0 for life in lost)  # When the run was last heard of, not when it came back.
    assert phases(lives, second) == ["queued"]


def test_a_group_that_was_sent_back_may_come_again_under_its_number(journal: Journal) -> None:
    for id in admit(journal, 0):
        journal.record(id, SampleState.ABORTED, reason=QUEUED_AGAIN)
    first, second = admit(journal, 0)
    end(journal, first)
    end(journal, second)
    lives = lives_of(journal)
    assert phases(lives, first)[-1] == "ready"
    assert len(lives) == 4


def test_states_of_later_versions_are_passed_over(journal: Journal) -> None:
    [id] = admit(journal, 0, 1)
    journal.record(id, "dreaming", tokens=3)
    journal.record("", "moved", to="elsewhere")
    assert phases(lives_of(journal), id) == ["queued"]


def test_changes_are_given_once_in_parts_of_a_bounded_size(journal: Journal) -> None:
    ids = [id for group in range(5) for id in admit(journal, group)]
    lives = lives_of(journal)
    seen, revision = [], 0
    while part := lives.changed_since(revision, limit=3):
        assert len(part) <= 3
        seen += [life.id for life in part]
        revision = part[-1].revision
    assert seen == ids
    journal.record(ids[3], SampleState.GENERATING)
    journal.flush()
    *_, event = read_journal(journal.folder)
    lives.take([event])
    assert [life.id for life in lives.changed_since(revision, limit=3)] == [ids[3]]


def test_only_the_latest_lives_are_remembered(journal: Journal) -> None:
    for group in range(10):
        admit(journal, group, 1)
    journal.record("0.0", SampleState.GENERATING)
    lives = lives_of(journal, max_lives=4)
    assert [life.id for life in lives.newest_first()] == ["9.0", "8.0", "7.0", "6.0"]
    assert lives.find("0.0") is None
