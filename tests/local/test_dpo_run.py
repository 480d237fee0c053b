"""Whole runs on preferences: every loss learns to prefer, with and without an adapter, and a resumed run is the same run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reroll.config.data import JsonlSourceConfig
from reroll.config.load import parse_config
from reroll.errors import ConfigError, DataError
from reroll.models.load import load_model, load_tokenizer
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.tokens.batch import pack
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.training.base import Needs
from reroll.training.predict import predict
from reroll.types import Sample
from reroll_zoo.offline.preference import PairRow, Tokeniser, mismatched, pack_pairs, pair_rows
from reroll_zoo.offline.preference_config import DpoConfig
from reroll_zoo.offline.rows import load_pairs

Write = Callable[..., str]

LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"kind": "sigmoid", "label_smoothing": 0.1},
    "ipo": {"kind": "ipo", "beta": 0.5},
    "hinge": {"kind": "hinge"},
    "simpo": {"kind": "simpo"},
    "orpo": {"kind": "orpo"},
    "sigmoid-with-sft": {"kind": "sigmoid", "sft_coef": 1.0},
    "kto": {"kind": "kto"},
}


def answers(seed: int, num: int) -> Iterator[tuple[str, str, str]]:
    """(prompt, better, worse): letters of the first half of the alphabet are better than those of the second."""
    rng = random.Random(seed)
    for number in range(num):
        better, worse = ("".join(rng.choices(letters, k=rng.randint(2, 6))) for letters in ("abcdefghijklm", "nopqrstuvwxyz"))
        yield f"write {seed * 1000 + number}", better, worse


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, rows: list[dict[str, Any]]) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def pairs(seed: int, num: int) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "chosen": better, "rejected": worse} for prompt, better, worse in answers(seed, num)]


def judged(seed: int, num: int) -> list[dict[str, Any]]:
    rows = []
    for prompt, better, worse in answers(seed, num):
        rows += [{"prompt": prompt, "answer": better, "label": True}, {"prompt": prompt, "answer": worse, "label": False}]
    return rows


@pytest.fixture
def make_tree(tmp_path: Path, tiny_model: Path, write: Write) -> Callable[..., dict[str, Any]]:
    def make(loss: dict[str, Any], **run: Any) -> dict[str, Any]:
        rows = judged if loss["kind"] == "kto" else pairs
        return {
            "pipeline": "dpo",
            "run": {"name": "dpo", "runs_dir": str(tmp_path / "runs"), "steps": 12} | run,
            "policy": {"model": str(tiny_model), "devices": "cpu", "optim": {"lr": 3e-3}},
            "loss": loss,
            "data": {
                "train": [{"kind": "jsonl", "path": write("train", rows(1, 60))}],
                "eval": [{"kind": "jsonl", "path": write("held_out", rows(2, 20))}],
            },
            "rows_per_step": 16,
            "max_tokens": 64,
        }

    return make


def metrics(outcome: Outcome, name: str) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.parametrize("kind", LOSSES)
def test_the_policy_learns_to_prefer_what_was_chosen(make_tree: Callable[..., dict[str, Any]], kind: str) -> None:
    outcome = train(parse_config(make_tree(LOSSES[kind])))
    before, after = outcome.evals[0], outcome.evals[12]
    assert after["eval/loss"] < before["eval/loss"]
    assert before["eval/accuracy"] < 0.8
    assert after["eval/accuracy"] > 0.9
    assert metrics(outcome, "train/accuracy")[-1] > 0.9


@pytest.mark.parametrize("loss", [{"kind": "orpo"}, {"kind": "sigmoid", "sft_coef": 1.0}], ids=["orpo", "sigmoid"])
def test_with_an_sft_term_chosen_answers_get_likelier_and_not_only_likelier_than_others(
    make_tree: Callable[..., dict[str, Any]], loss: dict[str, Any]
) -> None:
    outcome = train(parse_config(make_tree(loss)))
    before, after = outcome.evals[0], outcome.evals[12]
    assert after["eval/sft_loss"] < 0.75 * before["eval/sft_loss"]
    assert after["eval/chosen_logp"] > before["eval/chosen_logp"] + 1
    assert after["eval/margin"] > before["eval/margin"]
    without = train(parse_config(make_tree({"kind": "sigmoid"}, name="without")))
    assert without.evals[12]["eval/chosen_logp"] < after["eval/chosen_logp"] - 1


def test_orpo_loads_no_reference(make_tree: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a second model was asked for")

    monkeypatch.setattr("reroll.pipeline.spawn.spawn_fixed", refuse)
    train(parse_config(make_tree({"kind": "orpo"}, steps=1)))
    with pytest.raises(AssertionError, match="a second model"):
        train(parse_config(make_tree({"kind": "sigmoid"}, steps=1, name="dpo-2")))


def test_dpo_starts_at_log_two_because_policy_and_reference_are_one(make_tree: Callable[..., dict[str, Any]]) -> None:
    outcome = train(parse_config(make_tree({"kind": "sigmoid"}, steps=1)))
    assert outcome.evals[0]["eval/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert metrics(outcome, "train/loss")[0] == pytest.approx(np.log(2), abs=1e-6)
    assert outcome.evals[0]["eval/margin"] == 0


@pytest.mark.parametrize("kind", ["sigmoid", "kto"])
def test_an_adapter_is_compared_with_the_model_beneath_it(make_tree: Callable[..., dict[str, Any]], kind: str) -> None:
    tree = make_tree(LOSSES[kind], steps=20)
    tree["policy"] |= {"lora": {"rank": 8, "alpha": 16}, "optim": {"lr": 5e-3}}
    outcome = train(parse_config(tree))
    before, after = outcome.evals[0], outcome.evals[20]
    good, bad = ("good", "bad") if kind == "kto" else ("chosen", "rejected")
    assert before[f"eval/{good}_reward"] == before[f"eval/{bad}_reward"] == 0, "a fresh adapter changes nothing"
    assert after[f"eval/{good}_reward"] > after[f"eval/{bad}_reward"] + 0.05
    assert after["eval/accuracy"] > 0.75


@pytest.mark.parametrize("kind", ["sigmoid", "kto"])
def test_a_resumed_run_equals_an_uninterrupted_one(make_tree: Callable[..., dict[str, Any]], kind: str) -> None:
    whole = train(parse_config(make_tree(LOSSES[kind], steps=4)))
    train(parse_config(make_tree(LOSSES[kind], steps=2, name="parts")))
    resumed = train(parse_config(make_tree(LOSSES[kind], steps=4, name="parts")), resume=True)
    assert metrics(resumed, "train/loss") == metrics(whole, "train/loss")
    assert resumed.evals[4] == whole.evals[4]


def test_kto_measures_its_reference_point_on_the_policy_before_the_step(make_tree: Callable[..., dict[str, Any]]) -> None:
    points = metrics(train(parse_config(make_tree(LOSSES["kto"]))), "train/reference_point")
    assert points[0] == 0, "the policy is still its reference"
    assert all(point >= 0 for point in points)
    assert any(point > 0 for point in points)


def test_mismatched_rows_pair_every_prompt_with_the_next_rows_answer() -> None:
    rows = [([1, 2, 3], [10, 11]), ([4], [12]), ([5, 6], [13, 14, 15])]
    samples = [sft_sample(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for prompt, answer in rows]
    others = mismatched(pack(samples))
    assert others.ids.tolist() == [1, 2, 3, 12, 4, 13, 14, 15, 5, 6, 10, 11]
    assert others.lengths == [4, 4, 4]
    assert others.ids[others.loss_mask].tolist() == [12, 13, 14, 15, 10, 11]


def rows_of(path: str, renderer: Renderer) -> list[PairRow]:
    return pair_rows(load_pairs(JsonlSourceConfig(path=Path(path))), Tokeniser(renderer, max_tokens=64, where="here"))


def text_of(sample: Sample, renderer: Renderer) -> str:
    return renderer.decode(sample.ids[sample.loss_mask].tolist())


def test_only_the_answer_is_in_the_loss_not_what_the_assistant_said_before(tiny_model: Path, write: Write) -> None:
    history = [{"role": role, "content": text} for role, text in (("user", "one"), ("assistant", "two"), ("user", "three"))]
    path = write("talk", [{"messages": history, "chosen": "good", "rejected": "bad"}])
    renderer = Renderer(load_tokenizer(str(tiny_model)))
    (row,) = rows_of(path, renderer)
    assert text_of(row.chosen, renderer) == "good"
    assert text_of(row.rejected, renderer) == "bad"
    num_prompt = int(row.chosen.loss_mask.argmax())
    np.testing.assert_array_equal(row.chosen.ids[:num_prompt], row.rejected.ids[:num_prompt])


@pytest.mark.parametrize("lora", [None, {"rank": 8}], ids=["all weights", "adapter"])
def test_held_out_margins_are_those_of_the_saved_policy_against_the_model_it_came_from(
    make_tree: Callable[..., dict[str, Any]], tiny_model: Path, lora: dict[str, Any] | None
) -> None:
    tree = make_tree({"kind": "sigmoid", "beta": 0.5})
    tree["policy"]["lora"] = lora
    outcome = train(parse_config(tree))
    batch = pack_pairs(rows_of(tree["data"]["eval"][0]["path"], Renderer(load_tokenizer(str(tiny_model)))))
    logp = {}
    for name in (str(outcome.checkpoint), str(tiny_model)):
        with torch.no_grad():
            model = load_model(name, dtype=torch.float32, device="cpu")
            logp[name] = predict(model, batch, Needs(), chunk=64).logp
    ratio = logp[str(outcome.checkpoint)] - logp[str(tiny_model)]
    sums = torch.stack([part.sum() for part in ratio.split(batch.lengths)])
    margin = sums[0::2] - sums[1::2]
    assert outcome.evals[12]["eval/accuracy"] == pytest.approx(float((margin > 0).float().mean()))
    assert outcome.evals[12]["eval/margin"] == pytest.approx(0.5 * float(margin.mean()), rel=1e-3)
    assert outcome.evals[12]["eval/margin"] > 0.05


def test_a_row_that_is_too_long_is_named(make_tree: Callable[..., dict[str, Any]]) -> None:
    tree = make_tree(LOSSES["sigmoid"]) | {"max_tokens": 8}
    with pytest.raises(DataError, match=r"data\.train\.0: row 1 has \d+ tokens"):
        train(parse_config(tree))


def test_kto_refuses_steps_and_held_out_sets_of_a_single_row(make_tree: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="kto also looks at answers to other prompts"):
        parse_config(make_tree(LOSSES["kto"]) | {"rows_per_step": 1})
    tree = make_tree(LOSSES["kto"])
    tree["data"]["eval"][0]["limit"] = 1
    with pytest.raises(DataError, match=r"data\.eval: one row is not enough"):
        train(parse_config(tree))


def test_a_source_that_compares_nothing_is_refused_before_anything_starts(make_tree: Callable[..., dict[str, Any]]) -> None:
    tree = make_tree(LOSSES["sigmoid"])
    tree["data"]["train"] = [{"kind": "reasoning_gym", "name": "chain_sum"}]
    with pytest.raises(ConfigError, match=r"data\.train\.0\.kind: is reasoning_gym, whose rows compare no answers"):
        parse_config(tree)


def test_options_of_one_loss_are_unknown_to_another(make_tree: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"loss\.gamma: unknown key"):
        parse_config(make_tree({"kind": "sigmoid", "gamma": 1.0}))
    config = parse_config(make_tree({"kind": "simpo"}))
    assert isinstance(config, DpoConfig)
    assert not config.loss.uses_reference


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ({"kind": "kto", "sft_coef": 0.5}, r"loss\.sft_coef: unknown key"),
        ({"kind": "orpo", "sft_coef": 0.0}, r"loss\.sft_coef: .*greater than 0"),
        ({"kind": "ipo", "sft_coef": -0.1}, r"loss\.sft_coef: .*greater than or equal to 0"),
        ({"kind": "orpo", "length_normalised": False}, r"loss\.length_normalised: unknown key"),
    ],
)
def test_an_sft_term_that_a_loss_does_not_have_or_cannot_do_without_is_refused(
    make_tree: Callable[..., dict[str, Any]], loss: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config(make_tree(loss))
