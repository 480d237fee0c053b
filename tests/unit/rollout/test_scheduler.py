import asyncio
import json
from collections import Counter

import pytest
from rollout_fakes import Manual, Prompts, events, flat, make, num_filtered, settle, trajectory

from reroll.errors import RerollError, RewardError
from reroll.observe.journal import SampleState, read_journal
from reroll.types import Score, Status


async def test_a_step_gives_scored_groups_oldest_first(journal):
    scheduler = make(journal)
    groups = await scheduler.take(2)
    assert [(group.number, group.prompt.id, group.version) for group in groups] == [(0, "p/0", 0), (1, "p/1", 0)]
    assert [group.rewards for group in groups] == [(0.0, 1.0), (0.0, 1.0)]
    assert groups[0].trajectories[1].reward_parts == {"index": 1.0}
    scheduler.release(groups, version=1)
    later = await scheduler.take(2)
    assert [(group.number, group.version) for group in later] == [(2, 1), (3, 1)]
    await scheduler.close()


async def test_every_step_of_a_sample_is_in_the_journal(journal):
    scheduler = make(journal, prompts_per_step=1, group_size=1)
    groups = await scheduler.take(1)
    scheduler.release(groups, version=1)
    assert [state for id, state in events(journal) if id == "0.0"] == ["queued", "generating", "scoring", "done", "trained"]
    await scheduler.close()
    assert ("1.0", "aborted") in events(journal)


async def test_events_are_on_disk_before_their_groups_are_trained_on(journal):
    scheduler = make(journal)
    await scheduler.take(2)
    assert Counter(event.state for event in read_journal(journal.folder))[SampleState.DONE] == 4
    await scheduler.close()


