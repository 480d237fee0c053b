"""Whole runs whose rewards come from models: a judge that the run hosts, and a reward model of our own making."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from episode_fakes import trained_samples
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from reroll.config.load import parse_config
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll_zoo.tiny_models import make_tiny

MAX_TOKENS = 128
"""Of a judge that ends its reply by chance: shorter ones would all be cut off."""
HALF_OF_THE_LETTERS = {letter: float(letter in string.ascii_lowercase[::2]) for letter in string.ascii_lowercase}


def run(tree: dict[str, Any], **options: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder, **options)


def steps(outcome: Outcome) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward/mean" in row]


def samples(outcome: Outcome) -> list[dict[str, Any]]:
    return [sample.model_dump() for sample in trained_samples(outcome.folder)]


@pytest.fixture
def judged_tree(rlvr_tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A random model judges: the last letter that it writes about an answer is worth 0 or 1."""
    judge = make_tiny(tmp_path / "judge", hidden=32, layers=1, tie_embeddings=False, seed=7)
    (tmp_path / "judge.txt").write_text("{question} {reference} {answer}")
    rlvr_tree["data"]["eval"] = []
    rlvr_tree["rewards"] = {
        "default": {
            "kind": "judge",
            "model": {"kind": "hosted", "model": str(judge), "devices": "cpu", "precision": "fp32"},
            "template_file": "judge.txt",
            "pattern": r"([a-z])[^a-z]*$",
            "words": HALF_OF_THE_LETTERS,
            "temperature": 1.0,
            "votes": 3,
            "max_tokens": MAX_TOKENS,
            "on_unparseable": 0,
        }
    }
    return rlvr_tree


def test_a_hosted_judge_gives_the_rewards_and_its_work_is_in_the_metrics(judged_tree: dict[str, Any]) -> None:
    outcome = run(judged_tree)
    rows = steps(outcome)
    assert len(rows) == 3
    for row in rows:
        assert 0 < row["reward/mean"] < 1
        asked, remembered = row["reward/judge/default/requests"], row["reward/judge/default/cache_hits"]
        assert asked + remembered - row["reward/judge/default/unparseable"] <= 16 * 3
        assert 0 < row["reward/judge/default/completion_tokens"] <= MAX_TOKENS * asked
        assert row["reward/judge/default/latency_s"] > 0
    thirds = {round(sample["reward"] * 6) for sample in samples(outcome)}
    assert len(thirds) > 1
    assert (outcome.folder / "judge_answers.sqlite").is_file()


def test_a_run_that_is_repeated_asks_nothing_and_learns_the_same(judged_tree: dict[str, Any], tmp_path: Path) -> None:
    judged_tree["rewards"]["default"]["cache"] = str(tmp_path / "shared.sqlite")
    first = steps(run(judged_tree))
    judged_tree["run"]["name"] = "again"
    second = steps(run(judged_tree))
    assert sum(row["reward/judge/default/requests"] for row in first) > 0
    assert sum(row["reward/judge/default/requests"] for row in second) == 0
    assert [row["reward/mean"] for row in second] == [row["reward/mean"] for row in first]
    assert [row["train/loss"] for row in second] == [row["train/loss"] for row in first]


def reward_model(tmp_path: Path, tiny_model: Path) -> Path:
    """A model that our own pipeline taught to prefer ones."""
    pairs = [
        {"prompt": f"say {n % 10}", "chosen": "1" * (1 + n % 4), "rejected": str(n % 7 + 2) * (1 + n % 3)} for n in range(64)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = parse_config(
        {
            "pipeline": "reward_model",
            "run": {"name": "rm", "runs_dir": str(tmp_path / "runs"), "steps": 15},
            "policy": {"model": str(tiny_model), "devices": "cpu", "optim": {"lr": 1e-2}},
            "data": {"train": [{"kind": "jsonl", "path": str(tmp_path / "pairs.jsonl")}]},
            "rows_per_step": 32,
            "max_tokens": 64,
        }
    )
    return train(config).checkpoint


def test_a_reward_model_that_we_trained_scores_a_run_as_plain_transformers_would(
    rlvr_tree: dict[str, Any], tmp_path: Path, tiny_model: Path
) -> None:
    folder = reward_model(tmp_path, tiny_model)
    scored = {"kind": "reward_model", "model": str(folder), "devices": "cpu", "output": "sigmoid"}
    rlvr_tree["rewards"] = {
        "default": {"kind": "stack", "parts": {"taste": scored, "digits": {"kind": "numeric", "weight": 0.5}}}
    }
    outcome = run(rlvr_tree)
    assert all(row["reward/std"] > 0 for row in steps(outcome))

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = samples(outcome)
    assert len(rows) == 3 * 16
    for row in rows[::5]:
        chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n"), return_tensors="pt")
        with torch.no_grad():
            expected = float(torch.sigmoid(model(**ids).logits[0, 0]))
        assert row["parts"]["taste"] == pytest.approx(expected, abs=1e-5)
        assert row["reward"] == pytest.approx(expected + 0.5 * row["parts"]["digits"], abs=1e-5)
