"""Which models see, told by their config.json: without torch, so before anything is started."""

from __future__ import annotations

from reroll.config.host import model_config

SMOL = ("smolvlm", "idefics3")
QWEN = ("qwen2_5_vl", "qwen3_vl")
GEMMA = ("gemma3",)
SEEING = (*SMOL, *QWEN, *GEMMA)
"""By `model_type`: those that are shown pictures here."""


def seeing_family(model: str | None) -> str | None:
    """The family of a model that sees; None if it reads text only, or lies on no disk of this machine."""
    found = (model_config(model) or {}).get("model_type") if model else None
    return found if found in SEEING else None
