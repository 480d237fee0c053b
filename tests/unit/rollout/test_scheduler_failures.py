"""What goes wrong becomes a status or an error with a reason; never a hang."""

import asyncio
from itertools import count

import pytest
from rollout_fakes import Manual, Prompts, events, flat, make, num_filtered, settle, trajectory

from reroll.errors import EnvError, RerollError, RewardError, RunFolderError, TooManyFailures, WorkerDied
from reroll.observe.journal import SampleState, read_journal
from reroll.rewards.cluster import RewardCluster
from reroll.rewards.meter import RewardMeter
from reroll.types import Score, Status, Trajectory


async def test_a_failed_sample_is_left_out_of_its_group(journal):
    async def episode(prompt, id, seed):
        return trajectory(id, Status.FAILED, reason="boom") if id == "0.1" else trajectory(id)

    scheduler = make(journal, episode=episode, group_size=3)
    groups = await scheduler.take(2)
    assert [item.id for item in groups[0].trajectories] == ["0.0", "0.2"]
    scheduler.release(groups, version=1)
    assert [state for id, state in events(journal) if id == "0.1"] == ["queued", "generating", "failed"]
    await scheduler.close()


async def test_a_group_with_one_usable_sample_is_dropped_and_its_slot_refilled(journal):
    async def episode(prompt, id, seed):
        if id == "0.1":
            raise EnvError("the environment broke")
        return trajectory(id)

    scheduler = make(journal, episode=episode)
    groups = await scheduler.take(2)
    assert [group.number for group in groups] == [1, 2]
    assert ("0.0", "filtered") in events(journal)
    await scheduler.close()


async def test_a_group_of_one_needs_no_sibling(journal):
    scheduler = make(journal, group_size=1)
    assert [len(group.trajectories) for group in await scheduler.take(2)] == [1, 1]
    await scheduler.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_reward_that_is_not_a_number_fails_its_sample(journal, value):
    async def score(prompt, trajectory):
        return Score(value=value if trajectory.id == "0.0" else 1.0)

    scheduler = make(journal, score=score, group_size=3)
    groups = await scheduler.take(2)
    assert [item.id for item in groups[0].trajectories] == ["0.1", "0.2"]
    await scheduler.close()


async def test_a_reward_error_fails_its_sample_only(journal):
    async def score(prompt, trajectory):
        if trajectory.id == "1.2":
            raise RewardError("timed out after 10 s")
        return Score(value=1.0)

    scheduler = make(journal, score=score, group_size=3)
    groups = await scheduler.take(2)
    assert [len(group.trajectories) for group in groups] == [3, 2]
    failed = [event for event in read_journal(journal.folder) if event.state is SampleState.FAILED]
    assert [(event.sample_id, event.detail["reason"]) for event in failed] == [("1.2", "timed out after 10 s")]
    await scheduler.close()


async def test_a_task_that_never_gives_signal_stops_the_run_with_the_reason(journal):
    scheduler = make(journal, score=flat, drop_zero_variance_groups=True)
    with pytest.raises(RerollError, match=r"100 groups in a row were dropped.*too easy or too hard"):
        await scheduler.take(2)
    await scheduler.close()


async def test_a_task_that_gives_signal_now_and_then_goes_on(journal):
    async def score(prompt, trajectory):
        ticket, index = map(int, trajectory.id.split("."))
        return Score(value=float(index) if ticket % 30 == 0 else 1.0)

    scheduler = make(journal, score=score, drop_zero_variance_groups=True)
    for version in range(1, 6):
        scheduler.release(await scheduler.take(2), version=version)
    assert num_filtered(journal) > 2 * 200
    await scheduler.close()


async def test_too_many_failures_stop_the_run_and_name_the_reasons(journal):
    numbers = count()

    async def episode(prompt, id, seed):
        number = next(numbers)
        if number % 4 == 0:
            return trajectory(id)
        return trajectory(id, Status.FAILED, reason="out of rope" if number % 4 == 1 else "no such file")

    scheduler = make(journal, episode=episode, group_size=8)
    with pytest.raises(TooManyFailures, match=r"12 of the last 16 samples failed:\n  8 x no such file\n  4 x out of rope"):
        await scheduler.take(2)
    await scheduler.close()


async def test_failures_below_the_limit_do_not_stop_the_run(journal):
    async def episode(prompt, id, seed):
        return trajectory(id) if int(id.split(".")[1]) % 2 else trajectory(id, Status.FAILED, reason="odd")

    scheduler = make(journal, episode=episode, group_size=8)
    for version in range(1, 5):
        scheduler.release(await scheduler.take(2), version=version)
    await scheduler.close()


