"""Fields of the config that had another name before: who writes the old one is told the new; old runs are still read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

RENAMED: Mapping[str, tuple[str, ...]] = {
    "trace": ("gae_lambda",),
    "place": ("apply_to",),
    "solved_outside": ("keep_pass_rate",),
    "newest": ("ema_weight",),
    "window": ("take_window",),
    "redundant": ("extra_samples",),
    "drop_no_signal": ("drop_zero_variance_groups",),
    "ending": ("score_at",),
    "tensor_parallel": ("tp",),
    "offload": ("swap", "cpu_offload", "sleep"),
}
"""By the old name, what it is called now: the one of these that the node has."""

_SLEEPS = {"none": False, "all": True}
"""`engine.offload` had words for it."""


def renamed(key: str, value: Any, fields: Collection[str]) -> tuple[str, Any] | None:
    """What a node with these fields calls an unknown key now, and its value. None if it had no such key."""
    new = next((name for name in RENAMED.get(key, ()) if name in fields), None)
    if new is None or key in fields:
        return None
    return new, _SLEEPS.get(value, value) if new == "sleep" and isinstance(value, str) else value
