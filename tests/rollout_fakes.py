"""Fakes around a scheduler: prompts, engines and rewards that do what a test says."""

import asyncio
from collections import Counter
from itertools import count, cycle

from reroll.config.parts import RolloutConfig
from reroll.observe.journal import read_journal
from reroll.observe.metrics import Stats
from reroll.rollout.scheduler import RolloutScheduler
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn

COMPLETION = Completion(token_ids=(7, 8), logprobs=(-1.0, -2.0), finish_reason=FinishReason.STOP, versions=((0, 2),))


class Numbers:
    """Prompts that are numbers, of domains that take turns as told: an endless cycle of letters."""

    def __init__(self, turns="d", *, first=0, shares=None):
        self.turns = cycle(turns)
        self.numbers = count(first)
        self.num_drawn = first
        self.shares = shares or dict(Counter(turns))

    def next_domain(self):
        return next(self.turns)

    def next(self, domain):
        self.num_drawn += 1
        return next(self.numbers)


class Prompts:
    """Prompts of one domain after the other in turn; their ids count all of them."""

    def __init__(self, first=0, domains=("d",)):
        self.position = first
        self.num_turns = 0
        self.shares = dict.fromkeys(domains, 1.0)
        self.seen = []

    def next_domain(self):
        self.num_turns += 1
        return list(self.shares)[(self.num_turns - 1) % len(self.shares)]

    def next(self, domain):
        self.position += 1
        messages = ({"role": "user", "content": "hi"},)
        return Prompt(id=f"p/{self.position - 1}", messages=messages, domain=domain, extra={"k": [1]})

    def record_rewards(self, prompt, rewards):
        self.seen.append((prompt.id, tuple(rewards)))

    def stats(self):
        return Stats()

    def state(self):
        return {"position": self.position, "num_turns": self.num_turns}

    def restore(self, state):
        self.position, self.num_turns = state["position"], state["num_turns"]


def trajectory(id, status=Status.COMPLETED, **fields):
    return Trajectory(id=id, turns=(Turn(prompt_ids=(1,), completion=COMPLETION, text="x"),), status=status, **fields)


async def at_once(prompt, id, seed):
    return trajectory(id)


async def by_index(prompt, trajectory):
    return Score(value=float(trajectory.id.split(".")[1]), parts={"index": 1.0})


async def flat(prompt, trajectory):
    return Score(value=1.0)


class Manual:
    """Episodes that end when the test says so."""

    def __init__(self):
        self.waiting = {}
        self.started = []
        self.cancelled = []

    async def episode(self, prompt, id, seed):
        self.started.append((prompt.id, id, seed))
        self.waiting[id] = asyncio.get_running_loop().create_future()
        try:
            await self.waiting[id]
        except asyncio.CancelledError:
            self.cancelled.append(id)
            raise
        return trajectory(id)

    def end(self, *ids):
        for id in ids:
            self.waiting.pop(id).set_result(None)


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def make(journal, *, episode=at_once, score=by_index, prompts=None, seed=0, greedy=None, **config):
    config = RolloutConfig(**{"prompts_per_step": 2, "group_size": 2, **config})
    prompts = prompts or Prompts()
    return RolloutScheduler(config, prompts, episode=episode, score=score, journal=journal, seed=seed, greedy=greedy)


def events(journal):
    journal.flush()
    return [(event.sample_id, event.state.value) for event in read_journal(journal.folder) if event.sample_id]


def num_filtered(journal):
    return [state for _, state in events(journal)].count("filtered")
