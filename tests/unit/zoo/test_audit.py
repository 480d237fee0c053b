"""The audit finds each kind of fault in a journal, and none in a good one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from reroll.observe.journal import QUEUED_AGAIN, Journal, SampleState, segments
from reroll.types import Completion, FinishReason, Status, Trajectory, Turn
from reroll_zoo.audit.audit import MAX_TOLD, Audit, audit, describe


class Writer:
    """Writes what a run would, or would not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder)

    def admit(self, number: int, *, version: int = 0, prompt: str | None = None, domain: str = "d") -> None:
        for index in range(2):
            told = {"prompt": prompt or f"p/{number}", "domain": domain, "version": version}
            self.journal.record(f"{number}.{index}", SampleState.QUEUED, **told)

    def send_back(self, number: int) -> None:
        self.end_all(number, SampleState.ABORTED, QUEUED_AGAIN)

    def play_steps(self, numbers: Iterable[int], *, since: int) -> None:
        """One group a step, from weights of this version on."""
        for version, number in enumerate(numbers, since):
            self.admit(number, version=version)
            self.end(number, version=version)
            self.train(number, into=version + 1)

    def end(self, number: int, *, version: int = 0, num: int = 2, num_of_versions: int = 3) -> None:
        for index in range(num):
            completion = Completion(
                token_ids=(7, 8, 9),
                logprobs=(-1.0,) * 3,
                finish_reason=FinishReason.STOP,
                versions=((version, num_of_versions),),
            )
            turn = Turn(prompt_ids=(1,), completion=completion, text="")
            self.journal.ended(f"{number}.{index}", Trajectory(id="", turns=(turn,), status=Status.COMPLETED))

    def train(self, *numbers: int, into: int) -> None:
        for number in numbers:
            for index in range(2):
                self.journal.record(f"{number}.{index}", SampleState.TRAINED, version=into)
        self.journal.stepped(version=into)

    def end_all(self, number: int, state: SampleState, reason: str) -> None:
        for index in range(2):
            self.journal.record(f"{number}.{index}", state, reason=reason)

    def resume(self, version: int) -> None:
        self.journal.close()
        self.journal = Journal(self.folder)
        self.journal.resume(version=version, max_staleness=0)

    def audit(self, max_staleness: int = 0, **known: Any) -> Audit:
        self.journal.close()
        return audit(self.folder, max_staleness=max_staleness, **known)


