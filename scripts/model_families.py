"""Writes docs/models.md: what each family of models does here, measured on a tiny random model of it.

    python scripts/model_families.py                       # on the CPU, and writes the page: two minutes
    python scripts/model_families.py --device cuda         # on a GPU: two minutes at most
    python scripts/model_families.py --page                # writes the page from what was measured on both

What was measured is in docs/results/models_cpu.json and models_cuda.json (`--out`: elsewhere). The quick tests hold some
families to it, the slow ones all.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from in_processes import Lost, in_processes
from model_page import Results, fault, gap, half_gaps, page
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from reroll.config.registry import load_entry
from reroll.models.load import skeleton
from reroll.models.recurrent import is_recurrent
from reroll_zoo.expert_routes import families
from reroll_zoo.fsdp2 import experts, tensor
from reroll_zoo.model_check import contract
from reroll_zoo.tiny_models import make_tiny

ENGINES = {
    "vLLM": ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    "SGLang": ("llama", "qwen2", "qwen3", "smollm3"),
}
"""Families that ran the contract of engines (`tests/contract`) there on a GPU."""

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "models.md"
RESULTS = {device: DOCS / "results" / f"models_{device}.json" for device in ("cpu", "cuda")}
LIMITS_S = {"cpu": 3600.0, "cuda": 105.0}
"""Machines with a GPU are lent for minutes."""

_WINDOW = {"sliding_window": 8}
_UNTIED = {"tie_embeddings": False}
"""Tied, scaled embeddings have a random model repeat its last token with near certainty."""
_NO_SHARED_KEYS = {"kv_heads": 4}
_MANY = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "kv_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "head_dim": 8,
}  # fmt: skip
_ROUTED = {**_MANY, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DELTA_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "initializer_range": 0.1}
"""With the larger weights of the others, Hugging Face's own passes with and without a cache differ by 7e-05."""
_DELTA = {
    **_DELTA_LAYERS,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 16, "initializer_range": 0.1}
