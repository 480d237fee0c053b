"""Whole runs that train an adapter: the base stays, only the adapter travels and is saved, and peft opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.infer.worker import InferWorker
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import evaluate, train
from reroll.training.cluster import TrainWorker
from reroll_zoo.tiny_models import make_tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of larger weights than usual: an adapter cannot make a head of tiny random ones say anything loudly."""
    return make_tiny(tmp_path_factory.mktemp("models") / "base", hidden=32, initializer_range=0.2, seed=3)


@pytest.fixture
def lora_tree(rlvr_tree: dict[str, Any], base: Path) -> dict[str, Any]:
    rlvr_tree["policy"] |= {"model": str(base), "lora": {"rank": 8, "alpha": 16}, "optim": {"lr": 3e-2}}
    rlvr_tree["kl"] = {"coef": 0.01}
    rlvr_tree["data"]["eval"] = []
    return rlvr_tree


def run(tree: dict[str, Any], **options: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder, **options)


def steps(outcome: Outcome) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def adapter(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "adapter_model.safetensors")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trainers and engines of the runs in a test, in the order they came up."""
    seen: list[Any] = []
    for kind in (TrainWorker, InferWorker):

        def start(self: Any, *args: Any, _start: Any = kind.__init__, **options: Any) -> None:
            _start(self, *args, **options)
            seen.append(self)

        monkeypatch.setattr(kind, "__init__", start)
    return seen


def parameters(worker: Any) -> dict[str, Tensor]:
    model = worker._strategy._model if isinstance(worker, TrainWorker) else worker._engine._runner.model
    return dict(model.named_parameters())


def test_an_adapter_learns_and_nothing_else_changes(lora_tree: dict[str, Any], base: Path, workers: list[Any]) -> None:
    lora_tree["run"]["steps"] = 12
    rows = steps(run(lora_tree))
    assert sum(row["reward/mean"] for row in rows[-3:]) > 1.5 * sum(row["reward/mean"] for row in rows[:3])
    assert rows[0]["kl/reference"] == pytest.approx(0.0, abs=1e-5)
    assert rows[-1]["kl/reference"] > 1e-3
    (trainer,) = [worker for worker in workers if isinstance(worker, TrainWorker)]
    start = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, parameter in parameters(trainer).items():
        if "lora_" not in name:
            assert torch.equal(parameter, start[name.replace(".base_layer.", ".")]), name


@pytest.mark.parametrize("staleness", [0, 1])
def test_only_the_adapter_travels_and_the_frozen_weights_are_held_once(
    lora_tree: dict[str, Any], workers: list[Any], staleness: int
) -> None:
    lora_tree["rollout"]["max_staleness"] = staleness
    outcome = run(lora_tree)
    size = sum(tensor.nbytes for tensor in adapter(outcome.checkpoint).values())
    assert [row["push/bytes"] for row in steps(outcome)] == [size] * 3
    assert len(workers) == 2, "a trainer, which is its own reference, and an engine"
    ours, theirs = (parameters(worker) for worker in workers)
    for name, parameter in ours.items():
        is_shared = parameter.data_ptr() == theirs[name].data_ptr()
        assert is_shared == (staleness == 0 or "lora_" not in name), name


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_trainer_and_the_sampler_agree_on_every_log_prob(lora_tree: dict[str, Any], staleness: int) -> None:
    lora_tree["rollout"] |= {"max_staleness": staleness}
    lora_tree["run"]["steps"] = 4
    rows = steps(run(lora_tree))
    fresh = [row for row in rows if row["rollout/staleness_max"] == 0]
    assert fresh
    assert all(row["train/sampler_gap_max"] < 1e-5 for row in fresh)


def test_a_checkpoint_opens_in_peft_and_can_be_judged_and_trained_on(lora_tree: dict[str, Any], base: Path) -> None:
    checkpoint = run(lora_tree).checkpoint
    assert json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    opened = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), checkpoint)
    found = peft.get_peft_model_state_dict(opened, save_embedding_layers=False)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in adapter(checkpoint).items()
    }
    folder = checkpoint.parents[3]
    lora_tree["policy"]["model"] = str(checkpoint)
    lora_tree["data"]["eval"] = lora_tree["data"]["train"]
    assert len(evaluate(parse_config(lora_tree, folder=folder), code_folder=folder).trajectories) == 10
    lora_tree["run"] |= {"name": "on-top", "steps": 1}
    lora_tree["policy"]["lora"] = None
    assert (run(lora_tree).checkpoint / "config.json").is_file()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_equals_an_uninterrupted_one(lora_tree: dict[str, Any], precision: str) -> None:
    lora_tree["policy"]["strategy"] = {"precision": precision}
    lora_tree["run"]["steps"] = 4
    whole = run(lora_tree)
    lora_tree["run"] |= {"name": "parts", "steps": 2}
    run(lora_tree)
    lora_tree["run"]["steps"] = 4
    resumed = run(lora_tree, resume=True)
    for name, tensor in adapter(whole.checkpoint).items():
        assert torch.equal(tensor, adapter(resumed.checkpoint)[name]), name
    assert [row["reward/mean"] for row in steps(whole)] == [row["reward/mean"] for row in steps(resumed)]


def test_a_critic_may_be_an_adapter_too(lora_tree: dict[str, Any]) -> None:
    lora_tree |= {"algorithm": "ppo", "critic": {"kind": "own", "lora": {"rank": 4}, "optim": {"lr": 1e-2}, "devices": "cpu"}}
    outcome = run(lora_tree)
    assert adapter(outcome.checkpoint / "critic")["base_model.model.score.weight"].any()
    assert not any("score" in name for name in adapter(outcome.checkpoint))


def test_supervised_fine_tuning_of_an_adapter_learns_and_resumes(lora_tree: dict[str, Any]) -> None:
    tree = {
        "pipeline": "sft",
        "run": lora_tree["run"] | {"steps": 20},
        "policy": lora_tree["policy"] | {"optim": {"lr": 1e-2}},
        "data": {"train": lora_tree["data"]["train"]},
        "rows_per_step": 10,
        "max_tokens": 64,
    }
    whole = run(tree)
    losses = [row["train/loss"] for row in steps(whole)]
    assert losses[-1] < 0.8 * losses[0]
    tree["run"] = tree["run"] | {"name": "parts", "steps": 10}
    run(tree)
    tree["run"]["steps"] = 20
    resumed = run(tree, resume=True)
    assert [row["train/loss"] for row in steps(resumed)] == losses
    assert all(torch.equal(tensor, adapter(whole.checkpoint)[name]) for name, tensor in adapter(resumed.checkpoint).items())
