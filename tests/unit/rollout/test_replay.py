"""What the machines lose is played again; what a sample does to itself fails."""

from contextlib import asynccontextmanager

import pytest
from mortal_envs import NUM_TURNS
from pydantic import TypeAdapter
from rollout_fakes import make, trajectory

from reroll.config.envs import EnvConfig, ProcessEnvsConfig
from reroll.config.parts import LocalRuntimeConfig
from reroll.envs.cluster import EnvCluster
from reroll.errors import EnvError, EnvLost, TooManyFailures
from reroll.observe.journal import SampleState, read_journal
from reroll.rollout.play import MAX_REPLAYS, play, replayed
from reroll.runtime import make_runtime
from reroll.types import Completion, FinishReason, Prompt, SamplingParams, Score, Status

PROMPT = Prompt(id="p/0", messages=(), domain="d")


async def test_a_lost_episode_is_played_again_with_its_seed():
    played, told = [], []

    async def episode(prompt, id, seed):
        played.append((id, seed))
        if len(played) < 3:
            raise EnvLost(f"loss {len(played)}")
        return trajectory(id)

    assert (await replayed(episode, PROMPT, "0.1", 17, on_lost=told.append)).is_usable
    assert played == [("0.1", 17)] * 3
    assert told == ["loss 1", "loss 2"]


async def test_an_episode_that_is_always_lost_fails_and_says_how_often_it_was_tried():
    played = []

    async def episode(prompt, id, seed):
        played.append(id)
        raise EnvLost("the process of the environment died (SIGSEGV)")

    failed = await replayed(episode, PROMPT, "0.1", 17)
    assert failed.status is Status.FAILED
    assert failed.reason == "the process of the environment died (SIGSEGV), each of the 4 times it was played"
    assert len(played) == MAX_REPLAYS + 1


async def test_an_episode_that_fails_by_itself_is_not_played_again():
    played = []

    async def episode(prompt, id, seed):
        played.append(id)
        raise EnvError("no such level")

    assert (await replayed(episode, PROMPT, "0.1", 17)).reason == "no such level"
    assert len(played) == 1


class Letters:
    """One id per character."""

    stop_token_ids = (0,)

    def kept(self, messages):
        return messages

    def start(self, messages):
        return tuple(ord(char) for message in messages for char in message["content"])

    def extend(self, prompt_ids, completion_ids, messages):
        return (*prompt_ids, *completion_ids, *self.start(messages))

    def decode(self, ids):
        return "".join(map(chr, ids))


async def draw(request):
    """A letter that depends on the request's seed alone, as the engines' do under the same weights."""
    return Completion(
        token_ids=(97 + request.sampling.seed % 26,), logprobs=(-1.0,), finish_reason=FinishReason.STOP, versions=((0, 1),)
    )


@asynccontextmanager
async def scheduler_of(journal, **options):
    """A scheduler whose episodes are played in environments of one child process."""
    node = {"kind": "import", "path": "mortal_envs:Mortal", "options": options}
    nodes = TypeAdapter(dict[str, EnvConfig]).validate_python({"d": node})
    async with make_runtime(LocalRuntimeConfig()) as runtime:
        envs = await EnvCluster.start(runtime, ProcessEnvsConfig(num_workers=1), nodes)

        async def episode(prompt, id, seed):
            sampling = SamplingParams(max_tokens=4, seed=seed)
            env = envs.live("d", seed)
            return await play(env, draw, Letters(), sampling, id=id, max_prompt_tokens=100, max_turns=NUM_TURNS)

        async def score(prompt, trajectory):
            return Score(value=trajectory.reward)

        scheduler = make(journal, episode=episode, score=score, group_size=8)
        try:
            yield scheduler, envs
        finally:
            await scheduler.close()
            await envs.close()


async def test_a_killed_environment_process_fails_no_sample_and_changes_none(journal, tmp_path):
    said = []
    for is_lit in (False, True):
        fuse = tmp_path / "fuse"
        if is_lit:
            fuse.touch()
        async with scheduler_of(journal, fuse=str(fuse)) as (scheduler, envs):
            groups = await scheduler.take(2)
            said.append([[turn.text for turn in one.turns] for group in groups for one in group.trajectories])
            stats = (scheduler.stats() + envs.stats()).values_by_name()
    assert not fuse.exists()
    assert said[0] == said[1]
    assert len(said[0]) == 16
    assert stats["rollout/replayed_samples"] == stats["env/d/lost"] > 0
    assert stats["rollout/failed_samples"] == stats["env/d/failures"] == 0
    journal.flush()
    again = [event for event in read_journal(journal.folder) if event.state is SampleState.GENERATING and event.detail]
    assert len(again) == stats["rollout/replayed_samples"]
    assert {event.detail["reason"] for event in again} == {"the process of the environment died (SIGKILL)"}


async def test_an_environment_that_always_kills_its_process_ends_the_run_with_the_reason(journal):
    async with scheduler_of(journal) as (scheduler, _):
        with pytest.raises(TooManyFailures, match=r"died \(SIGKILL\), each of the 4 times it was played"):
            await scheduler.take(2)
