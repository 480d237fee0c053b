"""A whole GRPO step on one GPU, by every way in which policy and engine can share it, against TRL with vLLM, in one run.

A model of Qwen3-0.6B's shape with random weights, 64 prompts × 8 siblings × 256 tokens: sampling, rewards, update, weights
published. `python benchmarks/gpu_step.py [--only embedded vllm-lease ...] [--rounds 1] [--busy 16]`; `--busy` keeps so many
cores of the host spinning beside it. vLLM and TRL must be installed in this environment for the contestants that need them;
REROLL_SGLANG_PYTHON names a Python that has sglang (scripts/setup_sglang.sh).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from report import arguments, report
from side_by_side import HERE, Contestant, model_folder, own_python, run_once
from transformers import Qwen3Config, Qwen3ForCausalLM

from reroll.models.load import load_tokenizer

CONTESTANTS = ("embedded", "embedded-processes", "embedded-ipc", "vllm", "vllm-lease", "vllm-ipc", "sglang", "trl")


def write_model(folder: Path) -> None:
    """The shape of Qwen3-0.6B, drawn at random, with a tokenizer that is at hand."""
    tokenizer = load_tokenizer(model_folder())
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)


@contextmanager
def spinning(num: int) -> Iterator[None]:
    """So many processes that want a core each, all the time."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def contestant(name: str, folder: Path) -> Contestant:
    script = ("trl_gpu_step.py", str(folder)) if name == "trl" else ("reroll_gpu_step.py", str(folder), name)
    return Contestant(name, own_python(), (str(HERE / "peers" / script[0]), *script[1:]))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="processes that spin beside it")
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in args.only}
    with tempfile.TemporaryDirectory() as folder, spinning(args.busy):
        write_model(Path(folder))
        for number in range(args.rounds):
            for name in args.only:
                results[name].append(run_once(contestant(name, Path(folder)), settle_s=1))
                print(f"round {number + 1}: {name} {results[name][-1]}", flush=True)
    report(
        "gpu_step",
        rows_of(results),
        title=__doc__.splitlines()[0],
        facts={"results": results, "busy": args.busy},
        save=args.save,
    )


def rows_of(results: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    medians = {
        name: {key: statistics.median(round_[key] for round_ in rounds) for key in rounds[0]}
        for name, rounds in results.items()
    }
    trl_s = medians.get("trl", {}).get("seconds", float("nan"))
    parts = ("wait_s", "swap_s", "train_s", "push_s", "generate_gib", "train_gib", "push_gib")
    return [
        {"way": name, "step_s": told["seconds"], "trl_over_it": trl_s / told["seconds"]}
        | {part: told.get(part, float("nan")) for part in parts}
        for name, told in medians.items()
    ]


if __name__ == "__main__":
    main()
