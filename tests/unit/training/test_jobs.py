"""What each rank is given of an update."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import mini_batches
from reroll.training.cluster import TrainJob, train_jobs
from reroll.training.loss import PolicyLoss
from reroll.types import Sample

PPO = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2})
COVARIANCE = PolicyLoss(
    kind="kl_cov", options={"kl_coef": 1.0}, selection={"share": 0.2}, selects="reroll_zoo.algorithms.selections:highest"
)


def batch(lengths: list[int], *, unit_size: int = 1) -> Batch:
    """Rows whose ids tell which row they are."""
    samples = []
    for row, length in enumerate(lengths):
        mask = np.arange(length) >= 1
        logp = np.where(mask, -np.arange(length) / 7, 0).astype(np.float32)
        samples.append(Sample(ids=np.full(length, row), loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
    return pack(samples).replace(unit_size=unit_size)


def rows_of(job: TrainJob) -> list[list[int]]:
    """The rows that a rank trains on in each step."""
    return [[] if share.is_idle else [int(i) for i in share.rows.ids[share.rows.cu_seqlens[:-1]]] for share in job.steps]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=20),
    dp_size=st.integers(1, 6),
    epochs=st.integers(1, 3),
    steps_per_epoch=st.integers(1, 4),
)
def test_every_row_is_trained_by_one_rank_in_each_epoch_and_denominators_are_the_steps(
    lengths: list[int], dp_size: int, epochs: int, steps_per_epoch: int
) -> None:
    whole = batch(lengths)
    jobs = train_jobs(whole, PPO, epochs=epochs, steps_per_epoch=steps_per_epoch, seed=3, dp_size=dp_size)
    assert len(jobs) == dp_size
    num_steps = epochs * min(steps_per_epoch, len(lengths))
    assert {len(job.steps) for job in jobs} == {num_steps}
    trained = Counter(row for job in jobs for rows in rows_of(job) for row in rows)
    assert trained == Counter(list(range(len(lengths))) * epochs)
    for step in range(num_steps):
        shares = [job.steps[step] for job in jobs]
        num_loss_tokens = sum(int(share.rows.loss_mask.sum()) for share in shares if not share.is_idle)
        assert {share.rows.num_loss_tokens for share in shares} == {num_loss_tokens}


def test_one_rank_gets_the_steps_as_they_are() -> None:
    whole = batch([5, 9, 3, 7, 4])
    [job] = train_jobs(whole, PPO, epochs=2, steps_per_epoch=2, seed=4)
    expected = [step for epoch in range(2) for step in mini_batches(whole, 2, seed=8 + epoch)]
    assert all(torch.equal(share.rows.ids, step.ids) for share, step in zip(job.steps, expected, strict=True))


def test_ranks_are_balanced_by_tokens_and_the_idle_are_given_the_shortest_row() -> None:
    four = train_jobs(batch([40, 10, 12, 9, 9]), PPO, dp_size=2)
    assert [rows_of(job) for job in four] == [[[0]], [[1, 2, 3, 4]]]
    idle = train_jobs(batch([40, 10]), PPO, dp_size=4)
    assert [job.steps[0].is_idle for job in idle] == [False, False, True, True]
    assert idle[3].steps[0].rows.num_tokens == 10


def test_pairs_stay_together() -> None:
    jobs = train_jobs(batch([5, 6, 7, 8, 9, 3], unit_size=2), PPO, dp_size=3)
    assert sorted(rows_of(job)[0] for job in jobs) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("dp_size", [1, 3])
def test_a_loss_that_picks_tokens_sees_the_whole_step(dp_size: int) -> None:
    whole = batch([20, 11, 13, 17])
    whole = whole.replace(advantage=torch.linspace(-1, 1, whole.num_tokens) * whole.loss_mask)
    picked = COVARIANCE.prepare(whole).selected
    assert picked is not None
    jobs = train_jobs(whole, COVARIANCE, dp_size=dp_size)
    shares = [job.steps[0].rows for job in jobs]
    assert sum(int(share.selected.sum()) for share in shares) == int(picked.sum()) > 0  # type: ignore[union-attr]
