"""Whole runs over several domains: the mix, settings by domain, curricula, resume, evaluation by domain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from reroll.cli import app
from reroll.config.load import parse_config
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train


@pytest.fixture
def tree(rlvr_tree: dict[str, Any]) -> dict[str, Any]:
    """Three domains of shares 2, 1, 1: write any number, write one near the right one, and one without a signal."""
    source = rlvr_tree["data"]["train"][0]
    domains = {"any": 2.0, "near": 1.0, "void": 1.0}
    rlvr_tree["data"] = {
        "train": [source | {"domain": domain, "weight": weight} for domain, weight in domains.items()],
        "eval": [source | {"domain": domain, "limit": 4} for domain in ("any", "near")],
    }
    rlvr_tree["rewards"] = {
        "any": {"kind": "numeric", "tolerance": 1e9},
        "near": {"kind": "numeric", "tolerance": 4},
        "void": {"kind": "exact", "correct": 0.0},
    }
    return rlvr_tree


def run(tree: dict[str, Any], **options: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder, **options)


def steps_of(outcome: Outcome) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward/mean" in row]


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(outcome.checkpoint).state_dict()


def test_a_run_of_three_domains_trains_on_the_mix_it_was_asked_for(tree: dict[str, Any]) -> None:
    tree["rollout"]["domains"] = {"any": {"group_size": 6, "temperature": 0.7}, "near": {"max_tokens": 3}}
    outcome = run(tree)
    for row in steps_of(outcome):
        shares = [row[f"rollout/{domain}/trained_groups"] for domain in ("any", "near", "void")]
        assert shares == [2, 1, 1]
        assert row["rollout/trained_samples"] == 2 * 6 + 4 + 4
        assert row["train/sampler_gap_max"] < 1e-5, "every row is judged at the temperature it was drawn at"
    values = outcome.evals[3]
    assert {"eval/pass@1", "eval/any/pass@1", "eval/near/pass@1", "eval/average", "eval/average_low"} <= set(values)
    assert values["eval/average"] == pytest.approx((values["eval/any/pass@1"] + values["eval/near/pass@1"]) / 2)


def test_a_domain_without_signal_is_named_and_does_not_stall_the_run(
    tree: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tree["rollout"] |= {"drop_zero_variance_groups": True, "max_drops": 2}
    tree["run"]["steps"] = 2
    rows = steps_of(run(tree))
    assert [row["rollout/void/trained_groups"] for row in rows] == [0, 0]
    assert [row["rollout/void/ceded_groups"] for row in rows] == [1, 1]
    assert all(row["rollout/any/trained_groups"] + row["rollout/near/trained_groups"] == 4 for row in rows)
    assert sum("domain void loses slots" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize(
    "curriculum",
    [
        {"kind": "filter", "retry_epochs": 2},
        {"kind": "target", "target": 0.3},
        {"kind": "ladder", "groups": 8, "opens_at": 0.05},
    ],
    ids=lambda node: node["kind"],
)
def test_a_resumed_run_with_a_curriculum_equals_an_uninterrupted_one(tree: dict[str, Any], curriculum: dict[str, Any]) -> None:
    curriculum |= {"threshold": 0.3}
    tree["data"] |= {"curriculum": curriculum, "eval": []}
    if curriculum["kind"] == "ladder":
        tree["data"]["train"][1] |= {"domain": "any", "level": 1}
    for source in tree["data"]["train"]:
        source["limit"] = 3  # Several epochs, so that what was learned matters.
    tree["run"]["steps"] = 6
    whole = run(tree)
    tree["run"] |= {"name": "parts", "steps": 3}
    run(tree)
    tree["run"]["steps"] = 6
    resumed = run(tree, resume=True)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    watched = [name for name in steps_of(whole)[-1] if name.startswith("data/") or name == "reward/mean"]
    assert len(watched) > 1
    for name in watched:
        assert [row.get(name) for row in steps_of(whole)] == [row.get(name) for row in steps_of(resumed)], name
    last = steps_of(whole)[-1]
    assert last.get("data/any/level", 1) == 1, "the ladder was climbed"
    assert last.get("data/resting_prompts", 1) > 0, "the filter found something to pass over"


def test_the_command_line_measures_a_checkpoint_by_domain(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["eval"] = {"temperature": 1.0, "samples": 2, "domains": {"near": {"samples": 4}}}
    tree["run"]["steps"] = 1
    outcome = run(tree)
    out = tmp_path / "eval.json"
    done = CliRunner().invoke(app, ["eval", str(outcome.checkpoint), "--out", str(out)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for word in ("near", "all prompts", "mean of domains", "maj@4", "pass@2", "[low, high]: 95 %"):
        assert word in done.output
    told = json.loads(out.read_text())
    assert {"pass@4", "avg@4", "maj@2", "maj@4"} <= set(told["domains"]["near"])
    assert {"pass@1", "pass@2", "avg@2", "maj@2"} == set(told["domains"]["any"])
    assert told["metrics"]["eval/average"] == told["average"]["pass@1"]["value"]


def test_a_config_in_the_place_of_the_model_is_told_apart() -> None:
    for model, word in (("run.yaml", "give the model first"), ("gpt", "-c FILE")):
        done = CliRunner().invoke(app, ["eval", model], env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert word in done.output
