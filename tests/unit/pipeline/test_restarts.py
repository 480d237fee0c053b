"""How often a run is started anew, and because of what."""

from __future__ import annotations

import os

import pytest

from reroll.errors import NoRoom, RerollError, TooManyFailures, TrainingDiverged, WorkerDied, WorkerError
from reroll.pipeline.restarts import MAX_PAUSE_S, PAUSE_GROWTH, PAUSE_S, Restarts

DEATH = WorkerDied("worker policy[1] is gone: its process died (SIGKILL). Free memory.")


def begun(limit: int) -> Restarts:
    restarts = Restarts()
    restarts.begin(limit)
    return restarts


def test_a_run_that_gets_nowhere_is_started_anew_as_often_as_allowed() -> None:
    restarts = begun(3)
    assert [restarts.heal(DEATH) for _ in range(5)] == [True, True, True, False, False]
    assert restarts.num == 3


def test_a_run_that_gets_further_each_time_goes_on_for_ever() -> None:
    restarts = begun(1)
    for step in range(1, 50):
        assert restarts.heal(DEATH)
        restarts.reached(step)
    assert restarts.num == 49


def test_steps_that_are_done_again_are_no_progress() -> None:
    restarts = begun(1)
    restarts.reached(7)
    assert restarts.heal(DEATH)
    restarts.reached(6)
    restarts.reached(7)
    assert not restarts.heal(DEATH)


def test_a_run_that_has_not_begun_is_not_started_anew() -> None:
    assert not Restarts().again()


@pytest.mark.parametrize(
    "error",
    [WorkerError("a bug"), TooManyFailures("all"), TrainingDiverged("nan"), NoRoom("at the start"), RerollError("other")],
)
def test_what_the_users_code_or_config_does_is_not_tried_again(error: RerollError) -> None:
    restarts = begun(3)
    assert not restarts.heal(error)
    assert restarts.num == 0


def test_that_there_is_no_room_for_a_restart_is_a_fault_of_machines() -> None:
    restarts = begun(3)
    assert restarts.heal(DEATH)
    assert restarts.heal(NoRoom("Ray has no room"))


def test_the_pause_grows_up_to_a_bound_and_is_short_again_after_progress() -> None:
    restarts = begun(20)
    pauses = []
    for _ in range(20):
        restarts.again()
        pauses.append(restarts.pause_s)
    assert pauses[:3] == [PAUSE_S, PAUSE_GROWTH * PAUSE_S, PAUSE_GROWTH**2 * PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S
    restarts.reached(1)
    restarts.again()
    assert restarts.pause_s == PAUSE_S


def test_what_a_forked_process_counts_is_known_when_it_is_gone() -> None:
    restarts = Restarts()
    pid = os.fork()
    if pid == 0:
        restarts.begin(2)
        restarts.reached(5)
        os._exit(0)
    os.waitpid(pid, 0)
    assert restarts.again()
    restarts.reached(5)
    assert restarts.again()
    assert not restarts.again()
