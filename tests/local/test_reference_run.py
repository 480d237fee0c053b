"""The reference of a KL penalty: it may follow the policy, be another model, and goes on with a resumed run."""

from __future__ import annotations

import copy
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

Tree = dict[str, Any]


@pytest.fixture
def tree(rlvr_tree: Tree) -> Tree:
    rlvr_tree["data"]["eval"] = []
    rlvr_tree["run"]["steps"] = 4
    return rlvr_tree | {"kl": {"coef": 0.05}, "checkpoint": {"every": 1, "keep": 9}}


def run(tree: Tree, *, resume: bool = False, **fields: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(copy.deepcopy(tree | fields), folder=folder), code_folder=folder, resume=resume)


def kls(outcome: Outcome) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["kl/reference"] for row in rows if "kl/reference" in row]


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_a_reference_that_is_the_policy_of_the_step_before_is_at_distance_zero(tree: Tree) -> None:
    still = kls(run(tree))
    assert still[-1] > 1e-4
    tree["run"]["name"] = "synced"
    assert kls(run(tree, reference={"sync_every": 1})) == pytest.approx([0.0] * 4, abs=1e-9)
    tree["run"]["name"] = "every-other"
    found = kls(run(tree, reference={"sync_every": 2}))
    assert [kl < 1e-9 for kl in found] == [True, False, True, False]


def test_a_mixture_lies_between_the_reference_and_the_policy(tree: Tree) -> None:
    outcome = run(tree, reference={"sync_every": 2, "mix": 0.25})
    start = weights(tree["policy"]["model"])
    steps = [outcome.folder / "checkpoints" / f"step-{step:06d}" for step in (1, 2, 3, 4)]
    expected = start
    for number, step in enumerate(steps, start=1):
        if number % 2 == 0:
            policy = weights(step)
            expected = {name: 0.75 * tensor + 0.25 * policy[name] for name, tensor in expected.items()}
        found = weights(step / "reference")
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("strategy", [{"kind": "torch"}, {"kind": "torch", "precision": "bf16"}])
def test_resumed_it_goes_on_where_it_was(tree: Tree, strategy: dict[str, Any]) -> None:
    tree["policy"]["strategy"] = strategy
    tree["reference"] = {"sync_every": 2, "mix": 0.5}
    whole = run(tree)
    tree["run"] |= {"name": "stopped", "steps": 3}
    run(tree)
    tree["run"]["steps"] = 4
    resumed = run(tree, resume=True)
    assert kls(resumed) == kls(whole)
    for part in ("", "reference"):
        ours, expected = weights(resumed.checkpoint / part), weights(whole.checkpoint / part)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.items())


def test_another_model_is_the_reference_from_the_start(tree: Tree, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", hidden=32, layers=2, heads=4, kv_heads=2, seed=9)
    found = kls(run(tree, reference={"model": str(other)}))
    assert found[0] > 1e-4
    tree["run"]["name"] = "synced"
    found = kls(run(tree, reference={"model": str(other), "sync_every": 1}))
    assert found[0] > 1e-4
    assert found[1:] == pytest.approx([0.0] * 3, abs=1e-9)


def test_a_reference_that_cannot_be_compared_or_moved_ends_the_run_before_it_starts(tree: Tree, tmp_path: Path) -> None:
    stranger = make_tiny(tmp_path / "stranger", characters="0123456789")
    with pytest.raises(ModelError, match=r"the reference .* do not share a vocabulary"):
        run(tree, reference={"model": str(stranger)})
    wider = make_tiny(tmp_path / "wider", hidden=96)
    with pytest.raises(ModelError, match=r"reference.sync_every to 0"):
        run(tree, reference={"model": str(wider), "sync_every": 1})


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"kl": {"coef": 0.0}, "reference": {"sync_every": 1}}, "reference"),
        ({"reference": {"mix": 0.5}}, "reference.mix"),
        ({"reference": {"sync_every": 1}, "lora": {"rank": 4}}, "reference.sync_every"),
        ({"reference": {"model": "./nowhere"}}, "reference.model"),
    ],
)
def test_what_would_do_nothing_is_refused(tree: Tree, fields: dict[str, Any], where: str) -> None:
    tree["policy"]["lora"] = fields.pop("lora", None)
    with pytest.raises(ConfigError) as caught:
        parse_config(tree | fields, folder=Path(tree["run"]["runs_dir"]).parent)
    assert where in {violation.path for violation in caught.value.violations}


def test_under_an_adapter_another_model_may_be_the_reference(tree: Tree, tmp_path: Path) -> None:
    tree["policy"]["lora"] = {"rank": 4}
    found = kls(
        run(tree, reference={"model": str(make_tiny(tmp_path / "other", hidden=32, layers=2, heads=4, kv_heads=2, seed=9))})
    )
    assert found[0] > 1e-4