async def test_a_sample_that_ended_is_on_disk_before_its_siblings_have(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    engine.end("0.1")
    await settle()
    done = [event.sample_id for event in read_journal(journal.folder) if event.state is SampleState.DONE]
    assert done == ["0.1"]
    take.cancel()
    await scheduler.close()


async def test_a_sample_is_scored_the_moment_it_ends(journal):
    engine = Manual()
    scored = []

    async def score(prompt, trajectory):
        scored.append(trajectory.id)
        return Score(value=1.0)

    scheduler = make(journal, episode=engine.episode, score=score)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    engine.end("1.1")
    await settle()
    assert scored == ["1.1"]
    assert not take.done()
    take.cancel()
    await scheduler.close()


async def test_seeds_depend_on_run_ticket_and_sibling_alone(journal):
    drawn = {}
    for seed in (0, 0, 1):
        engine = Manual()
        scheduler = make(journal, episode=engine.episode, seed=seed)
        take = asyncio.create_task(scheduler.take(2))
        await settle()
        drawn.setdefault(seed, []).append([seed for _, _, seed in engine.started])
        take.cancel()
        await scheduler.close()
    first, again = drawn[0]
    assert first == again
    assert len({*first, *drawn[1][0]}) == 8


async def test_groups_without_signal_are_dropped_when_asked(journal):
    async def score(prompt, trajectory):
        ticket, index = map(int, trajectory.id.split("."))
        return Score(value=float(index) if ticket >= 5 else 1.0)

    scheduler = make(journal, score=score, drop_zero_variance_groups=True)
    assert [group.number for group in await scheduler.take(2)] == [5, 6]
    assert num_filtered(journal) == 10
    await scheduler.close()


async def test_groups_without_signal_are_kept_by_default(journal):
    scheduler = make(journal, score=flat)
    assert [group.number for group in await scheduler.take(2)] == [0, 1]
    await scheduler.close()


async def test_oversampling_cancels_the_rest_and_queues_it_again(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode, oversample=1.5)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    assert len(engine.started) == 6
    engine.end("1.0", "1.1", "2.0", "2.1", "0.0")
    groups = await take
    assert [group.number for group in groups] == [1, 2]
    await settle()
    assert engine.cancelled == ["0.1"]
    assert {("0.0", "aborted"), ("0.1", "aborted")} <= set(events(journal))
    scheduler.release(groups, version=1)
    await settle()
    assert engine.started[6] == engine.started[0], "with the seeds that it had"
    await scheduler.close()


async def test_what_is_put_off_to_a_long_round_is_played_there_also_after_a_resume(journal):
    engine, options = Manual(), {"prompts_per_step": 1, "oversample": 2.0, "long_rounds": True, "max_tries": 2}
    scheduler = make(journal, episode=engine.episode, **options)
    take = asyncio.create_task(scheduler.take(1))
    await settle()
    engine.end("1.0", "1.1")
    groups = await take
    assert scheduler.stats().values_by_name()["rollout/deferred_groups"] == 1
    scheduler.release(groups, version=1)
    await settle()
    assert engine.started[4:] == engine.started[:2], "it alone, with the seeds that it had"
    state = json.loads(json.dumps(scheduler.state()))
    await scheduler.close()

    resumed_engine = Manual()
    resumed = make(journal, episode=resumed_engine.episode, **options)
    resumed.restore(state)
    take = asyncio.create_task(resumed.take(1))
    await settle()
    assert resumed_engine.started == engine.started[:2]
    resumed_engine.end("0.0", "0.1")
    resumed.release(await take, version=2)
    assert resumed.stats().values_by_name()["rollout/deferred_groups"] == 0
    await resumed.close()


async def test_a_run_without_long_rounds_has_no_metric_of_them(journal):
    scheduler = make(journal)
    assert "rollout/deferred_groups" not in scheduler.stats().values_by_name()
    await scheduler.close()


async def test_a_staleness_budget_samples_the_next_step_while_this_one_trains(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode, max_staleness=1)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    engine.end("0.0", "0.1", "1.0", "1.1")
    groups = await take
    engine.end("2.0", "2.1", "3.0", "3.1")
    await settle()
    scheduler.release(groups, version=1)
    late = await scheduler.take(2)
    assert [(group.number, group.version) for group in late] == [(2, 0), (3, 0)]
    stats = scheduler.stats().values_by_name()
    assert stats["rollout/staleness"] == 0.5
    assert stats["rollout/staleness_max"] == 1
    await scheduler.close()


async def test_samples_that_a_jump_of_versions_made_too_old_are_stopped(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode, max_staleness=1)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    engine.end("0.0", "0.1", "1.0", "1.1")
    scheduler.release(await take, version=2)
    await settle()
    assert engine.cancelled == ["2.0", "2.1", "3.0", "3.1"]
    assert [prompt for prompt, id, _ in engine.started[8:] if id.endswith(".0")] == ["p/2", "p/3", "p/4", "p/5"]
    await scheduler.close()


async def test_stats_tell_where_time_went_and_what_became_of_samples(journal):
    async def episode(prompt, id, seed):
        await asyncio.sleep(0.02)
        return trajectory(id)

    async def score(prompt, trajectory):
        await asyncio.sleep(0.01)
        if trajectory.id == "1.2":
            raise RewardError("no")
        return Score(value=0.0)

    scheduler = make(journal, episode=episode, score=score, group_size=3)
    scheduler.release(await scheduler.take(2), version=1)
    stats = scheduler.stats().values_by_name()
    assert 0.02 <= stats["time/generate_s"] <= stats["time/generate_s_max"]
    assert 0.01 <= stats["time/score_s"] <= stats["time/score_s_max"]
    assert stats["time/queue_s"] >= 0
    assert stats["rollout/trained_samples"] == 5
    assert stats["rollout/failed_samples"] == 1
    assert stats["rollout/failed_fraction"] == pytest.approx(1 / 6)
    assert scheduler.stats().values_by_name()["rollout/trained_samples"] == 0, "each call reports what is new"
    await scheduler.close()


async def test_a_resumed_run_draws_the_same_samples_and_loses_no_prompt(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode, max_staleness=1)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    engine.end("0.0", "0.1", "1.0", "1.1", "2.0")
    scheduler.release(await take, version=1)
    await settle()
    state = json.loads(json.dumps(scheduler.state()))
    await scheduler.close()

    resumed_engine = Manual()
    resumed = make(journal, episode=resumed_engine.episode, max_staleness=1)
    resumed.restore(state)
    take = asyncio.create_task(resumed.take(2))
    await settle()
    assert resumed_engine.started == engine.started[4:]
    resumed_engine.end("2.0", "2.1", "3.0", "3.1")
    groups = await take
    assert [group.version for group in groups] == [1, 1], "they are sampled anew, under the weights of now"
    assert groups[0].prompt == Prompts(first=2).next("d")
    resumed.release(groups, version=2)
    await settle()
    assert resumed_engine.started[-1][0] == "p/7"
    await resumed.close()


async def test_close_cancels_all_samples_and_waits_for_their_cleanup(journal):
    cleaned = []

    async def episode(prompt, id, seed):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(id)

    scheduler = make(journal, episode=episode)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    await scheduler.close()
    await scheduler.close()
    assert sorted(cleaned) == ["0.0", "0.1", "1.0", "1.1"]
    with pytest.raises(RerollError, match="closed"):
        await take
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancelled_take_loses_nothing(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scheduler.take(2), timeout=0.01)
    engine.end("0.0", "0.1", "1.0", "1.1")
    assert [group.number for group in await scheduler.take(2)] == [0, 1]
    await scheduler.close()


async def test_only_a_whole_step_can_be_taken(journal):
    scheduler = make(journal)
    with pytest.raises(ValueError, match="prompts_per_step=2 prompts at a time, got 3"):
        await scheduler.take(3)


async def test_thousands_of_samples_wait_at_once(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode, prompts_per_step=500, group_size=8)
    take = asyncio.create_task(scheduler.take(500))
    await settle()
    assert len(engine.waiting) == 4000
    engine.end(*engine.waiting)
    assert len(await take) == 500
    await scheduler.close()


async def test_no_sample_is_lost_or_trained_twice_in_a_long_unruly_run(journal):
    """Slow, failing, filtered and over-sampled groups together: the journal accounts for every sample."""

    async def episode(prompt, id, seed):
        await asyncio.sleep((seed % 97) ** 3 / 97**3 * 0.02)
        return trajectory(id) if seed % 11 else trajectory(id, Status.FAILED, reason="eleven")

    async def score(prompt, trajectory):
        await asyncio.sleep(0)
        return Score(value=float(sum(map(ord, trajectory.id)) % 3))

    scheduler = make(
        journal,
        episode=episode,
        score=score,
        prompts_per_step=4,
        group_size=3,
        max_staleness=2,
        oversample=1.5,
        take_window=2,
        drop_zero_variance_groups=True,
    )
    trained = []
    for step in range(25):
        groups = await scheduler.take(4)
        assert all(step - group.version <= 2 for group in groups)
        trained += [group.prompt.id for group in groups]
        scheduler.release(groups, version=step + 1)
    await scheduler.close()
    assert len(set(trained)) == len(trained) == 100
    ends = Counter(id for id, state in events(journal) if state in ("trained", "filtered", "aborted", "failed"))
    assert ends == Counter(id for id, state in events(journal) if state == "queued"), "every sample ends as often as it begins"


async def test_state_can_be_read_after_close_too(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    before = scheduler.state()
    take.cancel()
    await scheduler.close()
    assert scheduler.state() == before
    assert [row["number"] for row in before["queue"]] == [0, 1]


async def test_a_greedy_sample_gives_its_group_a_baseline_and_is_no_sibling(journal):
    async def greedy(prompt, id, seed):
        return trajectory(id)

    async def score(prompt, trajectory):
        return Score(value=float(trajectory.id.split(".")[1]))

    scheduler = make(journal, score=score, greedy=greedy)
    groups = await scheduler.take(2)
    assert [(group.rewards, group.baseline) for group in groups] == [((0.0, 1.0), 2.0)] * 2
    scheduler.release(groups, version=1)
    await scheduler.close()


async def test_a_group_whose_greedy_sample_failed_is_dropped(journal):
    async def greedy(prompt, id, seed):
        return trajectory(id, status=Status.FAILED if id.startswith("0.") else Status.COMPLETED)

    scheduler = make(journal, greedy=greedy)
    assert [group.number for group in await scheduler.take(2)] == [1, 2]
    await scheduler.close()


async def test_redundant_samples_are_aborted_once_their_group_is_whole(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode, prompts_per_step=1, extra_samples=2)
    take = asyncio.create_task(scheduler.take(1))
    await settle()
    assert [id for _, id, _ in engine.started] == ["0.0", "0.1", "0.2", "0.3"]
    engine.end("0.3")
    await settle()
    assert not take.done()
    engine.end("0.1")
    (group,) = await take
    assert [trajectory.id for trajectory in group.trajectories] == ["0.1", "0.3"]
    assert {id for id, state in events(journal) if state == "aborted"} == {"0.0", "0.2"}
    scheduler.release([group], version=1)
    await scheduler.close()


async def test_a_redundant_sample_takes_the_place_of_one_that_failed(journal):
    async def episode(prompt, id, seed):
        return trajectory(id, status=Status.FAILED if id.endswith(".0") else Status.COMPLETED)

    scheduler = make(journal, episode=episode, extra_samples=1)
    assert [len(group.trajectories) for group in await scheduler.take(2)] == [2, 2]
    await scheduler.close()


async def test_progress_counts_what_has_ended_and_what_is_being_scored(journal):
    manual, is_judged = Manual(), asyncio.Event()

    async def score(prompt, trajectory):
        if trajectory.id == "0.1":
            await is_judged.wait()
        return Score(value=float(trajectory.id.split(".")[1]))

    scheduler = make(journal, episode=manual.episode, score=score)
    taking = asyncio.create_task(scheduler.take(2))
    await settle()
    assert scheduler.progress() == "generating: 0/4 samples have ended"
    manual.end("0.0", "0.1")
    await settle()
    assert scheduler.progress() == "generating: 1/4 samples have ended, 1 being scored"
    is_judged.set()
    manual.end("1.0", "1.1")
    assert len(await taking) == 2
    await scheduler.close()


async def test_redundant_samples_are_told_apart_by_when_they_ended(journal):
    manual = Manual()

    async def score(prompt, trajectory):
        return Score(value=1.0 - int(trajectory.id.split(".")[1]) / 10)

    scheduler = make(journal, episode=manual.episode, score=score, prompts_per_step=1, extra_samples=1)
    taking = asyncio.create_task(scheduler.take(1))
    await settle()
    manual.end("0.2")
    await settle()
    manual.end("0.0")
    (group,) = await taking
    assert [one.id for one in group.trajectories] == ["0.0", "0.2"]
    told = scheduler.stats().values_by_name()
    assert (told["rollout/early_reward"], told["rollout/late_reward"]) == (0.8, 1.0)
    assert told["rollout/early_tokens"] == told["rollout/late_tokens"] == 2
    await scheduler.close()


async def test_without_redundant_samples_nothing_is_said_of_their_order(journal):
    scheduler = make(journal)
    await scheduler.take(2)
    assert not any("early" in name for name in scheduler.stats().values_by_name())
    await scheduler.close()


async def test_groups_that_are_certain_to_be_in_the_step_are_handed_out_as_they_end(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode, max_staleness=1)
    parts = []

    async def take():
        async for part in scheduler.take_parts(2):
            parts.append([group.number for group in part])

    taking = asyncio.create_task(take())
    await settle()
    engine.end("2.0", "2.1")
    await settle()
    assert parts == [], "a group of the next step, while none of this one has ended"
    engine.end("1.0", "1.1")
    await settle()
    assert parts == [[1]]
    engine.end("0.0", "0.1")
    await taking
    assert parts == [[1], [0]]
    await scheduler.close()


async def test_of_surplus_groups_the_first_that_end_are_certain_unless_one_may_not_wait(journal):
    engine = Manual()
    scheduler = make(journal, episode=engine.episode, oversample=1.5, max_tries=1)
    parts = []

    async def take():
        async for part in scheduler.take_parts(2):
            parts.append([group.number for group in part])

    taking = asyncio.create_task(take())
    await settle()
    engine.end("2.0", "2.1")
    await settle()
    assert parts == [], "0 and 1 are on their last try: both are waited for"
    engine.end("1.0", "1.1", "0.0", "0.1")
    await taking
    assert [number for part in parts for number in part] == [0, 1]
    await scheduler.close()
