"""Whole distillation runs: the student comes close to its teacher, resumes, and unequal vocabularies end the run at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.errors import ConfigError, ModelError
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll_zoo.tiny_models import make_tiny


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Larger than the student, with a padded head, and with opinions: far from uniform."""
    folder = tmp_path_factory.mktemp("teacher")
    return make_tiny(folder, hidden=48, layers=2, seed=7, initializer_range=0.15, vocab_size=112)


@pytest.fixture
def distill_tree(tmp_path: Path, tiny_model: Path, teacher: Path) -> dict[str, Any]:
    rows = [{"prompt": f"say {digit}", "answer": f"{digit}"} for digit in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    return {
        "pipeline": "distill",
        "run": {"name": "distill", "runs_dir": str(tmp_path / "runs"), "steps": 60},
        "policy": {"model": str(tiny_model), "devices": "cpu", "optim": {"lr": 1e-2}},
        "teacher": {"model": str(teacher), "devices": "cpu", "top_k": 16},
        "data": {"train": [source], "eval": [source]},
        "rows_per_step": 10,
        "max_tokens": 64,
    }


def run(tree: dict[str, Any], **options: Any) -> Outcome:
    return train(parse_config(tree), **options)


def curve(outcome: Outcome, name: str) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.parametrize(
    "options",
    [
        {"divergence": {"kind": "forward_kl"}},
        {"divergence": {"kind": "reverse_kl"}, "temperature": 2.0},
        {"divergence": {"kind": "skewed_forward_kl"}},
        {"divergence": {"kind": "skewed_reverse_kl"}},
        {"divergence": {"kind": "adaptive_kl"}},
        {"divergence": {"kind": "js"}, "teacher": {"top_k": 0}},
    ],
    ids=lambda options: options["divergence"]["kind"],
)
def test_the_student_comes_close_to_its_teacher(distill_tree: dict[str, Any], options: dict[str, Any]) -> None:
    distill_tree["teacher"] |= options.pop("teacher", {})
    outcome = run(distill_tree | options)
    assert outcome.evals[60]["eval/divergence"] < 0.2 * outcome.evals[0]["eval/divergence"]
    assert curve(outcome, "train/divergence")[-1] < 0.3 * curve(outcome, "train/divergence")[0]
    assert AutoModelForCausalLM.from_pretrained(outcome.checkpoint) is not None


def test_a_share_of_imitation_learns_the_rows_that_the_teacher_does_not_know(distill_tree: dict[str, Any]) -> None:
    distilled = run(distill_tree)
    distill_tree["run"]["name"] = "mixed"
    mixed = run(distill_tree | {"sft_weight": 0.8})
    assert mixed.evals[60]["eval/loss"] < 0.5 * distilled.evals[60]["eval/loss"]
    assert curve(mixed, "train/cross_entropy")[-1] < 0.5 * curve(mixed, "train/cross_entropy")[0]


def test_a_resumed_distillation_equals_an_uninterrupted_one(distill_tree: dict[str, Any]) -> None:
    distill_tree["run"]["steps"] = 4
    whole = run(distill_tree)
    distill_tree["run"] |= {"name": "parts", "steps": 2}
    run(distill_tree)
    distill_tree["run"]["steps"] = 4
    resumed = run(distill_tree, resume=True)
    assert curve(resumed, "train/loss") == curve(whole, "train/loss")
    assert (resumed.checkpoint / "model.safetensors").read_bytes() == (whole.checkpoint / "model.safetensors").read_bytes()


def test_the_teacher_stays_as_it_was_and_its_cut_does_not_change_the_step(distill_tree: dict[str, Any]) -> None:
    """One step gives the same weights whether the teacher answers in one piece or in micro-batches of a row each."""
    before = (Path(distill_tree["teacher"]["model"]) / "model.safetensors").read_bytes()
    distill_tree["run"]["steps"] = 1
    weights = []
    for tokens in (4096, 8):
        distill_tree["run"]["name"] = f"cut-{tokens}"
        distill_tree["teacher"]["strategy"] = distill_tree["policy"]["strategy"] = {"micro_batch_tokens": tokens}
        weights.append(AutoModelForCausalLM.from_pretrained(run(distill_tree).checkpoint).state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-4, rtol=1e-3, msg=name)
    assert (Path(distill_tree["teacher"]["model"]) / "model.safetensors").read_bytes() == before


def test_a_teacher_with_other_tokens_ends_the_run_before_it_starts(distill_tree: dict[str, Any], tmp_path: Path) -> None:
    distill_tree["teacher"]["model"] = str(make_tiny(tmp_path / "other", characters="0123456789"))
    with pytest.raises(ModelError, match="do not share a vocabulary"):
        run(distill_tree)


def test_options_of_another_divergence_are_refused(distill_tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"divergence\.beta"):
        run(distill_tree | {"divergence": {"kind": "skewed_forward_kl", "beta": 0.5}})


def test_a_missing_teacher_is_reported_once(distill_tree: dict[str, Any]) -> None:
    del distill_tree["teacher"]
    with pytest.raises(ConfigError, match=r"\Ateacher: is missing \(add teacher: …\)\Z"):
        run(distill_tree)
