"""Whole SFT runs: they learn, they resume, and a row that cannot be used is named before work starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.errors import ConfigError, DataError
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import evaluate, train


@pytest.fixture
def sft_tree(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    pairs = [{"prompt": f"say {digit}", "answer": f"{digit}"} for digit in range(10)]
    talks = [
        {"messages": [{"role": "user", "content": f"say {digit}"}, {"role": "assistant", "content": f"{digit}"}]}
        for digit in range(10)
    ]
    for name, rows in (("pairs", pairs), ("talks", talks)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "pipeline": "sft",
        "run": {"name": "sft", "runs_dir": str(tmp_path / "runs"), "steps": 80},
        "policy": {"model": str(tiny_model), "devices": "cpu", "optim": {"lr": 1e-2}},
        "data": {
            "train": [{"kind": "jsonl", "path": str(tmp_path / f"{name}.jsonl")} for name in ("pairs", "talks")],
            "eval": [{"kind": "jsonl", "path": str(tmp_path / "talks.jsonl")}],
        },
        "rows_per_step": 20,
        "max_tokens": 64,
    }


def losses(outcome: Outcome) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.usefixtures("pictures")
def test_supervised_fine_tuning_learns_the_answers(sft_tree: dict[str, Any]) -> None:
    outcome = train(parse_config(sft_tree))
    assert losses(outcome)[-1] < 0.5 * losses(outcome)[0]
    assert outcome.evals[80]["eval/loss"] < 0.5 * outcome.evals[0]["eval/loss"]
    assert (outcome.folder / "curve.png").stat().st_size > 1000


def test_a_resumed_fine_tuning_equals_an_uninterrupted_one(sft_tree: dict[str, Any]) -> None:
    sft_tree["run"]["steps"] = 6
    whole = train(parse_config(sft_tree))
    sft_tree["run"] |= {"name": "parts", "steps": 3}
    train(parse_config(sft_tree))
    sft_tree["run"]["steps"] = 6
    assert losses(train(parse_config(sft_tree), resume=True)) == losses(whole)


def test_a_row_that_is_too_long_is_named(sft_tree: dict[str, Any]) -> None:
    sft_tree["max_tokens"] = 8
    with pytest.raises(DataError, match=r"data\.train\.0: row 1 has \d+ tokens"):
        train(parse_config(sft_tree))


def test_evaluation_of_an_sft_config_says_what_to_give_instead(sft_tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rlvr"):
        evaluate(parse_config(sft_tree))
