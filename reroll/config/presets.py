"""Algorithms by name. A preset is only a shorter way to write plain fields: `reroll check --expand` shows them.

A package adds its own with an entry point of the group `reroll.presets`, which names a mapping like `PRESETS` below.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from reroll.config.registry import entry_names, load_entry

Preset = Mapping[str, Any]
"""The fields that a name stands for; those that the user writes win over them."""

PRESETS: Mapping[str, Preset] = {
    "grpo": {
        "advantage": {"kind": "normalised", "mean": "group", "std": "group"},
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "sequence_mean",
    },
}
"""What a config is that names no algorithm."""


@cache
def presets() -> dict[str, Preset]:
    """All that is installed. Of two packages with the same name for a preset, the first is heard."""
    found = dict(PRESETS)
    for entry in entry_names("reroll.presets"):
        found |= {name: preset for name, preset in load_entry("reroll.presets", entry).items() if name not in found}
    return found
