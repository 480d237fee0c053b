"""Several domains in one rollout: group sizes of their own, the mix that is trained on, and what the prompts are told."""

import asyncio
import json
import logging
from collections import Counter

from rollout_fakes import Manual, Prompts, at_once, by_index, make, settle, trajectory

from reroll.types import Score, Status


def domains(groups):
    return "".join(group.prompt.domain for group in groups)


def no_signal_in(domain):
    async def score(prompt, trajectory):
        return Score(value=1.0 if prompt.domain == domain else float(trajectory.id.split(".")[1]))

    return score


async def test_each_domain_draws_groups_of_its_own_size(journal):
    scheduler = make(journal, prompts=Prompts(domains="ab"), domains={"a": {"group_size": 5}})
    groups = await scheduler.take(2)
    assert {group.prompt.domain: len(group.trajectories) for group in groups} == {"a": 5, "b": 2}
    await scheduler.close()


async def test_redundant_samples_come_on_top_of_the_domains_own_group_size(journal):
    engine = Manual()
    scheduler = make(
        journal, prompts=Prompts(domains="ab"), episode=engine.episode, extra_samples=1, domains={"a": {"group_size": 3}}
    )
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    assert Counter(id.split(".")[0] for _, id, _ in engine.started) == {"0": 4, "1": 3}
    engine.end("0.0", "0.1", "0.3", "1.0", "1.2")
    assert [len(group.trajectories) for group in await take] == [3, 2]
    await scheduler.close()


async def test_the_mix_of_what_is_trained_on_holds_though_one_domain_drops_most_of_its_groups(journal):
    async def score(prompt, trajectory):
        ticket, index = map(int, trajectory.id.split("."))
        return Score(value=1.0 if prompt.domain == "a" and ticket % 8 else float(index))

    scheduler = make(journal, prompts=Prompts(domains="ab"), score=score, drop_zero_variance_groups=True, max_staleness=1)
    for step in range(5):
        groups = await scheduler.take(2)
        assert sorted(domains(groups)) == ["a", "b"]
        scheduler.release(groups, version=step + 1)
    stats = scheduler.stats().values_by_name()
    assert stats["rollout/a/trained_groups"] == stats["rollout/b/trained_groups"] == 5
    assert stats["rollout/a/dropped_groups"] > 10
    assert stats["rollout/b/dropped_groups"] == stats["rollout/a/ceded_groups"] == 0
    await scheduler.close()


async def test_a_domain_without_signal_cedes_its_share_and_a_warning_names_it_once_a_step(journal, caplog):
    scheduler = make(
        journal,
        prompts=Prompts(domains="ab"),
        score=no_signal_in("a"),
        prompts_per_step=4,
        drop_zero_variance_groups=True,
        max_drops=2,
    )
    with caplog.at_level(logging.WARNING):
        groups = await scheduler.take(4)
    assert domains(groups) == "bbbb"
    (record,) = caplog.records
    assert "domain a loses slots of this step to the others" in record.getMessage()
    assert "all rewards of the group are equal" in record.getMessage()
    assert scheduler.stats().values_by_name()["rollout/a/ceded_groups"] == 2
    caplog.clear()
    scheduler.release(groups, version=1)
    with caplog.at_level(logging.WARNING):
        await scheduler.take(4)
    assert len(caplog.records) == 1
    await scheduler.close()


async def test_the_prompts_are_told_of_groups_when_they_are_trained_on_or_dropped_and_never_twice(journal):
    async def score(prompt, trajectory):
        return Score(value=1.0 if prompt.id == "p/0" else float(trajectory.id.split(".")[1]))

    prompts = Prompts()
    scheduler = make(journal, prompts=prompts, score=score, drop_zero_variance_groups=True)
    groups = await scheduler.take(2)
    assert prompts.seen == [("p/0", (1.0, 1.0))], "the others may yet be sampled again, if the run ends here"
    scheduler.release(groups, version=1)
    assert prompts.seen[1:] == [("p/1", (0.0, 1.0)), ("p/2", (0.0, 1.0))]
    await scheduler.close()


async def test_the_prompts_are_told_only_what_usable_samples_earned(journal):
    async def episode(prompt, id, seed):
        return trajectory(id, status=Status.FAILED if id == "0.1" else Status.COMPLETED)

    prompts = Prompts()
    scheduler = make(journal, prompts=prompts, episode=episode, group_size=3)
    scheduler.release(await scheduler.take(2), version=1)
    assert prompts.seen == [("p/0", (0.0, 2.0)), ("p/1", (0.0, 1.0, 2.0))]
    await scheduler.close()


async def test_a_resumed_run_of_several_domains_draws_the_same_samples(journal):
    first, second = Manual(), Manual()
    scheduler = make(journal, prompts=Prompts(domains="abb"), episode=first.episode, max_staleness=1)
    take = asyncio.create_task(scheduler.take(2))
    await settle()
    first.end("0.0", "0.1", "1.0", "1.1")
    scheduler.release(await take, version=1)
    await settle()
    state = json.loads(json.dumps(scheduler.state()))
    await scheduler.close()
    resumed = make(journal, prompts=Prompts(domains="abb"), episode=second.episode, max_staleness=1)
    resumed.restore(state)
    take = asyncio.create_task(resumed.take(2))
    await settle()
    assert sorted(second.started) == sorted(first.started[4:])
    take.cancel()
    await resumed.close()


async def test_with_one_domain_groups_are_not_counted_by_domain(journal):
    scheduler = make(journal, episode=at_once, score=by_index)
    scheduler.release(await scheduler.take(2), version=1)
    assert not any("_groups" in name for name in scheduler.stats())
    await scheduler.close()
