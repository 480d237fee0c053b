"""Kills at any moment, over-sampling and the dynamic filter together: each prompt that was drawn has one fate, and what had
ended before a kill is not drawn again."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from rollout_fakes import COMPLETION, Prompts, make

from reroll.observe.journal import Journal, SampleState, read_journal
from reroll.types import Score, Status, Trajectory, Turn
from reroll_zoo.audit.audit import audit

NUM_STEPS, CHECKPOINT_EVERY = 12, 3


class Process:
    """One life of a run: it starts from a checkpoint, and what it did since the last one dies with it."""

    def __init__(self, journal, rng, saved, *, resumes=True, **config):
        self.prompts = Prompts()
        self.rng = rng
        self.trained, self.dropped = [], []
        self.prompts.record_rewards = self.record_rewards
        self.is_training = False
        self.played = []
        self.scheduler = make(journal, episode=self.episode, score=self.score, prompts=self.prompts, group_size=3, **config)
        self.num_steps = 0
        if saved is not None:
            saved = json.loads(saved)
            self.num_steps, self.trained, self.dropped = saved["steps"], saved["trained"], saved["dropped"]
            self.scheduler.restore(saved["state"])
        elif resumes:
            self.scheduler.take_up(version=0)

    def record_rewards(self, prompt, rewards):
        (self.trained if self.is_training else self.dropped).append(prompt.id)

    async def episode(self, prompt, id, seed):
        for _ in range(self.rng.randrange(20)):
            await asyncio.sleep(0)
        self.played.append((id, prompt.id))
        completion = replace(COMPLETION, versions=((self.num_steps, 2),))
        return Trajectory(id=id, turns=(Turn(prompt_ids=(1,), completion=completion, text="x"),), status=Status.COMPLETED)

    async def score(self, prompt, trajectory):
        is_flat = int(prompt.id.split("/")[1]) % 3 == 0
        return Score(value=1.0 if is_flat else float(trajectory.id.split(".")[1]))

    async def run(self, until):
        """Steps until the kill, which comes in the middle of a step; what the last checkpoint holds."""
        saved = None
        while self.num_steps < min(until, NUM_STEPS):
            groups = await self.scheduler.take(4)
            for _ in range(self.rng.randrange(10)):
                await asyncio.sleep(0)
            self.num_steps += 1
            self.is_training = True
            self.scheduler.release(groups, version=self.num_steps)
            self.is_training = False
            if self.num_steps % CHECKPOINT_EVERY == 0:
                saved = json.dumps(
                    {
                        "steps": self.num_steps,
                        "trained": self.trained,
                        "dropped": self.dropped,
                        "state": self.scheduler.state(),
                    }
                )
        for _ in range(self.rng.randrange(30)):
            await asyncio.sleep(0)
        return saved


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("seed", range(15))
async def test_after_kills_no_prompt_is_lost_and_none_is_trained_twice(tmp_path, seed, max_staleness):
    rng, saved, num_lives, num_undone = random.Random(seed), None, 0, 0
    while saved is None or json.loads(saved)["steps"] < NUM_STEPS:
        config = {"prompts_per_step": 4, "oversample": 1.5, "drop_zero_variance_groups": True, "max_staleness": max_staleness}
        with Journal(tmp_path, text_of=lambda ids: "x") as journal:
            process = Process(journal, rng, saved, **config)
            saved = await process.run(process.num_steps + rng.randrange(1, 7)) or saved
            await process.scheduler.close()  # After the last state was read: what it stops is not in it.
        num_lives += 1
        num_undone += 4 * (process.num_steps - (json.loads(saved)["steps"] if saved else 0))
    end = json.loads(saved)
    owed = [row["prompt"]["id"] for row in end["state"]["queue"]]
    fates = Counter([*end["trained"], *end["dropped"], *owed])
    assert num_lives > 1
    assert fates == {f"p/{number}": 1 for number in range(end["state"]["prompts"]["position"])}
    assert len(end["trained"]) == 4 * NUM_STEPS
    found = audit(tmp_path, max_staleness=max_staleness)
    assert found.violations == []
    assert (found.num_lives, found.num_steps, found.trained) == (num_lives, NUM_STEPS, 4 * NUM_STEPS)
    assert found.undone == num_undone


@pytest.mark.parametrize("seed", range(5))
async def test_without_a_staleness_budget_nothing_that_had_ended_is_drawn_again(tmp_path, seed):
    rng, saved, played = random.Random(seed), None, Counter()
    while saved is None or json.loads(saved)["steps"] < NUM_STEPS:
        with Journal(tmp_path, text_of=lambda ids: "x") as journal:
            process = Process(journal, rng, saved, prompts_per_step=4)
            saved = await process.run(process.num_steps + rng.randrange(1, 7)) or saved
            await process.scheduler.close()
        played.update(process.played)
    done = {(event.sample_id, event.segment) for event in read_journal(tmp_path) if event.state is SampleState.DONE}
    assert len(done) > len(played)  # Taken from the journal, and written down anew.
    assert set(played.values()) == {1}
    assert audit(tmp_path, max_staleness=0).violations == []


async def test_a_run_that_goes_on_with_nothing_draws_its_own_samples(tmp_path):
    """A loop of one's own, run twice in one folder, may have learned something else from the same samples."""
    played = Counter()
    for _ in range(2):
        with Journal(tmp_path, text_of=lambda ids: "x") as journal:
            process = Process(journal, random.Random(0), None, resumes=False, prompts_per_step=4)
            await process.run(2)
            await process.scheduler.close()
        played.update(process.played)
    assert min(played.values()) == 2


async def test_where_a_sample_fails_in_one_life_alone_what_later_weights_wrote_in_it_is_not_trained_on(tmp_path):
    """The step that is trained again learns from other samples than the first time: the weights after it are others, too."""
    fails = True

    class Mortal(Process):
        async def episode(self, prompt, id, seed):
            trajectory = await super().episode(prompt, id, seed)
            if fails and id == "5.1":
                return replace(trajectory, status=Status.FAILED, reason="its environment hung")
            return trajectory

    with Journal(tmp_path, text_of=lambda ids: "x") as journal:
        first = Mortal(journal, random.Random(0), None, prompts_per_step=4)
        await first.run(4)
        await first.scheduler.close()
    fails = False
    drawn = []
    for _ in range(2):
        with Journal(tmp_path, text_of=lambda ids: "x") as journal:
            again = Mortal(journal, random.Random(0), None, prompts_per_step=4)
            await again.run(3)
            await again.scheduler.close()
        drawn.append({id for id, _ in again.played})
    drawn_again, drawn_last = drawn
    first_step, later = ({f"{group}.{index}" for group in groups for index in range(3)} for groups in (range(4), range(8, 12)))
    assert not drawn_again & first_step
    assert "5.1" in drawn_again
    assert later <= drawn_again
    assert not later & drawn_last  # It learned from the same as the one before.
    assert audit(tmp_path, max_staleness=0).violations == []
