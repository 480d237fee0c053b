"""A language model as a judge: asked through one awaitable, whoever it is and wherever it runs."""

from __future__ import annotations

import asyncio
import json
import operator
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reroll.errors import ConfigError, RewardError, Violation
from reroll.observe.metrics import Max, Mean, Metric, Stats, Sum
from reroll.rewards.base import RewardContext, reference
from reroll.rewards.transcript import as_text, conversation, opening
from reroll.types import Message, Prompt, SamplingParams, Score, Trajectory
from reroll_zoo.judge.answer import Answer, Complete, Unreadable
from reroll_zoo.judge.answers_cache import AnswersCache, question_key
from reroll_zoo.judge.config import EndpointJudgeConfig, JudgeConfig
from reroll_zoo.judge.text import ScoreReader, Template

CACHE_FILE = "judge_answers.sqlite"
"""In the run's folder, unless the config names another file."""

_NO_ANSWER = "I do not know."
"""A judge that can score this can do its work."""
_SECOND_TRY_TEMPERATURE = 0.7
"""Of a greedy judge whose reply held no score: asked the same way it would say the same."""


class Meter:
    """What a judge did since it was last read."""

    COUNTED = ("requests", "retries", "failures", "unparseable", "cache_hits", "prompt_tokens", "completion_tokens")
    """Questions that went to the model, further tries, questions without a reply, replies without a score, and so on."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._latency_s = Mean(0.0, 0.0)
        self._longest_s = 0.0

    def took(self, seconds: float) -> None:
        """A question was answered or given up after so long, retries and waiting included."""
        self._latency_s += Mean(seconds)
        self._longest_s = max(self._longest_s, seconds)

    def take(self) -> Stats:
        """The readings, which then start anew."""
        metrics: dict[str, Metric] = {name: Sum(self.counts[name]) for name in self.COUNTED}
        if self._latency_s.weight:
            metrics |= {"latency_s": self._latency_s, "latency_max_s": Max(self._longest_s)}
        self.counts.clear()
        self._latency_s, self._longest_s = Mean(0.0, 0.0), 0.0
        return Stats(metrics)


class Unparseable(RewardError):
    """A reply that holds no score."""


class Judge:
    """Asks a model for scores: `votes` times, in parallel, each once more if the reply holds no score.

    Equal questions that are asked at the same time are asked once. Raises RewardError if no vote was cast, unless that is
    the answer's doing: then it gets the lowest score.
    """

    def __init__(
        self,
        config: JudgeConfig,
        complete: Complete,
        cache: AnswersCache,
        *,
        name: str,
        template: str | None = None,
        meter: Meter | None = None,
    ) -> None:
        """`template` None is the built-in one; `meter` is shared with a model that counts its retries."""
        self._config = config
        self._complete = complete
        self._cache = cache
        self._name = name
        self._template = Template(template)
        self._reader = ScoreReader(config)
        self._meter = meter or Meter()
        self._who = _identity(config)
        self._asking: dict[str, asyncio.Task[Answer]] = {}

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        if not any(turn.text.strip() for turn in trajectory.turns):
            return Score(value=self._reader.worst)
        before = opening(prompt, trajectory)
        answer = as_text(conversation(prompt, trajectory)[len(before) :])
        ask = partial(self._vote, prompt, as_text(before))
        votes = await asyncio.gather(*(ask(answer, number) for number in range(self._config.votes)))
        cast = [vote for vote in votes if not isinstance(vote, RewardError)]
        if cast:
            return Score(value=AGGREGATES[self._config.aggregate](cast))
        errors = [vote for vote in votes if isinstance(vote, RewardError)]
        unreached = [error for error in errors if not isinstance(error, Unparseable | Unreadable)]
        if unreached:
            raise unreached[0]
        if self._config.on_unparseable != "fail" and all(isinstance(error, Unparseable) for error in errors):
            return Score(value=self._config.on_unparseable)
        if isinstance(await ask(_NO_ANSWER, 0), RewardError):
            raise errors[0]
        return Score(value=self._reader.worst, info={"unjudged": 1.0})

    def stats(self) -> Stats:
        """What happened since the last call, as `reward/judge/NAME/…`; `cost` where the config has prices."""
        stats, model = self._meter.take(), self._config.model
        if isinstance(model, EndpointJudgeConfig):
            prices = (model.price_per_million_prompt_tokens, model.price_per_million_completion_tokens)
            if any(prices):
                tokens = (stats["prompt_tokens"].value, stats["completion_tokens"].value)
                stats += Stats({"cost": Sum(sum(map(operator.mul, tokens, prices)) / 1e6)})
        return stats.prefixed(f"reward/judge/{self._name}/")

    async def close(self) -> None:
        """Give up what is being asked. Safe to call twice."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._complete.close()
        self._cache.close()

    def _fill(self, prompt: Prompt, question: str, answer: str) -> str:
        template = self._template
        known = reference(prompt) if template.needs_reference() else prompt.answer
        return template.fill(question=question, answer=answer, reference=known, scale=self._reader.description)

    async def _vote(self, prompt: Prompt, question: str, answer: str, number: int) -> float | RewardError:
        """One score, or why there is none."""
        config = self._config
        messages = [Message(role="user", content=self._fill(prompt, question, answer))]
        for temperature, seed in (
            (config.temperature, 2 * number),
            (config.temperature or _SECOND_TRY_TEMPERATURE, 2 * number + 1),
        ):
            sampling = SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=seed)
            try:
                reply = await self._ask(messages, sampling)
            except RewardError as error:
                return error
            score = self._reader.read(reply.text, answer=answer) if reply.is_whole else None
            if score is not None:
                return score
            self._meter.counts["unparseable"] += 1
        how = "it ends" if reply.is_whole else "it was cut off (raise max_tokens), and ends"
        return Unparseable(f"the judge {self._name} gave no score it was asked for; {how}: {reply.text[-200:]!r}")

    async def _ask(self, messages: list[Message], sampling: SamplingParams) -> Answer:
        """The reply, remembered or new. Whoever is cancelled while waiting leaves the question to the others."""
        key = question_key(self._who, messages, sampling)
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._look_up(key, messages, sampling))
            task.add_done_callback(lambda done: self._forget(key, done))
        else:
            self._meter.counts["cache_hits"] += 1
        return await asyncio.shield(task)

    def _forget(self, key: str, done: asyncio.Task[Answer]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # Everyone who asked may be gone: asyncio would complain that nobody looked at it.

    async def _look_up(self, key: str, messages: list[Message], sampling: SamplingParams) -> Answer:
        known = await self._cache.get(key)
        if known is not None:
            self._meter.counts["cache_hits"] += 1
            text, is_whole = json.loads(known)
            return Answer(text=text, is_whole=is_whole)
        started_s = time.monotonic()
        self._meter.counts["requests"] += 1
        try:
            answer = await self._complete(messages, sampling)
        except RewardError:
            self._meter.counts["failures"] += 1
            raise
        finally:
            self._meter.took(time.monotonic() - started_s)
        self._meter.counts["prompt_tokens"] += answer.prompt_tokens
        self._meter.counts["completion_tokens"] += answer.completion_tokens
        await self._cache.put(key, json.dumps([answer.text, answer.is_whole]))
        return answer


def _majority(votes: Sequence[float]) -> float:
    counts = Counter(votes)
    most = max(counts.values())
    return min(vote for vote, count in counts.items() if count == most)


AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "majority": _majority,
}


