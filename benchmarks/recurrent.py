"""Layers that carry a state beside an attention model of equal size: both halves of a step, and the gap of trainer and engine.

Random weights in bf16: Qwen3.5's shape (three GatedDeltaNet layers to one of attention; width 1,024, 24 layers), and a Qwen3 of
as many layers whose MLPs are as wide as makes it as large. Siblings share no prompt in an update of the first. On a GPU
`python benchmarks/recurrent.py [--rounds 3] [--prompt-tokens 1024]`, with flash-linear-attention where it is installed; on a
CPU tiny models try it out: `python benchmarks/recurrent.py --prompts 2 --siblings 2 --prompt-tokens 16 --tokens 8 --rounds 1`
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import device_here, halves_of_a_step, work_from, write_model
from gpu_work import Work
from halves import Learner, Writer, batch_of, forget_peak, peak_gib
from report import report
from transformers import AutoConfig, AutoModelForCausalLM

LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
LARGE_STATE = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SMALL = LARGE | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 4096,
}
SMALL_STATE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PERIOD = 4
"""Every so many layers one has attention."""


def main() -> None:
    args = halves_of_a_step(__doc__)
    work, rows = work_from(args), []
    for name, sizes in models().items():
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), sizes)
            forget_peak()
            measured = halves_of(folder, work, rounds=args.rounds, micro_batch_tokens=args.micro_batch_tokens)
            rows.append({"model": name, **measured})
        print(rows[-1], flush=True)
    fla = "with" if find_spec("fla") else "without"
    note = f"{work.told()}; median of {args.rounds} rounds; {fla} flash-linear-attention"
    report("recurrent", rows, title=(__doc__ or "").splitlines()[0], note=note, save=args.save)


def models() -> dict[str, dict[str, Any]]:
    """The sizes of both."""
    on_gpu = device_here() == "cuda"
    shared, state = (LARGE, LARGE_STATE) if on_gpu else (SMALL, SMALL_STATE)
    kinds = ["full_attention" if (number + 1) % PERIOD == 0 else "linear_attention" for number in range(24)]
    hybrid = {"model_type": "qwen3_5_text", **shared, **state, "layer_types": kinds[: shared["num_hidden_layers"]]}
    return {"states and attention": hybrid, "attention": as_large(hybrid, {"model_type": "qwen3", **shared})}


def as_large(wanted: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """`sizes` with MLPs of such a width that the model is as large as the one that is wanted, to a multiple of 32."""
    per_width = 3 * sizes["hidden_size"] * sizes["num_hidden_layers"]
    wider = round((num_parameters(wanted) - num_parameters(sizes)) / per_width / 32) * 32
    return sizes | {"intermediate_size": sizes["intermediate_size"] + wider}


def num_parameters(sizes: dict[str, Any]) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))  # type: ignore[no-untyped-call]
    return sum(weight.numel() for weight in model.parameters())


def halves_of(folder: str, work: Work, *, rounds: int, micro_batch_tokens: int) -> dict[str, object]:
    writer, learner = Writer(folder, work), Learner(folder, micro_batch_tokens=micro_batch_tokens)
    writing, learning = [], []
    for _ in range(rounds + 1):  # The first warms up.
        took_s, written = writer.write()
        writing.append(took_s)
        learning.append(learner.learn(batch_of(written)))
    write_s, learn_s = statistics.median(writing[1:]), statistics.median(each.seconds for each in learning[1:])
    return {
        "parameters": learner.num_parameters,
        "write_s": write_s,
        "write_tokens_per_s": work.num_new_tokens / write_s,
        "learn_s": learn_s,
        "learn_tokens_per_s": work.num_new_tokens / learn_s,
        "allocated_gib": peak_gib(),
        "gap": f"{statistics.fmean(each.gap for each in learning[1:]):.2g}",
        "gap_max": f"{max(each.gap_max for each in learning[1:]):.2g}",
    }


if __name__ == "__main__":
    main()