async def test_a_run_in_which_all_samples_fail_ends_even_if_any_share_may_fail(journal):
    async def episode(prompt, id, seed):
        return trajectory(id, Status.FAILED, reason="always")

    scheduler = make(journal, episode=episode, max_failed_fraction=1.0)
    with pytest.raises(TooManyFailures, match="always"):
        await scheduler.take(2)
    await scheduler.close()


async def test_an_empty_completion_fails_with_a_reason(journal):
    async def episode(prompt, id, seed):
        return Trajectory(id=id, turns=(), status=Status.COMPLETED)

    scheduler = make(journal, episode=episode)
    with pytest.raises(TooManyFailures, match="16 x it ended as completed with nothing written"):
        await scheduler.take(2)
    await scheduler.close()


@pytest.mark.parametrize("error", [WorkerDied("engine 0 is gone"), KeyError("a bug")])
@pytest.mark.parametrize("where", ["episode", "score"])
async def test_an_unexpected_exception_surfaces_from_take(journal, error, where):
    async def broken(*args):
        await asyncio.sleep(0)
        raise error

    engine = Manual()

    async def first_breaks(prompt, id, seed):
        return await (broken() if id == "0.0" and where == "episode" else engine.episode(prompt, id, seed))

    scheduler = make(journal, episode=first_breaks, score=broken if where == "score" else flat)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    if where == "score":
        engine.end("1.0")
    with pytest.raises(type(error)) as caught:
        await asyncio.wait_for(take, timeout=60)
    assert caught.value is error
    with pytest.raises(type(error)):
        await scheduler.take(2)
    await scheduler.close()


async def test_a_prompt_source_that_breaks_during_a_refill_surfaces_from_take(journal):
    class Broken(Prompts):
        def next(self, domain):
            if self.position == 2:
                raise RunFolderError("the disk is gone")
            return super().next(domain)

    scheduler = make(journal, prompts=Broken(), score=flat, drop_zero_variance_groups=True)
    with pytest.raises(RunFolderError, match="the disk is gone"):
        await asyncio.wait_for(scheduler.take(2), timeout=60)
    await scheduler.close()


async def test_a_sample_cancelled_from_outside_does_not_hang_the_run(journal):
    async def episode(prompt, id, seed):
        raise asyncio.CancelledError

    scheduler = make(journal, episode=episode)
    with pytest.raises(RerollError, match=r"sample 0\.0 was cancelled from outside"):
        await asyncio.wait_for(scheduler.take(2), timeout=60)
    await scheduler.close()


async def test_a_sample_that_ignores_its_cancellation_changes_nothing(journal):
    async def stubborn(prompt, id, seed):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return trajectory(id)

    scheduler = make(journal, episode=stubborn)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    take.cancel()
    await scheduler.close()
    assert [state for id, state in events(journal) if id == "0.0"] == ["queued", "generating", "aborted"]


async def test_a_reward_that_raises_on_every_sample_ends_the_run_with_what_it_raised(journal):
    async def buggy(prompt, trajectory):
        raise ZeroDivisionError("a bug")

    rewards = RewardCluster({"d": buggy}, {}, RewardMeter())
    scheduler = make(journal, score=rewards.score)
    with pytest.raises(TooManyFailures, match=r"16 x ZeroDivisionError: a bug \(.*test_scheduler_failures.py:\d+\)"):
        await asyncio.wait_for(scheduler.take(2), 60)
    await scheduler.close()


async def test_a_reward_that_raises_on_one_text_fails_that_sample_only(journal):
    async def fragile(prompt, trajectory):
        if trajectory.id == "0.0":
            raise ZeroDivisionError("a bug")
        return Score(value=1.0)

    scheduler = make(journal, score=RewardCluster({"d": fragile}, {}, RewardMeter()).score, group_size=3)
    groups = await scheduler.take(2)
    assert [item.id for item in groups[0].trajectories] == ["0.1", "0.2"]
    await scheduler.close()


async def test_what_the_journal_cannot_write_down_ends_the_run_and_is_not_passed_over(journal):
    async def score(prompt, trajectory):
        return Score(value=1.0, info={"odd": object()})

    scheduler = make(journal, score=score)
    with pytest.raises(TypeError, match="not JSON serializable"):
        await asyncio.wait_for(scheduler.take(2), timeout=30)
    await scheduler.close()