@pytest.fixture
def run(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def test_a_good_run_is_counted(run: Writer) -> None:
    for number in range(3):
        run.admit(number)
    run.end(0)
    run.end(1)
    run.end_all(1, SampleState.FILTERED, "all rewards of the group are equal")
    run.send_back(2)
    run.train(0, into=1)
    run.admit(2, version=1)
    found = run.audit()
    assert found.violations == []
    counted = (found.num_lives, found.num_steps, found.trained, found.dropped, found.sent_back, found.in_flight)
    assert counted == (1, 1, 1, 1, 1, 1)
    assert (found.num_samples, found.num_tokens, found.staleness) == (2, 12, 0)
    assert dict(describe(found))["groups trained"] == "1, with 2 samples; none more than 0 versions old"


def test_what_an_interruption_undid_is_trained_again_and_counts_once(run: Writer) -> None:
    run.admit(0)
    run.end(0)
    run.train(0, into=1)
    for _ in range(2):
        run.admit(1, version=1)
        run.end(1, version=1)
        run.train(1, into=2)
        run.resume(1)
    run.admit(1, version=1)
    run.end(1, version=1)
    run.train(1, into=2)
    found = run.audit()
    assert found.violations == []
    assert (found.num_lives, found.trained, found.undone, found.num_samples) == (3, 2, 2, 4)


def test_a_group_that_is_trained_twice_is_found(run: Writer) -> None:
    run.admit(0)
    run.end(0)
    run.train(0, into=1)
    run.train(0, into=2)
    assert run.audit(1).violations == ["trained twice: group 0 was trained in step 2, after step 1"] * 2


def test_a_group_that_is_admitted_after_it_was_trained_is_found(run: Writer) -> None:
    run.admit(0)
    run.end(0)
    run.train(0, into=1)
    run.resume(1)
    run.admit(0, version=1)
    assert "trained twice: group 0 (p/0) was admitted again after step 1" in run.audit().violations


def test_a_group_that_was_open_at_a_checkpoint_and_never_came_back_is_lost(run: Writer) -> None:
    run.admit(0)
    run.end(0)
    run.admit(1)
    run.train(0, into=1)
    run.resume(1)
    run.play_steps((2, 3), since=1)
    assert run.audit().violations == ["lost: group 1 (p/1) was open at step 1 and was never admitted again"]


def test_a_group_that_never_ends_is_lost_though_nothing_interrupted_it(run: Writer) -> None:
    run.admit(0)
    run.play_steps(range(1, 3), since=0)
    assert run.audit(2).violations == []
    assert run.audit(1).violations == [
        "lost: group 0 (p/0) was admitted at step 0, and neither trained on, dropped nor sent back by step 2"
    ]


def test_a_group_that_is_sent_back_and_never_admitted_again_is_lost(run: Writer) -> None:
    run.admit(0)
    run.send_back(0)
    assert run.audit().violations == []  # It is the next.
    run.journal = Journal(run.folder)
    run.journal.resume(version=0, max_staleness=0)
    run.admit(0)
    run.send_back(0)
    run.play_steps(range(1, 20), since=0)
    assert run.audit().violations == ["lost: group 0 (p/0) was sent back at step 0 and was never admitted again"]


def test_a_group_that_waits_while_others_of_its_domain_are_drawn_is_lost_unless_a_checkpoint_has_it(run: Writer) -> None:
    run.admit(0)
    run.send_back(0)
    run.play_steps(range(1, 3), since=0)
    assert len(run.audit().violations) == 1
    assert run.audit(owed={1: {0}, 2: {0}}).violations == []
    assert run.audit(owed={2: set[int]()}).violations == [
        "lost: group 0 (p/0) was open at step 2, and its checkpoint has it not",
        "lost: group 0 (p/0) was sent back at step 0 and was never admitted again",
    ]


def test_a_group_that_was_put_off_to_a_long_round_may_wait_and_is_lost_if_a_checkpoint_has_it_not(run: Writer) -> None:
    run.admit(0)
    run.send_back(0)
    run.play_steps(range(1, 3), since=0)
    assert run.audit(defers=True).violations == []
    assert run.audit(defers=True, owed={2: set[int]()}).violations == [
        "lost: group 0 (p/0) was open at step 2, and its checkpoint has it not"
    ]


def test_a_group_that_was_open_at_an_interruption_and_waits_is_lost_unless_a_later_checkpoint_has_it(run: Writer) -> None:
    run.admit(0)
    run.journal.stepped(version=1)
    run.resume(1)
    run.play_steps(range(1, 5), since=1)
    assert len(run.audit().violations) == 1
    assert run.audit(owed={1: {0}}).violations != []
    assert run.audit(owed={1: {0}, 5: {0}}).violations == []


def test_a_group_that_waits_while_other_domains_are_drawn_is_not_lost(run: Writer) -> None:
    run.admit(0, domain="seldom")
    run.send_back(0)
    run.play_steps(range(1, 20, 2), since=0)
    assert run.audit().violations == []


def test_a_group_that_was_drawn_and_never_admitted_is_lost(run: Writer) -> None:
    run.play_steps((0, 2, 3, 5), since=0)
    assert run.audit().violations == [
        "lost: group 1 of domain d was drawn before group 5 and never admitted",
        "lost: group 4 of domain d was drawn before group 5 and never admitted",
    ]
    assert run.audit(num_domains=3).violations == []  # 1 and 4 are of one that had no turn.


def test_a_group_that_only_a_checkpoint_knows_of_is_lost(run: Writer) -> None:
    run.play_steps(range(3), since=0)
    assert run.audit(owed={2: {3}}).violations == ["lost: group 3 is owed by the checkpoint of step 2, and was never admitted"]


def test_of_what_a_deleted_journal_held_nothing_is_missed(run: Writer) -> None:
    run.journal.resume(version=5, max_staleness=0)
    run.play_steps((4, 7), since=5)
    assert run.audit(owed={6: {2}}).violations == []


def test_a_group_whose_samples_have_all_failed_is_dropped_and_not_stuck(run: Writer) -> None:
    run.admit(0)
    run.end_all(0, SampleState.FAILED, "the sandbox is gone")
    run.play_steps(range(1, 4), since=0)
    found = run.audit()
    assert (found.violations, found.dropped, found.in_flight) == ([], 1, 0)


def test_a_group_that_is_admitted_twice_at_a_time_is_found(run: Writer) -> None:
    run.admit(0)
    run.admit(0)
    assert len(run.audit().violations) == 2


def test_a_group_that_came_back_as_another_prompt_is_lost(run: Writer) -> None:
    run.admit(0)
    run.admit(1)
    run.end(0)
    run.train(0, into=1)
    run.resume(1)
    run.admit(1, version=1, prompt="another")
    assert run.audit().violations == ["lost: group 1 was of p/1 and came back as another"] * 1


def test_a_group_older_than_the_budget_is_found(run: Writer) -> None:
    for number in range(3):
        run.admit(number)
        run.end(number)
    for number in range(3):
        run.train(number, into=number + 1)
    assert run.audit(max_staleness=2).violations == []
    assert set(audit(run.folder, max_staleness=1).violations) == {"stale: group 2 was 2 versions old in step 3"}


def test_a_sample_that_was_trained_and_had_not_ended_is_found(run: Writer) -> None:
    run.admit(0)
    run.end(0, num=1)
    run.train(0, into=1)
    assert run.audit().violations == ["out of order: sample 0.1 was trained in step 1 and had not ended"]


@pytest.mark.parametrize(
    ("version", "num", "told"), [(5, 3, "has tokens of versions 5 to 5"), (0, 2, "has tokens of no version")]
)
def test_a_token_without_a_right_version_is_found(run: Writer, version: int, num: int, told: str) -> None:
    run.admit(0)
    run.end(0, version=version, num_of_versions=num)
    found = run.audit()
    assert len(found.violations) == 2
    assert told in found.violations[0]


def test_a_step_that_is_left_out_is_found(run: Writer) -> None:
    run.train(into=1)
    run.train(into=3)
    assert run.audit().violations == ["out of order: step 3 follows step 1"]


def test_a_resume_from_a_step_that_never_was_is_found(run: Writer) -> None:
    run.train(into=1)
    run.resume(4)
    run.train(into=5)
    assert run.audit().violations == ["out of order: the run went on from step 4, of which the journal knows nothing"]


def test_damage_is_found(run: Writer) -> None:
    for number in range(2):
        run.admit(number)
        run.journal.flush()
    run.journal.close()
    [segment] = segments(run.folder)
    segment.write_bytes(segment.read_bytes().replace(b"p/0", b"p/9"))
    assert "does not match its checksum" in run.audit().violations[-1]


def test_the_last_line_that_a_crash_tore_is_no_fault(run: Writer) -> None:
    run.admit(0)
    run.journal.close()
    [segment] = segments(run.folder)
    segment.write_bytes(segment.read_bytes()[:-3])
    assert run.audit().violations == []


def test_samples_whose_tokens_were_deleted_are_counted(run: Writer) -> None:
    run.admit(0)
    run.end(0)
    [segment] = segments(run.folder)
    segment.with_suffix(".tokens").unlink()
    found = run.audit()
    assert (found.violations, found.num_unkept) == ([], 2)


def test_a_thousand_faults_of_one_kind_are_not_all_told(run: Writer) -> None:
    for number in range(1000):
        run.end(number, num=1)
    found = run.audit()
    assert len(found.violations) == MAX_TOLD + 1
    assert found.violations[-1] == "out of order: 980 more"


def test_tokens_that_samples_went_on_after_and_those_drawn_anew_are_counted(run: Writer) -> None:
    run.admit(0)
    run.journal.record("0.0", SampleState.GENERATING, kept=2)
    run.journal.record("0.1", SampleState.GENERATING, discarded=5, reason="its weights were lost")
    run.journal.record("0.1", SampleState.GENERATING)
    run.end(0)
    run.train(0, into=1)
    found = run.audit()
    assert found.violations == []
    assert (found.num_continued_tokens, found.num_discarded_tokens) == (2, 5)
    assert dict(describe(found))["tokens continued"].startswith("2: ")


def test_a_sample_that_has_lost_tokens_which_it_went_on_after_is_found(run: Writer) -> None:
    run.admit(0)
    run.journal.record("0.0", SampleState.GENERATING, kept=4)
    run.end(0)
    assert run.audit().violations == ["lost: sample 0.0 went on after 4 tokens and has 3"]


def test_tokens_that_an_environment_had_drawn_anew_after_all_are_not_missed(run: Writer) -> None:
    run.admit(0)
    run.journal.record("0.0", SampleState.GENERATING, kept=4)
    run.journal.record(
        "0.0", SampleState.GENERATING, discarded=4, reason="the policy was told something else than the last time"
    )
    run.end(0)
    assert run.audit().violations == []


def test_a_sample_that_ends_twice_in_one_admission_is_found(run: Writer) -> None:
    run.admit(0)
    run.end(0)
    run.end(0, num=1)
    assert run.audit().violations == ["drawn twice: sample 0.0 ended twice"]
