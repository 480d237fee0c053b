"""Updates that begin while the last samples of their step are still being written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll_zoo.audit.audit import audit


def run(tree: dict[str, Any], *, stream: bool) -> Outcome:
    tree["train"] = {"stream": stream}
    tree["run"]["name"] = f"stream-{stream}".lower()
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder)


def steps(outcome: Outcome) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward/mean" in row]


@pytest.mark.parametrize(
    ("runtime", "settings"),
    [
        ("local", {}),
        ("local", {"algorithm": "dr_grpo", "kl": {"coef": 0.1}}),
        ("local", {"rollout": {"max_staleness": 1, "take_window": 2}}),
        pytest.param("processes", {"policy": {"strategy": {"kind": "fsdp2", "num_ranks": 2}}}, marks=pytest.mark.slow),
        pytest.param("processes", {}, marks=pytest.mark.slow),
        pytest.param("local", {"aggregation": "sequence_mean", "rollout": {"oversample": 1.5}}, marks=pytest.mark.slow),
        pytest.param(
            "local",
            {"algorithm": "ppo", "critic": {"kind": "shared"}, "shaping": {"advantages": {"whiten": False}}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_streamed_step_learns_what_a_step_learns_that_waits(
    rlvr_tree: dict[str, Any], runtime: str, settings: dict[str, Any]
) -> None:
    """The first step of both sees the same samples, so the same gradient, summed in another order."""
    rlvr_tree["run"]["steps"] = 1
    rlvr_tree["runtime"] = {"kind": runtime}
    rlvr_tree["engine"]["max_running"] = 4  # One group after the other.
    rlvr_tree["policy"]["strategy"] = {"kind": "torch"}
    for name, value in settings.items():
        rlvr_tree[name] = {**rlvr_tree[name], **value} if isinstance(rlvr_tree.get(name), dict) else value
    rlvr_tree["policy"]["strategy"]["micro_batch_tokens"] = 38
    rlvr_tree["policy"]["optim"]["eps"] = 0.1  # Or Adam's first step would make rounding of a gradient near 0 a whole step.
    waiting, streamed = (run(rlvr_tree, stream=stream) for stream in (False, True))
    [before], [after] = steps(waiting), steps(streamed)
    assert after["time/streamed_s"] > 0
    for name in ("reward/mean", "train/loss", "train/grad_norm", "train/loss_tokens", "train/entropy", "advantage/std"):
        assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-7), name
    first, second = (AutoModelForCausalLM.from_pretrained(outcome.checkpoint).state_dict() for outcome in (waiting, streamed))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-5, atol=1e-7)


def test_a_streaming_run_goes_on_to_its_end_and_its_journal_is_whole(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["policy"]["strategy"] = {"micro_batch_tokens": 38}
    rlvr_tree["engine"]["max_running"] = 4
    outcome = run(rlvr_tree, stream=True)
    assert [row["step"] for row in steps(outcome)] == [1, 2, 3]
    assert audit(outcome.folder / "journal", max_staleness=0).violations == []
