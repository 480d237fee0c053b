"""What a run's roles did, as the journal has it: leases, engines, faults, and the advantage of each sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reroll.algo.episodes import Episodes
from reroll.config.load import parse_config
from reroll.infer.worker import EngineStatus
from reroll.infer.worker_state import WorkerState
from reroll.observe.journal import STEPPED, TAKEN, Journal, SampleState, read_journal
from reroll.pipeline.run import train
from reroll.tokens.batch import Batch, pack
from reroll.tokens.samples import rows_of
from reroll.types import Completion, FinishReason, Group, Prompt, Status, Trajectory, Turn
from reroll_zoo.audit.audit import audit
from reroll_zoo.run_watch import MAX_RUNS, RunWatch, advantages_of
from reroll_zoo.samples.activity import ACTIVITY, CREDITED, MAX_ROWS, Activity, RoleSpan
from reroll_zoo.samples.lifecycles import Lifecycles


class Engines:
    """What the watch asks of a router: its engines' states."""

    def __init__(self, *states: WorkerState) -> None:
        self.states = list(states)


def status(busy_s: float) -> EngineStatus:
    about = dict.fromkeys(("num_tokens", "num_prefill_tokens", "num_reused_tokens", "num_steps", "num_unfinished"), 0)
    return EngineStatus(**about, busy_s=busy_s, max_running=8)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal") as opened:
        yield opened


def told(journal: Journal) -> list[dict[str, Any]]:
    journal.flush()
    return [dict(event.detail) for event in read_journal(journal.folder) if event.state == ACTIVITY]


def test_engines_are_told_by_their_reports_and_idleness_once(journal: Journal) -> None:
    one, other = WorkerState(0, load=3, status=status(10.0)), WorkerState(1)
    watch = RunWatch(journal, Engines(one, other))  # type: ignore[arg-type]
    watch.look(0.0)
    one.status = status(10.5)
    watch.look(1.0)
    watch.look(1.0)  # Still at work, and no report of it.
    one.status, one.load = status(12.0), 0
    watch.look(1.0)
    for _ in range(3):
        watch.look(1.0)
    assert told(journal) == [
        {"busy": [None, 0], "load": [3, 0]},
        {"busy": [50, 0], "load": [3, 0]},
        {"busy": [None, 0], "load": [3, 0]},
        {"busy": [75, 0], "load": [0, 0]},
        {"busy": [0, 0], "load": [0, 0]},
    ]


def test_what_becomes_of_an_engine_is_told_once(journal: Journal) -> None:
    engines = Engines(WorkerState(0), WorkerState(1))
    watch = RunWatch(journal, engines)  # type: ignore[arg-type]
    watch.look(0.0)
    engines.states[1].is_dead = True
    watch.look(1.0)
    watch.look(1.0)
    engines.states[1] = WorkerState(1)
    engines.states[0] = WorkerState(0)  # Lost and started anew between two looks.
    watch.look(1.0)
    engines.states.append(WorkerState(2, has_joined=True))
    watch.look(1.0)
    fates = [(detail["engine"], detail["fate"]) for detail in told(journal)]
    assert fates == [(1, "lost"), (0, "lost"), (0, "restarted"), (1, "restarted"), (2, "joined")]


def group_of(*lengths: int) -> Group:
    trajectories = []
    for index, length in enumerate(lengths):
        completion = Completion(
            token_ids=tuple(range(10, 10 + length)),
            logprobs=(-0.5,) * length,
            finish_reason=FinishReason.STOP,
            versions=((0, length),),
        )
        turns = (Turn(prompt_ids=(1, 2), completion=completion, text=""),)
        trajectories.append(Trajectory(id=f"7.{index}", turns=turns, status=Status.COMPLETED, reward=float(index)))
    return Group(number=7, prompt=Prompt(id="p", messages=(), domain="d"), trajectories=tuple(trajectories), version=0)


def trained(group: Group, advantage: dict[int, list[float]], masked: dict[int, list[int]]) -> tuple[Batch, Episodes]:
    """The batch of a group with these advantages by sample, and these of its written tokens taken out of the loss."""
    samples, episodes = rows_of([group])
    batch = pack(samples)
    values, mask = batch.advantage.clone(), batch.loss_mask.clone()
    for number, wanted in advantage.items():
        places = (episodes.turn_episode[episodes.token_turn.clamp(min=0)] == number) & (episodes.token_turn >= 0)
        values[places] = torch.tensor(wanted)
        mask[places.nonzero().squeeze(1)[masked.get(number, [])]] = False
    return batch.replace(advantage=values, loss_mask=mask), episodes


