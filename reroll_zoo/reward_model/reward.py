"""A reward model as a reward: conversations go in one by one and are scored in batches."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from reroll.rewards.base import RewardContext
from reroll.rewards.transcript import conversation
from reroll.types import Message, Prompt, Score, Trajectory
from reroll_zoo.reward_model.config import ModelRewardConfig

Ids = tuple[int, ...]
Render = Callable[[Sequence[Message]], Ids]
"""A conversation in the tokens of the model that scores it."""
ScoreRows = Callable[[Sequence[Ids]], Awaitable[list[float]]]
"""Scores rows, in one go."""

_GATHER_S = 0.005
"""How long the first of a batch waits for company: short beside a forward pass, long enough for siblings to arrive."""
_MAX_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True)
class _Row:
    """A row and the score it waits for."""

    key: bytes
    ids: Ids
    score: asyncio.Future[float]


class ScoreModel:
    """A model with a scalar head behind one awaitable. What is asked at about the same time is scored together.

    While a batch is computed the next one gathers, so the model is never idle with work waiting. Equal conversations get
    equal scores, to the last bit, whatever they are batched with: siblings that say the same must not seem to differ.
    A model that fails fails everyone who waits.
    """

    def __init__(self, render: Render, score_rows: ScoreRows, *, max_batch_tokens: int) -> None:
        self._render = render
        self._score_rows = score_rows
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[_Row] = deque()
        self._scores: dict[bytes, asyncio.Future[float]] = {}
        """By a digest of the row, oldest first: those known and those awaited."""
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, messages: Sequence[Message], *, max_tokens: int) -> float:
        """The head's number for a conversation, of which the first `max_tokens` are read."""
        ids = self._render(messages)[:max_tokens]
        key = sha256(array("q", ids)).digest()
        if key not in self._scores:
            self._enqueue(_Row(key, ids, asyncio.get_running_loop().create_future()))
        return await asyncio.shield(self._scores[key])  # Others may wait for the same score.

    async def close(self) -> None:
        """Give up what is being scored. Safe to call twice."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for row in self._waiting:
            row.score.cancel()

    def _enqueue(self, row: _Row) -> None:
        if len(self._scores) >= _MAX_REMEMBERED:
            del self._scores[next(iter(self._scores))]
        self._scores[row.key] = row.score
        self._waiting.append(row)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(_GATHER_S)
            await self._score(self._take())

    def _take(self) -> list[_Row]:
        """The longest waiting, as many as fit, at least one."""
        batch = [self._waiting.popleft()]
        num_tokens = len(batch[0].ids)
        while self._waiting and num_tokens + len(self._waiting[0].ids) <= self._max_batch_tokens:
            batch.append(self._waiting.popleft())
            num_tokens += len(batch[-1].ids)
        return batch

    async def _score(self, batch: Sequence[_Row]) -> None:
        try:
            scores = await self._score_rows([row.ids for row in batch])
            for row, score in list(zip(batch, scores, strict=True)):
                row.score.set_result(score)
        except Exception as error:
            for row in batch:
                self._scores.pop(row.key, None)
                row.score.set_exception(error)
                row.score.exception()  # Everyone who asked may be gone: asyncio would complain that nobody looked at it.
        finally:
            for row in batch:
                row.score.cancel()  # Still open only if this call was given up.


class RewardModel:
    """The score that a model gives to the whole conversation."""

    def __init__(self, config: ModelRewardConfig, model: ScoreModel) -> None:
        self._config = config
        self._model = model

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        value = await self._model(conversation(prompt, trajectory), max_tokens=config.max_tokens)
        if config.output == "sigmoid":
            value = _sigmoid(value)
        value *= config.scale
        if config.clip is not None:
            low, high = config.clip
            value = min(max(value, low), high)
        return Score(value=value)


def open_reward_model(config: ModelRewardConfig, context: RewardContext) -> RewardModel:
    """The reward over the model that the run hosts for it."""
    return RewardModel(config, context.host)


def _sigmoid(value: float) -> float:
    """1 / (1 + e^-value), for any size of value."""
    small = math.exp(-abs(value))
    return 1 / (1 + small) if value >= 0 else small / (1 + small)