_DELTA_MANY = {**_DELTA, **_MANY, "num_experts": 4, "shared_expert_intermediate_size": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_MANY, **_WINDOW, "num_experts": 4, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "bailing_hybrid": {**_LATENT, **_MANY, **_DELTA_LAYERS, "linear_head_dim": 16, "linear_num_heads": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bitnet": {},
    "cohere": {},
    "cohere2": _WINDOW,
    "deepseek_v2": {**_LATENT, **_ROUTED, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, **_ROUTED},
    "dots1": _ROUTED,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": {**_WINDOW, "sliding_window_pattern": 2},
    "exaone_moe": {**_MANY, **_WINDOW, "num_experts": 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma2": {**_WINDOW, **_UNTIED},
    "gemma3_text": {**_WINDOW, **_UNTIED, "sliding_window_pattern": 2},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_ROUTED, "n_group": 1},
    "glm4_moe_lite": {**_LATENT, **_ROUTED},
    "gpt2": _NO_SHARED_KEYS,
    "gpt_neox": _NO_SHARED_KEYS,
    "gpt_oss": {**_LOCAL, **_WINDOW},
    "granite": {},
    "granitemoe": _LOCAL,
    "granitemoehybrid": {**_LOCAL, **_MAMBA, "layer_types": _DELTA["layer_types"], "shared_intermediate_size": 64},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jais2": {},
    "kimi_linear": {**_LATENT, **_MANY, **_DELTA_LAYERS, "linear_head_dim": 16, "linear_num_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**_MANY, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 4, "num_dense_layers": 1},
    "llama": {},
    "minimax_m2": _LOCAL,
    "ministral": _WINDOW,
    "mistral": _WINDOW,
    "mixtral": {**_LOCAL, **_WINDOW},
    "nanochat": {},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "initializer_range": 0.1,
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        **_MANY,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        "head_dim": 16,
    },
    "olmo": {},
    "olmo2": {},
    "olmo_hybrid": _DELTA,
    "olmo3": _WINDOW,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": _WINDOW,
    "qwen2": {},
    "qwen2_moe": {**_MANY, "num_experts": 8, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_5_moe_text": _DELTA_MANY,
    "qwen3_5_text": _DELTA,
    "qwen3_moe": {},
    "qwen3_next": _DELTA_MANY,
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {**_MANY, "n_routed_experts": 4},
    "starcoder2": _WINDOW,
    "vaultgemma": _WINDOW,
    "youtu": _LATENT,
    # What follows is refused, by the trainer or by the embedded engine.
    "deepseek_v32": {**_LATENT, **_ROUTED},
    "deepseek_v4": {},
    "diffllama": {},
    "doge": {},
    "gemma4_text": _WINDOW,
    "glm_moe_dsa": {},
    "hrm_text": {},
    "jamba": {},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "mimo_v2_flash": {},
    "minimax": {},
    "nemotron": {},
    "phimoe": {"num_local_experts": 4, **_WINDOW},
    "recurrent_gemma": {},
    "stablelm": {},
}
"""Fields of each family's tiny config that are not those of all. Windows are shorter than the sequences."""


def measure(family: str, folder: Path, *, training: bool = False, half: bool = False, device: str = "cpu") -> contract.Measured:
    """Make a tiny model in the folder, and compare."""
    if family not in CONFIG_MAPPING:
        return contract.Measured(refused=f"transformers {transformers.__version__} does not know {family}")
    options: dict[str, Any] = {"hidden": 64, "layers": 3, "initializer_range": 0.2, "max_positions": 128} | FAMILIES[family]
    name = str(make_tiny(folder, family=family, **options))  # type: ignore[arg-type]  # Any that transformers knows.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return contract.measure(name, training=training, half=half, device=device)


def beside(family: str, folder: Path) -> list[str]:
    """What takes the model in the folder, beside one process with the embedded engine."""
    found = [] if is_recurrent(skeleton(str(folder))) else ["sp"]
    lists = {"tp": tensor.FAMILIES, "ep": experts.FAMILIES, "routes": families.FAMILIES, **ENGINES}
    return found + [name for name, taken in lists.items() if family in taken]


def measure_all(family: str, *, device: str) -> tuple[contract.Measured, list[str]]:
    """In a process of its own."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # Tiny products: further threads would only wait.
    with tempfile.TemporaryDirectory() as folder:
        found = measure(family, Path(folder), training=True, half=True, device=device)
        return found, [] if found.refused else beside(family, Path(folder))


def _print_row(family: str, found: contract.Measured) -> None:
    """In one line of a terminal."""
    gaps = (found.packed, found.siblings, found.gradient, found.step, found.lora, found.engine, found.pushed)
    numbers = " ".join(f"{gap(size):>6}" for size in gaps)
    verdict = "refused" if found.refused else "ok" if found.agrees else f"FAILS: {fault(found)}"
    print(f"{family:18} {numbers} {found.num_same} {found.cache:9} {half_gaps(found):9} {verdict}", flush=True)


def _versions(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def _all(device: str) -> list[str]:
    """All families, but on a GPU those that are refused."""
    known = Results.read(RESULTS["cpu"]).measured if device != "cpu" else {}
    return [family for family in FAMILIES if family not in known or not known[family].refused]


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise SystemExit(f"--device {device}: PyTorch finds no GPU here")
    if load_entry("reroll.cache_backends", device) is None:
        raise SystemExit(
            "reroll's entry points are not found, so nothing would run on the GPU's kernels: pip install --no-deps -e ."
        )


def main() -> None:
    """Measure every family, and write the page."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=tuple(RESULTS), default="cpu")
    parser.add_argument("--out", type=Path, help="where to write what was measured; default: docs/results")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--at-once", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--limit-s", type=float, help="what is not measured by then is left out; default on a GPU: 105")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page alone")
    args = parser.parse_args()
    if not args.page:
        _check_device(args.device)
        file = args.out or RESULTS[args.device]
        began = time.monotonic()
        found = run(
            args.device, args.families or _all(args.device), at_once=args.at_once, limit_s=args.limit_s or LIMITS_S[args.device]
        )
        found.write(file)
        failed = [family for family, one in found.measured.items() if not (one.agrees or one.refused)]
        print(
            f"{len(found.measured)} families in {time.monotonic() - began:.0f} s: {file}; failed: {', '.join(failed) or 'none'}"
        )
    if args.page or (args.device == "cpu" and not (args.families or args.out)):
        PAGE.write_text(page(*(Results.read(file) for file in RESULTS.values())))


def run(device: str, chosen: list[str], *, at_once: int, limit_s: float) -> Results:
    """Measure these, the best known first, so that they are measured if time ends."""
    first = [family for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "qwen3_next") if family in chosen]
    found = Results(_versions(device), {}, {})
    preload = ["transformers.models.llama.modeling_llama", "reroll_zoo.model_check.contract", "reroll_zoo.tiny_models"]
    names = [*first, *(family for family in chosen if family not in first)]
    work = partial(measure_all, device=device)
    for family, answer in in_processes(work, names, at_once=at_once, limit_s=limit_s, preload=preload):
        one, others = (contract.Measured(broken=answer.reason), []) if isinstance(answer, Lost) else answer
        found.measured[family], found.beside[family] = one, others
        _print_row(family, one)
    order = [family for family in FAMILIES if family in found.measured]
    return Results(found.versions, {name: found.measured[name] for name in order}, {name: found.beside[name] for name in order})


if __name__ == "__main__":
    main()
