"""Whole runs of reward models: they rank answers they have not seen, and plain transformers reads the same scores."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from reroll.config.load import parse_config
from reroll.models.load import load_model
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.tokens.batch import pack
from reroll.tokens.samples import sft_sample
from reroll.training.base import Needs
from reroll.training.predict import predict
from reroll_zoo.tiny_models import END, make_tiny

STEPS = 30


def pairs(seed: int, num: int) -> list[dict[str, Any]]:
    """The better answer has more of the digit 1 in it."""
    rng = random.Random(seed)
    rows = []
    for number in range(num):
        texts = ["".join(rng.choices(digits, k=rng.randint(3, 6))) for digits in ("111123", "123456")]
        better, worse = sorted(texts, key=lambda text: text.count("1") / len(text), reverse=True)
        rows.append({"prompt": f"say {number % 10}", "chosen": better, "rejected": worse, "margin": 0.5, "wide": 8})
    return [row for row in rows if row["chosen"] != row["rejected"]]


@pytest.fixture
def reward_tree(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    for name, rows in (("train", pairs(1, 120)), ("held_out", pairs(2, 60))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "pipeline": "reward_model",
        "run": {"name": "rm", "runs_dir": str(tmp_path / "runs"), "steps": STEPS},
        "policy": {"model": str(tiny_model), "devices": "cpu", "optim": {"lr": 1e-2}},
        "data": {name: [{"kind": "jsonl", "path": str(tmp_path / f"{file}.jsonl")}] for name, file in FILES.items()},
        "rows_per_step": 32,
        "max_tokens": 64,
    }


FILES = {"train": "train", "eval": "held_out"}


def losses(outcome: Outcome) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def conversation(row: dict[str, Any], side: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]


def test_a_reward_model_learns_to_rank_held_out_pairs(reward_tree: dict[str, Any]) -> None:
    outcome = train(parse_config(reward_tree))
    before, after = outcome.evals[0], outcome.evals[STEPS]
    assert before["eval/margin"] == 0, "the head starts at zero"
    assert after["eval/accuracy"] > 0.9
    assert after["eval/loss"] < 0.7 * before["eval/loss"]
    assert after["eval/chosen_reward"] > after["eval/rejected_reward"]


def test_a_resumed_reward_model_equals_an_uninterrupted_one(reward_tree: dict[str, Any]) -> None:
    reward_tree["run"]["steps"] = 6
    whole = train(parse_config(reward_tree))
    reward_tree["run"] |= {"name": "parts", "steps": 3}
    train(parse_config(reward_tree))
    reward_tree["run"]["steps"] = 6
    assert losses(train(parse_config(reward_tree), resume=True)) == losses(whole)


@pytest.mark.parametrize("padding", ["of its own", "the end of a turn"])
def test_plain_transformers_reads_the_scores_that_were_trained(
    reward_tree: dict[str, Any], tmp_path: Path, padding: str
) -> None:
    """Many models pad with the token that also ends every answer: the score must still be read at that token."""
    folder = make_tiny(tmp_path / "start", hidden=32, layers=1)
    if padding == "the end of a turn":
        share_padding_with_the_end_of_a_turn(folder)
    reward_tree["policy"]["model"] = str(folder)
    reward_tree["run"]["steps"] = 12
    outcome = train(parse_config(reward_tree))

    tokenizer = AutoTokenizer.from_pretrained(outcome.checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(outcome.checkpoint).eval()
    assert model.config.num_labels == 1
    texts = [
        tokenizer.apply_chat_template(conversation(row, side), tokenize=False).rstrip("\n")
        for row in pairs(2, 60)
        for side in ("chosen", "rejected")
    ]
    assert all(text.endswith(END) for text in texts)
    with torch.no_grad():
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits[:, 0] for text in texts])
        padded = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
        rows = [sft_sample(ids, [False] * (len(ids) - 1) + [True]) for ids in tokenizer(texts)["input_ids"]]
        ours = load_model(str(outcome.checkpoint), dtype=torch.float32, device="cpu", head="score")
        scores = predict(ours, pack(rows), Needs(logp=False, score=True), chunk=64).score
    assert scores is not None
    assert scores.std() > 0.01
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(scores, padded, atol=1e-5, rtol=1e-4)
    accuracy = float((alone[0::2] > alone[1::2]).float().mean())
    assert outcome.evals[12]["eval/accuracy"] == pytest.approx(accuracy)


def share_padding_with_the_end_of_a_turn(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = END
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": tokenizer.pad_token_id}))


@pytest.mark.parametrize(("column", "margin"), [("margin", 0.5), ("wide", 8.0), ("not there", 0.0)])
def test_a_rows_margin_is_by_how_much_the_chosen_answer_should_win(
    reward_tree: dict[str, Any], column: str, margin: float
) -> None:
    reward_tree["run"]["steps"] = 1
    for part in FILES:
        reward_tree["data"][part][0]["margin_key"] = column
    outcome = train(parse_config(reward_tree))
    equal_scores = math.log(1 + math.exp(margin))
    assert outcome.evals[0]["eval/loss"] == pytest.approx(equal_scores, rel=1e-6)
    assert losses(outcome)[0] == pytest.approx(equal_scores, rel=1e-6)
