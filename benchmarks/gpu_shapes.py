"""Models of known shapes with random weights, drawn on the GPU where there is one, that read the words of `gpu_work`.

`python benchmarks/gpu_shapes.py FOLDER SHAPE` writes one, in a process that leaves nothing on the GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_work import WORDS, Work
from report import arguments
from transformers import AutoConfig, AutoModelForCausalLM

from reroll.models.load import save_model
from reroll_zoo.plan.known import KNOWN
from reroll_zoo.tiny_models import tiny_tokenizer

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": KNOWN["Qwen/Qwen3-0.6B"],
    "4b": KNOWN["Qwen/Qwen3-4B"],
    "8b": KNOWN["Qwen/Qwen3-8B"],
    "tiny": {**KNOWN["Qwen/Qwen3-0.6B"], **TINY, "num_key_value_heads": 2, "vocab_size": 4096},
}
MAX_POSITIONS = 32_768


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options by which a benchmark's work is chosen."""
    default = Work()
    parser.add_argument("--prompts", type=int, default=default.prompts)
    parser.add_argument("--siblings", type=int, default=default.siblings)
    parser.add_argument("--prompt-tokens", type=int, default=default.prompt_tokens)
    parser.add_argument("--tokens", type=int, default=default.tokens, help="of each answer")


def halves_of_a_step(doc: str | None) -> argparse.Namespace:
    """What a benchmark that times the halves of a step was asked for."""
    parser = arguments(doc)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    add_sizes(parser)
    return parser.parse_args()


def add_work(parser: argparse.ArgumentParser) -> None:
    """Those, the model's shape, and settings."""
    add_sizes(parser)
    parser.add_argument("--shape", choices=SHAPES, help="of the model; default: 0.6b, and tiny where there is no GPU")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="of reroll's config, e.g. policy.lora.rank=16"
    )


def work_from(args: argparse.Namespace) -> Work:
    return Work(
        prompts=args.prompts,
        siblings=args.siblings,
        prompt_tokens=args.prompt_tokens,
        tokens=args.tokens,
        device=device_here(),
    )


def device_here() -> Any:
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_shape() -> str:
    return "0.6b" if torch.cuda.is_available() else "tiny"


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """An ordinary folder, in bf16. `sizes` are the fields of the family's config."""
    tokenizer = tiny_tokenizer(words=WORDS, max_positions=MAX_POSITIONS)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**sizes, **ends, max_position_embeddings=MAX_POSITIONS)
    torch.manual_seed(0)
    with torch.device(device_here()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    save_model(model, tokenizer, folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), SHAPES[sys.argv[2]])