def test_advantages_are_a_number_runs_where_tokens_differ_and_null_where_none_is_in_the_loss() -> None:
    group = group_of(3, 4, 2, 0)
    advantage = {0: [0.123456] * 3, 1: [1.0, 1.0, -2.0, -2.0], 2: [5.0, 5.0]}
    batch, episodes = trained(group, advantage, {1: [2], 2: [0, 1]})
    assert dict(advantages_of(batch, episodes)) == {0: 0.1235, 1: [[1.0, 2], [None, 1], [-2.0, 1]], 2: None}


def test_of_many_different_advantages_the_means_of_stretches_are_told() -> None:
    group = group_of(1000)
    values = [math.sin(place / 50) for place in range(1000)]
    [(_, runs)] = advantages_of(*trained(group, {0: values}, {}))
    assert isinstance(runs, list)
    assert len(runs) == MAX_RUNS
    assert sum(count for _, count in runs) == 1000
    assert sum(mean * count for mean, count in runs) == pytest.approx(sum(values), abs=0.2)


def test_a_run_tells_its_leases_its_evaluations_and_every_advantage_and_stands_the_audit(
    rlvr_tree: dict[str, Any], tmp_path: Path
) -> None:
    rlvr_tree["checkpoint"] = {"every": 2}
    folder = train(parse_config(rlvr_tree, folder=tmp_path), code_folder=tmp_path).folder
    events = list(read_journal(folder / "journal"))
    roles = [(event.detail["role"], event.detail["is_on"]) for event in events if "role" in event.detail]
    step = [("policy", True), ("policy", False), ("engine", True), ("engine", False)]
    evaluation, checkpoint = [("evaluation", True), ("evaluation", False)], [("checkpoint", True), ("checkpoint", False)]
    push = step[2:]
    assert roles == [*push, *evaluation, *step, *step, *checkpoint, *step, *evaluation, *checkpoint]
    kinds = [event.state for event in events if event.state in (TAKEN, STEPPED) or "role" in event.detail]
    first = kinds.index(TAKEN)
    assert kinds[first : first + 6] == [TAKEN, ACTIVITY, ACTIVITY, ACTIVITY, ACTIVITY, STEPPED]
    was_trained = {event.sample_id for event in events if event.state is SampleState.TRAINED}
    details = [event.detail for event in events if event.state == CREDITED]
    credited = {id: value for detail in details for id, value in zip(detail["samples"], detail["advantages"], strict=True)}
    assert credited.keys() == was_trained
    lives = Lifecycles()
    lives.take(events)
    by_group: dict[str, list[float]] = {}
    for id, advantage in credited.items():
        by_group.setdefault(id.partition(".")[0], []).append(advantage)
        life = lives.find(id)
        assert life is not None
        assert life.advantage == advantage
    assert all(abs(sum(values)) < 1e-2 for values in by_group.values())  # GRPO: relative to their group.
    assert audit(folder / "journal", max_staleness=0).violations == []


def test_an_advantage_takes_few_bytes(journal: Journal) -> None:
    """Beside some 200 bytes for all else that is told of a sample, and its tokens."""
    group = group_of(*[8] * 512)
    batch, episodes = trained(group, {number: [math.sin(number)] * 8 for number in range(512)}, {})
    RunWatch(journal, Engines()).credited(batch, episodes, [group])  # type: ignore[arg-type]
    journal.flush()
    [events] = journal.folder.glob("*.jsonl")
    assert events.stat().st_size / 512 < 18


def test_leases_end_with_the_life_that_held_them(tmp_path: Path) -> None:
    folder, times = tmp_path / "journal", iter(range(100))
    for _ in range(2):
        with Journal(folder, clock=lambda: float(next(times))) as journal:
            journal.record("", ACTIVITY, role="policy", is_on=True)
    activity = Activity()
    for event in read_journal(folder):
        if event.state == ACTIVITY or event.state == "begun":
            activity.take(event)
    [first, second] = activity.spans(last_s=9.0)
    assert first.role == second.role == "policy"
    assert first.start_s == first.end_s < second.start_s  # Nothing is known of the first after it began.
    assert second == RoleSpan("policy", second.start_s, 9.0)


def test_the_newest_rows_are_kept_under_the_numbers_that_they_had(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> None:
    assert MAX_ROWS > 10_000
    monkeypatch.setattr("reroll_zoo.samples.activity.MAX_ROWS", 4)
    for place in range(6):
        journal.record("", ACTIVITY, busy=[place], load=[0])
    journal.flush()
    activity = Activity()
    for event in read_journal(journal.folder):
        activity.take(event)
    assert len(activity) == 7  # With the journal's beginning.
    following, rows = activity.since(0, limit=3)
    assert ([row[2] for row in rows], following) == ([[2], [3], [4]], 6)
    assert [row[2] for row in activity.since(following, limit=3)[1]] == [[5]]
    assert activity.since(7, limit=3) == (7, [])
