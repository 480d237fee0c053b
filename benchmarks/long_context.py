"""Contexts of 32,768 tokens on one GPU, with all the cache that they want and with a budget that holds two of them.

A model of Qwen3-4B's shape with random weights in bf16; eight requests, each with a prompt of its own, write 64 tokens.
`python benchmarks/long_context.py`. Under the budget requests wait, or give way and are read again. In fp32 they write the same
(tests/gpu); in bf16 how many run together decides how sums are rounded, and of random weights draws soon fall otherwise.
"""

from __future__ import annotations

import gc
import time

import torch
from report import arguments, report
from side_by_side import model_folder
from transformers import Qwen3Config, Qwen3ForCausalLM

from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.attention import IMPLEMENTATION
from reroll.models.fused import fuse
from reroll.models.load import load_tokenizer
from reroll.types import Completion, Request, SamplingParams

SHAPE = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128}
NUM_REQUESTS, PROMPT, WRITTEN = 8, 32_768, 64
GIB = 2**30


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, num_key_value_heads=8, vocab_size=151_936, max_position_embeddings=40_960)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION)
    fuse(model)
    return model.eval().requires_grad_(False)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 40_000, (NUM_REQUESTS, PROMPT), generator=generator).tolist()
    sampling = {"max_tokens": WRITTEN, "min_tokens": WRITTEN}
    return [
        Request(id=str(number), prompt_ids=tuple(prompt), sampling=SamplingParams(**sampling, seed=number))
        for number, prompt in enumerate(prompts)
    ]


def write(engine: EmbeddedEngine) -> dict[str, Completion]:
    for request in requests():
        engine.submit(request)
    done: dict[str, Completion] = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


def main(*, save: bool) -> None:
    model, tokenizer = make_model(), load_tokenizer(model_folder())
    rows, expected = [], None
    for name, budget_gib in (("all it wants", None), ("12 GiB", 12)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cache_bytes = None if budget_gib is None else budget_gib * GIB
        engine = EmbeddedEngine(model, tokenizer, max_running=NUM_REQUESTS, cache_bytes=cache_bytes)
        started_s = time.perf_counter()
        done = write(engine)
        torch.cuda.synchronize()
        expected = expected or done
        rows.append(
            {
                "cache": name,
                "seconds": time.perf_counter() - started_s,
                "peak_gib_beside_weights": (torch.cuda.max_memory_allocated() - before) / GIB,
                "gave_way": engine.counts.num_gave_way,
                "same_completions": sum(done[id].token_ids == one.token_ids for id, one in expected.items()),
            }
        )
        engine.close()
        del engine
    title = f"{NUM_REQUESTS} contexts of {PROMPT:,} tokens: {torch.cuda.get_device_name()}"
    report("long_context", rows, title=title, save=save)


if __name__ == "__main__":
    main(save=arguments(__doc__).parse_args().save)
