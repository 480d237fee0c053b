"""Groups that are sent back, too old or one too many: what was written for them is not lost while it is fresh enough."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from token_runs import TokenRun, length_of, token

from reroll.observe.journal import SampleState, read_journal
from reroll.rollout.play import stable_seed
from reroll_zoo.audit.audit import audit

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # scripts, no package

from two_sample import p_value


def trained_rows(groups):
    return {trajectory.id: trajectory for group in groups for trajectory in group.trajectories}


async def run(journal, *, num_steps, num_prompts=3, **config):
    """All that was trained on, by id."""
    one = TokenRun(journal, prompts_per_step=num_prompts, group_size=3, **config)
    trained = {}
    for step in range(num_steps):
        groups = await one.scheduler.take(num_prompts)
        for group in groups:
            for trajectory in group.trajectories:
                assert group.version <= trajectory.versions.oldest
                assert step - trajectory.versions.oldest <= config["max_staleness"]
        trained |= trained_rows(groups)
        for _ in range(6):
            await asyncio.sleep(0)  # While it trains.
        one.release(groups, version=step + 1)
    stats = one.scheduler.stats()
    await one.scheduler.close()
    journal.flush()
    return one, trained, stats


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
async def test_over_sampled_groups_go_on_where_the_budget_allows(journal, max_staleness):
    _, trained, stats = await run(journal, num_steps=40, max_staleness=max_staleness, oversample=2.0, max_tries=9)
    assert stats["rollout/continued_tokens"].value > 0
    assert stats["rollout/recalled_samples"].value > 0  # Siblings of the slow ones, which had ended.
    for id, trajectory in trained.items():
        number, index = map(int, id.split("."))
        seed = stable_seed(0, number, index)
        [turn] = trajectory.turns
        assert turn.completion.token_ids == tuple(token(seed, place) for place in range(length_of(seed)))
    found = audit(journal.folder, max_staleness=max_staleness)
    assert found.violations == []
    assert found.num_discarded_tokens == stats["rollout/discarded_tokens"].value
    assert found.num_continued_tokens == stats["rollout/continued_tokens"].value


async def test_what_goes_on_is_written_again_only_as_far_as_it_was_not_told(journal):
    one, _, _ = await run(journal, num_steps=40, max_staleness=3, oversample=2.0, max_tries=9)
    events = list(read_journal(journal.folder))
    discarded = {event.sample_id for event in events if "discarded" in event.detail}
    num_tries = {}
    for event in events:
        if event.state is SampleState.QUEUED:
            num_tries[event.sample_id] = num_tries.get(event.sample_id, 0) + 1
    again = [(sample, num) for (sample, _, _), num in one.engine.written.items() if num > 1 and sample not in discarded]
    assert max(num_tries.values()) > 1
    # Of each interruption at most the last few tokens, which the engine had not told of.
    assert len(again) <= 4 * sum(num - 1 for num in num_tries.values())
    assert all(num <= num_tries[sample] for sample, num in again)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_over_sampling_trains_on_what_was_drawn_slow_or_quick(journal, max_staleness):
    _, trained, _ = await run(journal, num_steps=60, max_staleness=max_staleness, oversample=2.0)
    begun = {event.sample_id for event in read_journal(journal.folder) if event.state is SampleState.QUEUED}
    # All but the groups of the coming steps and the surplus, three samples each.
    assert len(begun - trained.keys()) <= 3 * 3 * (max_staleness + 2)
    lengths = [trajectory.num_completion_tokens for trajectory in trained.values()]
    seeds = [stable_seed(0, number, index) for number in range(1000) for index in range(3)]
    assert p_value(lengths, [length_of(seed) for seed in seeds], rng=np.random.default_rng(0)) > 0.01


async def test_without_a_budget_over_sampled_groups_begin_anew_with_their_seeds(journal):
    _, _, stats = await run(journal, num_steps=20, max_staleness=0, oversample=2.0)
    assert stats["rollout/continued_tokens"].value == stats["rollout/recalled_samples"].value == 0
    assert stats["rollout/discarded_tokens"].value > 0
    queued = [event for event in read_journal(journal.folder) if event.state is SampleState.QUEUED]
    assert len({event.sample_id for event in queued}) < len(queued)
    found = audit(journal.folder, max_staleness=0)
    assert found.violations == []
    assert found.num_discarded_tokens == stats["rollout/discarded_tokens"].value


async def test_a_group_that_fell_behind_goes_on_with_what_is_fresh_enough(journal):
    """Versions jump, so that groups are too old when they are released; some of their samples began later."""
    one = TokenRun(journal, prompts_per_step=2, group_size=3, max_staleness=3, take_window=2)
    version = 0
    for _ in range(30):
        groups = await one.scheduler.take(2)
        for group in groups:
            assert all(group.version <= trajectory.versions.oldest for trajectory in group.trajectories)
            assert version - group.version <= 3
        version += 2
        one.release(groups, version=version)
    stats = one.scheduler.stats()
    await one.scheduler.close()
    assert stats["rollout/continued_tokens"].value > 0
    assert stats["rollout/discarded_tokens"].value > 0
