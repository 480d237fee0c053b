"""The parts of the deepspeed strategy that need no second process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reroll.config.load import parse_config
from reroll.config.parts import FixedModelConfig, ModelConfig, OptimConfig
from reroll.errors import ConfigError, RunFolderError
from reroll.models.load import DTYPES, load_model, load_tokenizer
from reroll.pipeline.spawn import train_devices
from reroll.runtime.local import LocalRuntime
from reroll.tokens.batch import Batch, pack
from reroll.training.loss import SFT_LOSS
from reroll.types import Sample
from reroll_zoo.deepspeed.config import DeepspeedConfig
from reroll_zoo.plan.memory import Training, answer_memory, train_memory
from reroll_zoo.plan.shape import shape_of
from reroll_zoo.ranks.empty_model import skeleton
from reroll_zoo.ranks.group import join_process_group
from reroll_zoo.tiny_models import make_tiny

pytest.importorskip("deepspeed")
import deepspeed

from reroll_zoo.deepspeed import strategy as deepspeed_strategy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def _one_rank() -> Iterator[None]:
    join_process_group(None, rank=0, world_size=1, device="cpu")
    yield
    deepspeed.comm.destroy_process_group()  # Which forgets, too, what DeepSpeed has made of the group.


def make(folder: Path, *, total_steps: int = 10, **options: Any) -> Any:
    strategy = DeepspeedConfig(**options)
    config, tokenizer = ModelConfig(model=str(folder), strategy=strategy), load_tokenizer(str(folder))
    full = load_model(str(folder), dtype=DTYPES[strategy.precision], device="cpu")
    empty = partial(skeleton, config, tokenizer, head="language")
    return deepspeed_strategy.DeepspeedStrategy(
        empty, full, tokenizer, strategy, OptimConfig(), device="cpu", total_steps=total_steps
    )


def row() -> Batch:
    zeros, mask = np.zeros(5, dtype=np.float32), np.arange(5) > 1
    return pack([Sample(ids=np.arange(4, 9), loss_mask=mask, logp=zeros, turn=np.where(mask, 0, -1))])


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_the_planners_terms_are_the_bytes_of_the_strategys_tensors(folder: Path, stage: int, precision: str) -> None:
    strategy, size = make(folder, stage=stage, precision=precision), 2 if precision == "bf16" else 4
    how = Training(
        value_bytes=size, micro_batch_tokens=64, zero_stage=stage, shards=1 if stage == 3 else None, zero_ranks=1, on_cpu=True
    )
    held = train_memory(shape_of(str(folder)), how).held
    moments = strategy._optimizer.state
    assert held["parameters"] == size * sum(
        getattr(parameter, "ds_numel", parameter.numel()) for parameter in strategy._model.parameters()
    )
    # Groups of parameters are padded to a round number.
    assert sum(master.nbytes for master in moments) == pytest.approx(held["fp32 masters"], rel=1e-3)
    assert sum(state[key].nbytes for state in moments.values() for key in ("exp_avg", "exp_avg_sq")) == pytest.approx(
        held["optimizer"], rel=1e-3
    )
    stats = strategy.forward_backward(row(), SFT_LOSS) + strategy.optim_step()
    assert stats["grad_norm"].value > 0


def test_the_planner_cuts_by_stage(folder: Path) -> None:
    shape = shape_of(str(folder))
    numbers = shape.num_parameters
    how = partial(Training, value_bytes=2, micro_batch_tokens=64, zero_ranks=4)
    one, two, three = (how(zero_stage=stage, shards=4 if stage == 3 else None) for stage in (1, 2, 3))
    trained = [train_memory(shape, training) for training in (one, two, three)]
    assert [memory.held["parameters"] for memory in trained] == [2 * numbers, 2 * numbers, numbers // 2]
    assert [memory.held["optimizer"] for memory in trained] == [2 * numbers] * 3
    assert trained[0].working["gradients"] == 6 * numbers
    assert trained[1].working["gradients"] < 3 * numbers
    assert [answer_memory(shape, training).held["parameters"] for training in (one, three)] == [2 * numbers, numbers // 2]


@pytest.mark.usefixtures("_one_rank")
def test_a_checkpoint_of_another_strategy_is_refused(folder: Path) -> None:
    with pytest.raises(RunFolderError, match="not written by strategy deepspeed"):
        make(folder, stage=2).load(folder)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_fixed_model_holds_nothing_but_weights(folder: Path, stage: int) -> None:
    fixed = make(folder, stage=stage, total_steps=0)
    assert fixed.weights() == {}
    assert len(fixed.weights(frozen=True)) == len(list(fixed._model.parameters()))
    assert not any(parameter.requires_grad for parameter in fixed._model.parameters())
    assert torch.equal(fixed.forward(row(), SFT_LOSS.needs).logp, make(folder, stage=stage).forward(row(), SFT_LOSS.needs).logp)


@pytest.mark.usefixtures("_one_rank")
def test_its_state_does_not_leave_the_device(folder: Path) -> None:
    strategy = make(folder, stage=2)
    strategy.to("cpu")
    with pytest.raises(ValueError, match="set swap of this model to none"):
        strategy.to("cuda:0")


def test_there_is_a_rank_on_every_device() -> None:
    model = FixedModelConfig(model="m", devices="0-3", strategy=DeepspeedConfig())
    assert train_devices(LocalRuntime(), model) == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("runtime", "policy", "where", "says"),
    [
        ({"kind": "local"}, {}, "policy.strategy.kind", "set runtime: {kind: processes}"),
        ({"kind": "ray"}, {"swap": "optimizer"}, "policy.swap", "policy.strategy.cpu_offload to true"),
        ({"kind": "ray", "num_gpus": 2}, {"devices": "0-1"}, "policy.strategy.num_ranks", "at most 2"),
    ],
)
def test_check_refuses_what_cannot_run_and_names_the_fix(
    rlvr_tree: dict[str, Any], tmp_path: Path, runtime: dict[str, Any], policy: dict[str, Any], where: str, says: str
) -> None:
    rlvr_tree["runtime"] = runtime
    rlvr_tree["policy"] |= {"strategy": {"kind": "deepspeed", "num_ranks": 3}, **policy}
    with pytest.raises(ConfigError) as caught:
        parse_config(rlvr_tree, folder=tmp_path)
    assert [violation.path for violation in caught.value.violations] == [where]
    assert says in caught.value.violations[0].fix
