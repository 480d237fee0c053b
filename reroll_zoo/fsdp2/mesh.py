"""How the ranks of a model are laid out."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig

REPLICA, SHARD, TP = "replica", "shard", "tp"
"""The axes along which ranks are laid out; neighbours differ in the last."""
SHARE, SP = "share", "sp"
"""The same ranks by what they read: those with the same share of a batch, and among them those with the same tokens."""


def build_mesh(config: Fsdp2StrategyConfig, *, device: str) -> DeviceMesh:
    """The device mesh of all ranks: replicas × shards × tp.

    Ranks that share sequences (`sequence_group`) are neighbours among the shards: each holds its own part of the parameters,
    and their gradients, which come from different tokens, are summed as those of all shards are.
    """
    world_size, sp, tp = dist.get_world_size(), config.sp, config.tp
    if world_size % (config.replicas * sp * tp):
        raise ValueError(
            f"{world_size} ranks do not divide into replicas {config.replicas} × sp {sp} × tp {tp}: change strategy or devices"
        )
    shape = (config.replicas, world_size // (config.replicas * tp), tp)
    return init_device_mesh(torch.device(device).type, shape, mesh_dim_names=(REPLICA, SHARD, TP))


def sequence_group(config: Fsdp2StrategyConfig, *, device: str) -> dist.ProcessGroup | None:
    """The ranks that this one shares its sequences with; None where each has its own. Every rank calls it."""
    if config.sp == 1:
        return None
    shape = (dist.get_world_size() // config.ranks_per_share, config.sp, config.tp)
    mesh = init_device_mesh(torch.device(device).type, shape, mesh_dim_names=(SHARE, SP, TP))
    return mesh[SP].get_group()
