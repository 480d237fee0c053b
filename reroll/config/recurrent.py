"""Families of models with layers that carry a state from token to token, told by their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAMBA = {
    "bamba": "BambaMixer", "falcon_h1": "FalconH1Mixer", "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "nemotron_h": "NemotronHMamba2Mixer",
}  # fmt: skip
"""By `model_type`: what transformers calls the module."""
MIXERS = MAMBA | {
    "bailing_hybrid": "BailingHybridDeltaAttention", "kimi_linear": "KimiLinearDeltaAttention", "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv", "olmo_hybrid": "OlmoHybridGatedDeltaNet", "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet", "qwen3_next": "Qwen3NextGatedDeltaNet",
}  # fmt: skip
"""Those that were seen to do the same on rows, and token by token, as Hugging Face's own."""

_ATTEND = {"attention", "full_attention", "sliding_attention"}


def carries_state(card: Mapping[str, Any]) -> bool:
    """Whether some layer does, of the model that this config.json describes: in some families all may attend."""
    return card.get("model_type") in MIXERS and not (card.get("layer_types") and {*card["layer_types"]} <= _ATTEND)
