"""How a policy's weights reach its engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from reroll.config.base import Node

WeightsKind = Literal["auto", "shared", "ipc", "broadcast", "disk", "store"]


class WeightsConfig(Node):
    """How a policy's weights reach its engines after every update."""

    kind: WeightsKind = "auto"
    """auto: the fastest way that can work. shared: by reference, inside one process. ipc: memory that two processes of one
    GPU (or, on CPUs, of one machine) see. broadcast: a process group of the sending ranks and the engines. disk: safetensors
    in a folder that all see. store: the runtime's own way of carrying bytes."""
    bucket_mb: float = Field(default=256, gt=0)
    """Weights travel in buckets of so many megabytes (a larger tensor has one of its own); each end holds two of them."""
    delta: bool = False
    """Send only the values that changed since the last push. Exact. Pays off where the way to the engines is slow; sender
    and engines each keep a copy of the weights in host memory."""
    folder: Path | None = None
    """For kind disk: a folder that every engine can read; null: `weights` in the run's folder."""
    retries: int = Field(default=2, ge=0)
    """A push that broke off is repeated, in full, so many times before the run ends."""
