"""What all sources of prompts share."""

from __future__ import annotations

from pydantic import Field

from reroll.config.base import Node


class Source(Node):
    """What all prompt sources share."""

    domain: str = "default"
    """Chooses the reward of its prompts."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of this source in the mix, relative to the others. A domain's share is that of its sources together, and holds
    for what is trained on: a group that is dropped is replaced by one of its domain."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows."""
    system: str | None = None
    """A system message put before every prompt that brings none of its own."""
    level: int = 0
    """How hard its prompts are, by your own count: curriculum `ladder` opens one level of a domain after the other."""
