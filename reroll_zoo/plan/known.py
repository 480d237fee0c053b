"""Sizes of models that people name by their hub id, for plans made where the hub is out of reach. From their config.json."""

from __future__ import annotations

from typing import Any


def _decoder(
    family: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocabulary: int,
    *,
    tied: bool,
    head_dim: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "head_dim": head_dim or hidden // heads,
        **more,
    }


def _experts(num: int, per_token: int, intermediate: int) -> dict[str, int]:
    return {"num_experts": num, "num_experts_per_tok": per_token, "moe_intermediate_size": intermediate}


_QWEN2 = {
    "0.5B": _decoder("qwen2", 896, 24, 14, 2, 4864, 151936, tied=True),
    "1.5B": _decoder("qwen2", 1536, 28, 12, 2, 8960, 151936, tied=True),
    "3B": _decoder("qwen2", 2048, 36, 16, 2, 11008, 151936, tied=True),
    "7B": _decoder("qwen2", 3584, 28, 28, 4, 18944, 152064, tied=False),
    "14B": _decoder("qwen2", 5120, 48, 40, 8, 13824, 152064, tied=False),
    "32B": _decoder("qwen2", 5120, 64, 40, 8, 27648, 152064, tied=False),
    "72B": _decoder("qwen2", 8192, 80, 64, 8, 29568, 152064, tied=False),
}

KNOWN: dict[str, dict[str, Any]] = {
    **{f"Qwen/Qwen2.5-{size}": config for size, config in _QWEN2.items()},
    **{f"Qwen/Qwen2.5-{size}-Instruct": config for size, config in _QWEN2.items()},
    "Qwen/Qwen3-0.6B": _decoder("qwen3", 1024, 28, 16, 8, 3072, 151936, tied=True, head_dim=128),
    "Qwen/Qwen3-1.7B": _decoder("qwen3", 2048, 28, 16, 8, 6144, 151936, tied=True, head_dim=128),
    "Qwen/Qwen3-4B": _decoder("qwen3", 2560, 36, 32, 8, 9728, 151936, tied=True, head_dim=128),
    "Qwen/Qwen3-8B": _decoder("qwen3", 4096, 36, 32, 8, 12288, 151936, tied=False, head_dim=128),
    "Qwen/Qwen3-14B": _decoder("qwen3", 5120, 40, 40, 8, 17408, 151936, tied=False, head_dim=128),
    "Qwen/Qwen3-32B": _decoder("qwen3", 5120, 64, 64, 8, 25600, 151936, tied=False, head_dim=128),
    "Qwen/Qwen3-30B-A3B": _decoder(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, tied=False, head_dim=128, **_experts(128, 8, 768)
    ),
    "Qwen/Qwen3-235B-A22B": _decoder(
        "qwen3_moe", 4096, 94, 64, 4, 12288, 151936, tied=False, head_dim=128, **_experts(128, 8, 1536)
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _decoder("llama", 2048, 16, 32, 8, 8192, 128256, tied=True),
    "meta-llama/Llama-3.2-3B-Instruct": _decoder("llama", 3072, 28, 24, 8, 8192, 128256, tied=True),
    "meta-llama/Llama-3.1-8B-Instruct": _decoder("llama", 4096, 32, 32, 8, 14336, 128256, tied=False),
    "meta-llama/Llama-3.1-70B-Instruct": _decoder("llama", 8192, 80, 64, 8, 28672, 128256, tied=False),
    "google/gemma-2-2b-it": _decoder("gemma2", 2304, 26, 8, 4, 9216, 256000, tied=True, head_dim=256),
    "google/gemma-2-9b-it": _decoder("gemma2", 3584, 42, 16, 8, 14336, 256000, tied=True, head_dim=256),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _decoder("llama", 576, 30, 9, 3, 1536, 49152, tied=True),
}
