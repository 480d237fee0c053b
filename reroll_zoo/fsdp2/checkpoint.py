"""Checkpoints of sharded state, which any number of ranks can go on from: each reads what it holds, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from reroll.training.offload import as_shard_of
from reroll.training.saved import readable, written_by_another

SHARDS_FOLDER = "shards"
"""Inside a checkpoint: weights as they are trained, and the optimizer's state."""


def sharded_state(
    parameters: Mapping[str, DTensor], local: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, *, step: int
) -> dict[str, Any]:
    """All that a strategy must remember, by reference, as torch's checkpoints take it.

    `local` are the optimizer's parameters: this rank's parts of those of `parameters` that are trained, under the same names.
    """
    state: dict[str, Any] = {"step": step, "weights": dict(parameters), "optimizer": {}}
    for name, trained in local.items():
        state["optimizer"][name] = {
            key: value if key == "step" else as_shard_of(parameters[name], value)
            for key, value in optimizer.state[trained].items()
        }
    return state


def save_shards(state: dict[str, Any], folder: Path, *, group: dist.ProcessGroup) -> list[Path]:
    """Every rank writes its part, and is told which files that are; the folder must be one that all of them see.

    `group` are all ranks, on the host. Nobody else may use it meanwhile.
    """
    shards, rank = folder / SHARDS_FOLDER, dist.get_rank(group)
    save(state, checkpoint_id=shards, process_group=group)
    table = [shards / ".metadata"] if rank == 0 else []
    return [*shards.glob(f"__{rank}_*"), *table]


def load_shards(state: dict[str, Any], folder: Path) -> int:
    """Read into the tensors of `state`; returns the step."""
    shards = folder / SHARDS_FOLDER
    if not shards.is_dir():
        raise written_by_another(folder, "fsdp2")
    with readable(shards):
        load(state, checkpoint_id=shards)
    return int(state["step"])
