"""Runs of a scheduler whose engine writes one token at a time: token p of a request is a function of (seed, p)."""

import asyncio
from collections import Counter

import numpy as np
from rollout_fakes import Prompts, make

from reroll.rollout.in_flight import TokenKeeper
from reroll.types import Completion, FinishReason, Request, SamplingParams, Score, Status, Trajectory, Turn

TOLD_EVERY = 4


def length_of(seed):
    """Some samples are much longer than most."""
    return 2 + seed % 7 if seed % 5 else 30 + seed % 40


def token(seed, place):
    return 1 + (seed * 31 + place * 17) % 1000


class WritingEngine:
    """One token of each request in every turn of the loop, told of a few at a time, tagged with the version it has now."""

    def __init__(self):
        self.version = 0
        self.written = Counter()
        """How often each token of each sample was written, by (sample, seed, place)."""

    async def generate(self, request, on_tokens):
        seed = request.sampling.seed
        versions = [version for version, count in request.written.versions for _ in range(count)]
        num_told = len(versions)
        while len(versions) < length_of(seed):
            await asyncio.sleep(0)
            self.written[request.id.rpartition(".")[0], seed, len(versions)] += 1
            versions.append(self.version)
            if len(versions) - num_told == TOLD_EVERY and len(versions) < length_of(seed):
                for place in range(num_told, len(versions)):
                    ids = np.array([token(seed, place)], dtype=np.uint32)
                    on_tokens(ids, -0.5 * ids, versions[place])
                num_told = len(versions)
        ids = tuple(token(seed, place) for place in range(length_of(seed)))
        return Completion(
            token_ids=ids,
            logprobs=tuple(-0.5 * id for id in ids),
            finish_reason=FinishReason.STOP,
            versions=tuple((version, 1) for version in versions),
        )


class TokenRun:
    """One life of a run whose samples are kept token by token."""

    def __init__(self, journal, *, seed=0, score=None, **config):
        self.journal = journal
        self.engine = WritingEngine()
        self.keeper = TokenKeeper(journal, self.engine.generate)
        self.prompts = Prompts()
        self.scheduler = make(journal, episode=self.episode, score=score or reward, prompts=self.prompts, seed=seed, **config)

    async def episode(self, prompt, id, seed):
        prompt_ids = (int(prompt.id.split("/")[1]),)
        request = Request(id=f"{id}.0", prompt_ids=prompt_ids, sampling=SamplingParams(max_tokens=99, seed=seed))
        completion = await self.keeper.generate(request)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text="x")
        return Trajectory(id=id, turns=(turn,), status=Status.COMPLETED)

    def release(self, groups, *, version):
        self.engine.version = version
        self.scheduler.release(groups, version=version)


async def reward(prompt, trajectory):
    """The longer, the likelier to be right."""
    ids = trajectory.turns[0].completion.token_ids
    return Score(value=float(sum(ids) % 100 < 20 + len(ids)))
