"""Trajectories and conversations to flat training rows."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from reroll.algo.episodes import Episodes
from reroll.types import Group, Sample, Score, Trajectory, Turn


class TrainingRows(NamedTuple):
    """Training rows, and what their tokens earned: token t of `episodes` is token t of the rows packed in order."""

    samples: list[Sample]
    episodes: Episodes


def rows_of(groups: Sequence[Group]) -> TrainingRows:
    """All trajectories of a step, in order.

    A trajectory is one row: prompt, completion, reply, completion, … with the loss on completions only. Where a turn's
    prompt is not an extension of the tokens before it (its history was edited), a further row starts. A turn in which
    nothing was written gives nothing to learn; rows without a token in the loss are left out.
    """
    book = _Book()
    samples = []
    for number, group in enumerate(groups):
        states: dict[tuple[str, ...], int] = {}
        for trajectory in group.trajectories:
            rows = [row for written in _rows(trajectory) if (row := written.sample()).loss_mask.any()]
            book.add(number, group, trajectory, rows, states)
            samples += rows
    return TrainingRows(samples, book.episodes())


def sft_sample(ids: Sequence[int], loss_mask: Sequence[bool]) -> Sample:
    """A row to imitate."""
    turn, num = [0 if in_loss else -1 for in_loss in loss_mask], len(ids)
    return _OpenRow(ids=list(ids), logp=[0.0] * num, turn=turn, num_tokens=[1] * num).sample()


@dataclass(slots=True, kw_only=True)
class _OpenRow:
    """A Sample being written."""

    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    """Of each part, what was shown or what was written, as `version`: numbers become arrays slowly. `num_tokens` has each."""
    version: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    routes: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """By the place of their last token: what was told with each turn."""

    def append(self, turn: Turn, number: int) -> None:
        shown = turn.prompt_ids[len(self.ids) :]
        written = turn.completion.token_ids
        self.ids += (*shown, *written)
        self.logp += (*[0.0] * len(shown), *turn.completion.logprobs)
        self.turn += (-1, number)
        self.version += (-1, min((version for version, _ in turn.completion.versions), default=-1))
        self.num_tokens += (len(shown), len(written))
        if turn.completion.routes is not None:
            self.routes.append((len(self.ids) - 1, turn.completion.routes))

    def sample(self) -> Sample:
        turn, version = np.repeat(np.array([self.turn, self.version or self.turn], np.int64), self.num_tokens, axis=1)
        # `struct` reads Python's numbers several times faster than numpy does.
        logp = np.frombuffer(struct.pack(f"{len(self.logp)}d", *self.logp)).astype(np.float32)
        turn[0], version[0], logp[0] = -1, -1, 0.0  # Nothing predicts the first token.
        return Sample(
            ids=np.frombuffer(struct.pack(f"{len(self.ids)}q", *self.ids), dtype=np.int64),
            loss_mask=turn >= 0,
            logp=logp,
            turn=turn,
            version=version if self.version else None,
            routes=self._routes(),
        )

    def _routes(self) -> np.ndarray | None:
        """Of each token those by which it was first read: the log-probs of its turn come from them."""
        if not self.routes:
            return None
        like = self.routes[0][1]
        routes = np.full((len(self.ids), *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
        for end, told in reversed(self.routes):
            routes[end - len(told) : end] = told
        return routes


def _rows(trajectory: Trajectory) -> list[_OpenRow]:
    rows: list[_OpenRow] = []
    for number, turn in enumerate(trajectory.turns):
        if not rows or list(turn.prompt_ids[: len(rows[-1].ids)]) != rows[-1].ids:
            rows.append(_OpenRow())
        rows[-1].append(turn, number)
    return rows


@dataclass(slots=True)
class _Book:
    """Episodes being written down."""

    group: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    baseline: list[float | None] = field(default_factory=list)
    turn_episode: list[int] = field(default_factory=list)
    turn_reward: list[float] = field(default_factory=list)
    turn_state: list[int] = field(default_factory=list)
    token_turn: list[np.ndarray] = field(default_factory=list)
    num_states: int = 0

    def add(
        self, number: int, group: Group, trajectory: Trajectory, rows: Sequence[Sample], states: dict[tuple[str, ...], int]
    ) -> None:
        """One episode; `states` numbers the states that its group has seen."""
        written = sorted({turn for row in rows for turn in np.flatnonzero(np.bincount(row.turn[row.loss_mask])).tolist()})
        place = {turn: len(self.turn_reward) + index for index, turn in enumerate(written)}
        lookup = np.array([place.get(turn, -1) for turn in range(len(trajectory.turns))] + [-1], dtype=np.int64)
        self.token_turn += [lookup[row.turn] for row in rows]  # Turn -1 reads the last entry, -1.
        self.turn_reward += _rewards(trajectory, written)
        self.turn_episode += [len(self.group)] * len(written)
        for turn in written:
            key = _state(trajectory, turn)
            if key not in states:
                states[key] = self.num_states
                self.num_states += 1
            self.turn_state.append(states[key])
        self.group.append(number)
        self.reward.append(trajectory.reward)
        self.scores.append(trajectory.score)
        self.baseline.append(group.baseline)

    def episodes(self) -> Episodes:
        names = sorted({name for score in self.scores for name in score.parts})
        known = [value for value in self.baseline if value is not None]
        return Episodes(
            group=torch.tensor(self.group, dtype=torch.int64),
            reward=torch.tensor(self.reward, dtype=torch.float32),
            turn_episode=torch.tensor(self.turn_episode, dtype=torch.int64),
            turn_reward=torch.tensor(self.turn_reward, dtype=torch.float32),
            turn_state=torch.tensor(self.turn_state, dtype=torch.int64),
            token_turn=torch.from_numpy(np.concatenate([*self.token_turn, np.empty(0, dtype=np.int64)])),
            parts={name: torch.tensor([score.parts.get(name, 0.0) for score in self.scores]) for name in names},
            part_weights={name: torch.tensor([score.weights.get(name, 1.0) for score in self.scores]) for name in names},
            baseline=torch.tensor(known) if known and len(known) == len(self.baseline) else None,
        )


def _state(trajectory: Trajectory, number: int) -> tuple[str, ...]:
    """What the policy spoke in: the environment's name for it, else what it had just been shown."""
    turn = trajectory.turns[number]
    if turn.state is not None:
        return ("state", turn.state)
    return tuple(message["content"] for message in trajectory.turns[number - 1].reply) if number else ()


def _rewards(trajectory: Trajectory, written: Sequence[int]) -> list[float]:
    """What each written turn earned. What an empty turn earned goes to the written one before it (or the first), and
    what the outcome earned beyond its turns to the last."""
    if not written:
        return []
    rewards = dict.fromkeys(written, 0.0)
    for number, turn in enumerate(trajectory.turns):
        rewards[max((one for one in written if one <= number), default=written[0])] += turn.reward
    rewards[written[-1]] += trajectory.reward - sum(turn.reward for turn in trajectory.turns)
    return list(rewards.values())
