"""Runs whose engine does not get what it should: they stop, and say where to look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.errors import SamplerMismatch
from reroll.observe.metrics import Stats
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.pipeline.weight_sync import WeightSync


def run(tree: dict[str, Any]) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder)


def steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


@pytest.fixture
def broken_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are told of every version, and hold the weights of the first one for ever."""
    kept: dict[str, Any] = {}

    async def share(self: WeightSync, version: int) -> Stats:
        if not kept:
            every = {**await self._policy.weights(frozen=True), **await self._policy.weights()}
            kept.update({name: tensor.clone() for name, tensor in every.items()})
        await self._engine.load_weights(kept, version=version)
        return Stats()

    monkeypatch.setattr(WeightSync, "_share", share)


@pytest.mark.usefixtures("broken_push")
def test_a_push_that_does_not_arrive_stops_the_run_at_the_first_step_that_shows_it(rlvr_tree: dict[str, Any]) -> None:
    with pytest.raises(SamplerMismatch) as caught:
        run(rlvr_tree)
    said = str(caught.value)
    assert "by version 1 of the weights" in said
    assert "Look at: the weights" in said
    assert "of a row of prompt " in said
    [row] = steps(Path(rlvr_tree["run"]["runs_dir"]) / "test")
    assert row["step"] == 1
    assert row["train/sampler_gap_current"] < 1e-5, "version 0 is what the engine has"


@pytest.mark.usefixtures("broken_push")
def test_an_adapter_that_does_not_arrive_is_named(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["policy"] |= {"lora": {"rank": 4}, "optim": {"lr": 5e-2}}
    with pytest.raises(SamplerMismatch, match="Look at: the adapter"):
        run(rlvr_tree)


@pytest.mark.usefixtures("broken_push")
def test_the_guard_can_be_switched_off(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["guard"] = {"enabled": False}
    assert run(rlvr_tree).num_steps == 3
    assert steps(Path(rlvr_tree["run"]["runs_dir"]) / "test")[-1]["train/sampler_gap_current"] > 1e-3


@pytest.mark.parametrize("changes", [{"train": {"mini_batches": 2, "epochs": 2}}, {"max_staleness": 1}], ids=["steps", "stale"])
def test_a_sound_run_gives_no_alarm_and_compares_what_is_comparable(rlvr_tree: dict[str, Any], changes: dict[str, Any]) -> None:
    rlvr_tree["run"]["steps"] = 4
    if "max_staleness" in changes:
        rlvr_tree["rollout"] |= changes
    else:
        rlvr_tree |= changes
    outcome = run(rlvr_tree)
    assert outcome.num_steps == 4
    rows = steps(outcome.folder)
    assert all(row.get("train/sampler_gap_current", 0.0) < 1e-5 for row in rows)
    if "train" in changes:
        assert max(row["train/sampler_gap"] for row in rows) > 1e-3, "in later optimizer steps the policy has moved"
        assert all("train/sampler_gap_current" in row for row in rows)
