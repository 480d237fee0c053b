"""What gives an alarm, and what the user is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reroll.config.load import parse_config
from reroll.config.tree import RlvrConfig
from reroll.observe.metrics import Mean, Stats
from reroll.pipeline.guard import MIN_TOKENS, Alarm, alarm_of, max_gap
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Predictions
from reroll.training.loss import PolicyLoss
from reroll.types import Sample
from reroll_zoo.diagnosis import Evidence, TokenNames, report


def config(**changes: Any) -> RlvrConfig:
    tree = {
        "pipeline": "rlvr",
        "policy": {"model": "some/model"},
        "data": {"train": [{"kind": "jsonl", "path": "rows.jsonl"}]},
        "rewards": {"default": {"kind": "import", "path": "module:reward"}},
    }
    parsed = parse_config(tree | changes, runs_here=False)
    assert isinstance(parsed, RlvrConfig)
    return parsed


def gaps(*, num_tokens: float = 1000, **means: float) -> Stats:
    return Stats({f"train/sampler_gap_{age}": Mean(gap * num_tokens, num_tokens) for age, gap in means.items()})


BF16 = {"model": "some/model", "strategy": {"precision": "bf16"}}


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 1e-3),
        ({"policy": BF16}, 0.15),
        ({"engine": {"precision": "bf16"}}, 0.15),
        ({"policy": BF16, "engine": {"precision": "fp32"}}, 0.15),
        ({"policy": BF16, "engine": {"kind": "vllm"}}, 0.3),
        ({"engine": {"kind": "vllm"}, "guard": {"max_gap": 0.7}}, 0.7),
    ],
)
def test_the_coarser_precision_sets_the_limit(changes: dict[str, Any], limit: float) -> None:
    assert max_gap(config(**changes)) == limit


def test_only_a_mean_over_enough_tokens_beyond_the_limit_is_an_alarm() -> None:
    assert alarm_of(Stats(), config()) is None
    assert alarm_of(gaps(current=0.9e-3, stale=2.9), config()) is None
    assert alarm_of(gaps(current=5.0, num_tokens=MIN_TOKENS - 1), config()) is None
    assert alarm_of(gaps(current=5.0), config(guard={"enabled": False})) is None
    assert alarm_of(gaps(current=1.1e-3), config()) == Alarm(pytest.approx(1.1e-3), 1e-3, 1000, False)
    assert alarm_of(gaps(current=0.0, stale=3.5), config()) == Alarm(3.5, 3.0, 1000, True)
    assert alarm_of(gaps(current=float("nan")), config()) is not None


def rows(num_rows: int, *, version: int = 4, turn: int = 0) -> Batch:
    samples = []
    for row in range(num_rows):
        mask = np.arange(8) >= 2
        samples.append(
            Sample(
                ids=np.arange(8) + 10 * row,
                loss_mask=mask,
                logp=np.where(mask, -1.0, 0.0).astype(np.float32),
                turn=np.where(mask, turn, -1),
                version=np.where(mask, version, -1),
            )
        )
    return pack(samples)


def told(batch: Batch, logp: torch.Tensor, **without: torch.Tensor) -> str:
    names = TokenNames(
        prompts=[f"math-{row}" for row in range(len(batch))],
        episode=batch.sequence_index,
        decode=lambda ids: f"<{ids[0]}>",
    )
    alarm = Alarm(0.5, 0.15, 600, False)
    return alarm.text(report(alarm, Evidence(logp=logp, without=without), batch, names, version=4), version=4)


def moved(batch: Batch, by: float, *, num_rows: int | None = None) -> torch.Tensor:
    is_moved = batch.loss_mask & (batch.sequence_index < (len(batch) if num_rows is None else num_rows))
    return torch.where(is_moved, batch.logp - by, batch.logp)


def test_weights_are_suspected_where_all_rows_are_off_and_the_furthest_tokens_are_named() -> None:
    batch = rows(4)
    logp = moved(batch, 0.5)
    logp[19] = -7.25
    said = told(batch, logp)
    assert "600 tokens by version 4 of the weights are 0.5 nats" in said
    assert "where 0.15 is the most" in said
    furthest = said.splitlines()[2]
    assert "'<23>' (id 23), token 3 of a row of prompt math-2, turn 0, version 4: engine -1.000, trainer -7.250" in furthest
    assert "Look at: the weights: most rows are off, so the engine holds others than the trainer's version 4" in said
    assert "guard.max_gap" in said


@pytest.mark.parametrize("name", ["adapter", "temperature"])
def test_what_explains_the_gap_when_it_is_left_out_is_named(name: str) -> None:
    batch = rows(4)
    assert f"Look at: the {name}: " in told(batch, moved(batch, 0.5), **{name: moved(batch, 0.01)})
    assert "Look at: the weights" in told(batch, moved(batch, 0.5), **{name: moved(batch, 0.4)})


@pytest.mark.parametrize(("turn", "which"), [(0, "first turns among them"), (3, "all of them in turns after the first")])
def test_contexts_are_suspected_where_only_some_rows_are_off(turn: int, which: str) -> None:
    batch = rows(8, turn=turn)
    assert f"Look at: the contexts of 2 of 8 rows, {which}" in told(batch, moved(batch, 2.0, num_rows=2))


def test_the_loss_reports_gaps_by_age() -> None:
    batch = rows(3)
    assert batch.version is not None
    batch = batch.replace(version=torch.where(batch.sequence_index == 0, batch.version - 1, batch.version))
    batch = batch.replace(version=torch.where(batch.loss_mask & (batch.sequence_index == 2), -1, batch.version))
    logp = batch.logp - torch.tensor([0.5, 0.25, 9.0])[batch.sequence_index] * batch.loss_mask
    predictions = Predictions(logp=logp.requires_grad_())
    stats = PolicyLoss(kind="reinforce", version=4)(batch, predictions).stats
    assert stats["sampler_gap_current"] == Mean(6 * 0.25, 6)
    assert stats["sampler_gap_stale"] == Mean(6 * 0.5, 6)
    assert not {name for name in PolicyLoss(kind="reinforce")(batch, predictions).stats if "current" in name}
