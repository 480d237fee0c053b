"""Which part of each weight a rank holds: of a sharded model as it is, and of one that is only planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reroll.weights.slices import Box, Slice, whole_box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

INTO_SHARES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Matrices of a layer whose rows tensor parallelism shares out."""
FROM_SHARES = ("o_proj", "down_proj")
"""Those whose columns it shares out."""
STACKED_EXPERTS = ("gate_up_proj", "down_proj")
"""The matrices of all experts of a layer, stacked: [experts, 2 · inner, hidden] and [experts, hidden, inner]."""
CUT_DIM = 1
"""FSDP cuts the inside of every expert: the first dimension, experts, is already shared out."""


def slice_of(name: str, parameter: DTensor, *, dtype: str) -> Slice:
    """This rank's part of a parameter. Along one dimension the axis laid out last cuts first; FSDP cuts what is left."""
    where = parameter.device_mesh.get_coordinate()
    assert where is not None
    box = whole_box(tuple(parameter.shape))
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            box = box.cut(dim, num=parameter.device_mesh.size(axis), index=where[axis])
    if box.shape != tuple(parameter.to_local().shape):
        raise RuntimeError(f"{name} is laid out as {parameter.placements}, of which this part was not expected")
    return Slice(name, box, tuple(parameter.shape), dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """How ranks share a model out: replicas × shards × tp, or, of experts, replicas × shards × ep."""

    num_ranks: int
    tp: int = 1
    ep: int = 1
    replicas: int = 1

    def slice_of(self, rank: int, name: str, shape: tuple[int, ...], *, dtype: str) -> Slice:
        """A rank's part of a parameter, as `slice_of` finds it where ranks are real."""
        return Slice(name, self._box(rank, name, whole_box(shape)), shape, dtype)

    def _box(self, rank: int, name: str, whole: Box) -> Box:
        shards = self.num_ranks // (self.replicas * self.tp)
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if self.ep > 1 and layer.endswith(".experts") and part in STACKED_EXPERTS:
            mine = whole.cut(0, num=self.ep, index=rank % self.ep)
            return mine.cut(CUT_DIM, num=shards // self.ep, index=rank // self.ep % (shards // self.ep))
        if self.tp > 1 and (part in INTO_SHARES or (part in FROM_SHARES and name.endswith(".weight"))):
            whole = whole.cut(int(part in FROM_SHARES), num=self.tp, index=rank % self.tp)
        return whole.cut(0, num=shards, index=rank // self.tp % shards)
