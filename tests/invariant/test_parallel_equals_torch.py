"""However many ranks hold a model, it learns what one process learns: fp32, real processes, gloo."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_bench import GRPO, Scenario, assert_same, batch, fsdp2, model_config, played_alone, played_by_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.config.parts import ProcessesRuntimeConfig
from reroll.errors import WorkerDied, WorkerError
from reroll.pipeline.run import train
from reroll.pipeline.spawn import spawn_model
from reroll.runtime import make_runtime
from reroll.tokens.batch import Batch
from reroll.training import cluster as cluster_module
from reroll.training.base import Divergence, LossOutput, Needs, Predictions, required
from reroll.training.loss import ValueLoss
from reroll_zoo.offline.preference_losses import RankingLoss
from reroll_zoo.tiny_models import make_tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny(root / "llama", hidden=32),
        "qwen3": make_tiny(root / "qwen3", family="qwen3", hidden=32, tie_embeddings=False),
        "qwen2": make_tiny(root / "qwen2", family="qwen2", hidden=32),
        "qwen3_5_text": make_tiny(root / "qwen3_5", family="qwen3_5_text", hidden=32, **DELTA),
        "falcon_h1": make_tiny(root / "falcon_h1", family="falcon_h1", hidden=32, **MAMBA),
        "nemotron_h": make_tiny(root / "nemotron_h", family="nemotron_h", hidden=32, **NEMOTRON),
    }


DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

MAMBA = {"mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16, "head_dim": 8,
    "layers_block_type": ["linear_attention", "full_attention"],
}  # fmt: skip


LAYOUTS: dict[str, tuple[int, str, dict[str, int]]] = {
    "two shards": (2, "llama", {}),
    "two replicas of two shards": (4, "qwen3", {"replicas": 2}),
    "two split layers": (2, "qwen3", {"tp": 2}),
    "two shards of two split layers": (4, "qwen3", {"tp": 2}),
    "two halves of each sequence": (2, "llama", {"sp": 2}),
    "two shares of two halves": (4, "qwen3", {"sp": 2}),
    "two halves, each by two split layers": (4, "qwen3", {"sp": 2, "tp": 2}),
    "two shards of layers that carry a state": (2, "qwen3_5_text", {"gradient_checkpointing": True}),
}


IN_OTHERS = ("two split layers", "two halves of each sequence")
"""Layouts whose parts are all in quick ones of four ranks."""


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.slow] * (name in IN_OTHERS)) for name in LAYOUTS])
def test_ranks_together_learn_what_one_process_learns(models: dict[str, Path], layout: str) -> None:
    num_ranks, family, options = LAYOUTS[layout]
    config = model_config(models[family], fsdp2(**options))
    ours, expected = played_by_ranks(Scenario(config=config), num_ranks), played_alone(config)
    assert_same(ours, expected)
    # Only embedding and heads are not split by two ranks that split every layer, and norms are tiny.
    assert ours.num_held < (0.75 if layout == "two split layers" else 0.51) * expected.num_held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "family", "options"),
    [
        (2, "falcon_h1", {}),
        (2, "nemotron_h", {}),
        (3, "qwen2", {}),
        (4, "llama", {"gradient_checkpointing": True, "reshard_after_forward": False}),
        (4, "qwen2", {"tp": 2, "replicas": 2, "gradient_checkpointing": True}),
        (2, "llama", {"tp": 2}),
        (4, "qwen2", {"sp": 2, "replicas": 2, "gradient_checkpointing": True}),
    ],
)
def test_other_layouts_do_too(models: dict[str, Path], num_ranks: int, family: str, options: dict[str, Any]) -> None:
    config = model_config(models[family], fsdp2(**options))
    assert_same(played_by_ranks(Scenario(config=config), num_ranks), played_alone(config))


@pytest.mark.parametrize("options", [{"tp": 2}, {"sp": 2, "gradient_checkpointing": True}])
def test_an_adapter_is_trained_alike_by_split_layers_and_by_split_sequences(
    models: dict[str, Path], options: dict[str, Any]
) -> None:
    config = model_config(models["llama"], fsdp2(**options), lora=True)
    ours, expected = played_by_ranks(Scenario(config=config), 4), played_alone(config)
    assert all("lora" in name for name in ours.weights)
    assert_same(ours, expected)


def test_a_critic_is_trained_alike_by_two_ranks(models: dict[str, Path]) -> None:
    config, scenario = model_config(models["llama"], fsdp2()), {"head": "score", "loss": ValueLoss()}
    assert_same(played_by_ranks(Scenario(config=config, **scenario), 2), played_alone(config, **scenario))


def test_a_reward_model_is_trained_alike_by_ranks_of_which_one_has_the_end_of_a_sequence(models: dict[str, Path]) -> None:
    config = model_config(models["llama"], fsdp2(sp=2))
    scenario = {"head": "score", "loss": RankingLoss(), "unit_size": 2}
    assert_same(played_by_ranks(Scenario(config=config, **scenario), 2), played_alone(config, **scenario))


def test_ranks_that_share_sequences_answer_and_learn_all_that_heads_can_be_asked(models: dict[str, Path]) -> None:
    divergence = Divergence(kind="reverse_kl")
    scenario = {
        "head": "language+score",
        "loss": replace(GRPO, kl_estimator="full", entropy_coef=0.1, value=ValueLoss(), value_coef=0.5),
        "asks": Needs(entropy=True, score_norm=True, top_k=3, divergence=divergence, value=True, score=True),
    }
    config = model_config(models["qwen3"], fsdp2(sp=2))
    ours, expected = played_by_ranks(Scenario(config=config, **scenario), 2), played_alone(config, **scenario)
    assert len(ours.answers) == 8
    assert_same(ours, expected)


def test_four_ranks_share_long_sequences_and_some_get_nothing_of_short_ones(models: dict[str, Path]) -> None:
    scenario = {"groups": ((307, 5), (5,), (211,))}
    config = model_config(models["llama"], fsdp2(sp=4))  # More ranks than key-value heads.
    ours, expected = played_by_ranks(Scenario(config=config, **scenario), 4), played_alone(config, **scenario)
    assert_same(ours, expected)


@pytest.mark.parametrize("options", [{"tp": 2}, pytest.param({"sp": 2}, marks=pytest.mark.slow)])  # sp moves no weight.
def test_a_checkpoint_of_four_ranks_goes_on_with_two_and_opens_with_plain_transformers(
    models: dict[str, Path], tmp_path: Path, options: dict[str, int]
) -> None:
    four, two = (model_config(models["qwen3"], fsdp2(**how)) for how in (options, {}))
    saved = played_by_ranks(Scenario(config=four, steps=range(1), save=tmp_path), 4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(plain[name], weight) for name, weight in saved.weights.items())
    resumed = played_by_ranks(Scenario(config=two, steps=range(1, 2), load=tmp_path), 2)
    whole = played_alone(two)
    assert_same(resumed, replace(whole, stats=whole.stats[1:], answers_at_start=resumed.answers_at_start))


@dataclass(frozen=True)
class OneRankFails:
    """A loss that works on all ranks but the second."""

    how: str
    needs: Needs = field(default_factory=Needs)
    compares_with_old_policy: bool = False

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        if dist.get_rank() == 1 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the second rank cannot go on")
        return GRPO(batch, model)


@pytest.mark.parametrize("how", ["killed", pytest.param("raises", marks=pytest.mark.slow)])
def test_a_failed_rank_ends_the_cluster_with_its_error_and_nobody_waits_for_the_others(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    # Who waits for a rank that raised waits in vain; who lost one fails as well, and both must be heard, however late.
    monkeypatch.setattr(cluster_module, "GRACE_S", 1.0 if how == "raises" else 120.0)
    config = model_config(models["llama"], fsdp2(num_ranks=2))

    async def run() -> None:
        async with make_runtime(ProcessesRuntimeConfig(kind="processes")) as runtime:
            policy = await spawn_model(runtime, config, role=f"policy-{how}", total_steps=6)
            one_row = batch(0).select([1])  # Fewer rows than ranks.
            assert required((await policy.predict(one_row, Needs())).logp)[one_row.loss_mask].lt(0).all()
            stats = (await policy.train(batch(0), GRPO, mini_batches=2)).values_by_name()
            assert stats["train/loss"] == pytest.approx(played_alone(config, steps=range(1)).stats[0]["loss"].value, abs=1e-6)
            error, says = (WorkerDied, "--resume") if how == "killed" else (WorkerError, r"(?s)policy-raises\[1\].*second rank")
            with pytest.raises(error, match=says):
                await policy.train(batch(0), OneRankFails(how))
            await policy.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("sp", [1, 2])
def test_a_whole_run_with_two_ranks_has_the_curve_of_the_local_run(rlvr_tree: dict[str, Any], sp: int) -> None:
    def curve(name: str, kind: str, strategy: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
        rlvr_tree["run"]["name"], rlvr_tree["runtime"] = name, {"kind": kind}
        rlvr_tree["policy"]["strategy"] = strategy
        folder = Path(rlvr_tree["run"]["runs_dir"]).parent
        outcome = train(parse_config(rlvr_tree, folder=folder), code_folder=folder)
        rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
        weights = AutoModelForCausalLM.from_pretrained(outcome.checkpoint).state_dict()
        return [row["reward/mean"] for row in rows if "reward/mean" in row], weights

    (local, expected), (ranks, weights) = (
        curve("local", "local", {"kind": "torch"}),
        curve("ranks", "processes", {"kind": "fsdp2", "num_ranks": 2, "sp": sp}),
    )
    assert ranks == pytest.approx(local, abs=1e-6)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-4)
