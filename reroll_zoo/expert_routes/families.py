"""Whose choice of experts can be noted and replayed. Known without loading a model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

FAMILIES = (
    "afmoe",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "solar_open",
)
"""Those whose layers have experts beside a router that chooses among their scores by `topk`, once."""

_SINCE = {"granitemoe": [5, 21]}
"""The transformers that a family needs to be among them, where it is not any."""


def why_not_replayed(card: Mapping[str, Any]) -> str:
    """Why the experts of the model that this config.json describes cannot be replayed; empty if they can."""
    family = str(card.get("model_type"))
    if family not in FAMILIES:
        return f"the choice of experts is replayed in models of the families {', '.join(FAMILIES)}, not {family}"
    if family in _SINCE and [int(part) for part in version("transformers").split(".")[:2]] < _SINCE[family]:
        needed = ".".join(map(str, _SINCE[family]))
        return f"the routers of family {family} tell what they choose since transformers {needed}: pip install -U transformers"
    if family == "deepseek_v2" and card.get("topk_method") != "greedy":
        return "this model has no score for an expert outside the groups that it chooses (topk_method is not greedy)"
    return ""
