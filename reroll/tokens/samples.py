"""Trajectories and conversations to flat training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reroll.types import Group, Sample, Trajectory, Turn


def samples_of(group: Group, advantages: Sequence[float]) -> list[Sample]:
    """Rows of a group, given one advantage per trajectory, in the order of its trajectories.

    A trajectory is one row: prompt, completion, reply, completion, … with the loss on completions only. Where a turn's
    prompt is not an extension of the tokens before it (its history was edited), a further row starts. A turn in which
    nothing was written gives nothing to learn; rows without a token in the loss are left out.
    """
    if len(advantages) != len(group.trajectories):
        raise ValueError(f"one advantage per trajectory: got {len(advantages)} for {len(group.trajectories)} trajectories")
    return [
        row.sample(advantage=advantage)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        for row in _rows(trajectory)
        if any(row.loss_mask)
    ]


def sft_sample(ids: Sequence[int], loss_mask: Sequence[bool]) -> Sample:
    """A row to imitate: policy gradient with advantage 1 is supervised learning."""
    row = _Row(ids=list(ids), loss_mask=list(loss_mask), logp=[0.0] * len(ids))
    return row.sample(advantage=1.0)


@dataclass(slots=True, kw_only=True)
class _Row:
    """A Sample being written."""

    ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    def is_continued_by(self, turn: Turn) -> bool:
        return list(turn.prompt_ids[: len(self.ids)]) == self.ids

    def append(self, turn: Turn) -> None:
        shown = turn.prompt_ids[len(self.ids) :]
        written = turn.completion.token_ids
        self.ids += [*shown, *written]
        self.loss_mask += [False] * len(shown) + [True] * len(written)
        self.logp += [0.0] * len(shown) + list(turn.completion.logprobs)

    def sample(self, *, advantage: float) -> Sample:
        loss_mask = np.array(self.loss_mask, dtype=np.bool_)
        loss_mask[0] = False  # Nothing predicts the first token.
        return Sample(
            ids=np.array(self.ids, dtype=np.int64),
            loss_mask=loss_mask,
            logp=np.where(loss_mask, np.array(self.logp, dtype=np.float32), np.float32(0)),
            advantage=np.where(loss_mask, np.float32(advantage), np.float32(0)),
        )


def _rows(trajectory: Trajectory) -> list[_Row]:
    rows: list[_Row] = []
    for turn in trajectory.turns:
        if not rows or not rows[-1].is_continued_by(turn):
            rows.append(_Row())
        rows[-1].append(turn)
    return rows