def open_judge(config: JudgeConfig, context: RewardContext) -> Judge:
    """The judge, which asks the model that the run hosts for it, or one behind an endpoint.

    Without a run's folder and without a cache in the config, answers are remembered as long as the judge lives. Raises
    ConfigError for a template file, a key or a cache that cannot be used.
    """
    where, folder = f"rewards.{context.name}", context.config_folder or Path()
    found = list(config.violations(folder=folder))
    if found:
        raise ConfigError([Violation(f"{where}.{fault.path}", fault.problem, fault.fix) for fault in found])
    host, meter = context.host, Meter()
    if isinstance(config.model, EndpointJudgeConfig):
        from reroll_zoo.judge.endpoint import EndpointModel

        host = EndpointModel(config.model, meter)
    if host is None:
        raise ValueError(f"{where} is judged by a hosted model, which nobody started: pass its host")
    try:
        cache = AnswersCache(config.cache or (context.run_folder / CACHE_FILE if context.run_folder else None))
    except ValueError as error:
        raise ConfigError([Violation(f"{where}.cache", str(error), "name another file, or delete it")]) from error
    return Judge(config, host, cache, name=context.name, template=config.read_template(folder), meter=meter)


def _identity(config: JudgeConfig) -> Any:
    """What of the model decides about its replies, as plain data."""
    if isinstance(config.model, EndpointJudgeConfig):
        return [config.model.url, config.model.model, config.model.body]
    return [config.model.model, config.model.precision]
