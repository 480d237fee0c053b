"""What the decode kernel's launch options cost: a call of `attend` for 512 rows, by warps and stages, and by whether siblings
share the pages of their prompt. On a GPU; on a CPU, under TRITON_INTERPRET=1, it only shows that all give the same."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from gpu_work import Work
from torch import Tensor

from reroll.models.attention import Scoring
from reroll_zoo.paged_cache import kernels
from reroll_zoo.paged_cache.kernels import PAGE

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WORK = Work() if ON_GPU else Work(prompts=2, siblings=2, prompt_tokens=70, tokens=60)
HEADS, KV_HEADS, DIM = (16, 8, 128) if ON_GPU else (4, 2, 16)
OPTIONS = [(4, 2), (4, 1), (4, 3), (4, 4), (2, 1), (2, 2), (2, 3), (2, 4), (1, 2), (1, 3), (8, 2)]
"""Warps and stages; the first are those of today."""
NUM_CALLS = 200 if ON_GPU else 1
COLD_LAYERS = 28 if ON_GPU else 1
"""Each call reads another layer's pages, as a step does: none lies in a GPU's cache from the call before."""


class Launched:
    """A kernel with other options than it is launched with."""

    def __init__(self, kernel: Any, num_warps: int, num_stages: int) -> None:
        self._kernel, self._options = kernel, {"num_warps": num_warps, "num_stages": num_stages}

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self._kernel[grid](*arguments, **(options | self._options))


def inputs(context: int, *, shares: bool) -> dict[str, Any]:
    """A step that writes token `context` of every sequence."""
    num, pages = WORK.num_samples, -(-context // PAGE)
    tables = torch.arange(num * pages, dtype=torch.int32).view(num, pages) + 1
    if shares:
        full = WORK.prompt_tokens // PAGE
        leaders = torch.arange(num) // WORK.siblings * WORK.siblings
        tables[:, :full] = tables[leaders, :full]
    whole = torch.arange(num, dtype=torch.int32)
    return {
        "tables": tables.to(DEVICE),
        "starts": torch.full((num,), context - 1, dtype=torch.int32, device=DEVICE),
        "bounds": torch.arange(num + 1, dtype=torch.int32, device=DEVICE),
        "block_sequence": whole.to(DEVICE),
        "block_first": torch.zeros_like(whole).to(DEVICE),
        "rows": 16,
        "scoring": Scoring(scaling=DIM**-0.5),
    }


def timed_us(query: Tensor, data: Tensor, given: dict[str, Any]) -> float:
    def calls() -> None:
        for number in range(NUM_CALLS):
            layer = data[number % COLD_LAYERS]
            kernels.attend(query, layer[0], layer[1], **given)

    calls()
    wait()
    began_s = time.perf_counter()
    calls()
    wait()
    return (time.perf_counter() - began_s) / NUM_CALLS * 1e6


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def main() -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    num_pages = 1 + WORK.num_samples * -(-WORK.row_tokens // PAGE)
    data = torch.randn((COLD_LAYERS, 2, num_pages, PAGE, KV_HEADS, DIM), dtype=dtype, device=DEVICE)
    query = torch.randn((WORK.num_samples, HEADS, DIM), dtype=dtype, device=DEVICE)
    today, kernel = {}, kernels._attend
    print("shares  context  warps stages       µs   TB/s read   same bits")
    for shares in (True, False):
        for context in (WORK.prompt_tokens + 1, WORK.row_tokens * 2 // 3, WORK.row_tokens):
            given = inputs(context, shares=shares)
            for warps, stages in OPTIONS:
                kernels._attend = Launched(kernel, warps, stages)
                output = kernels.attend(query, data[0][0], data[0][1], **given)
                same = torch.equal(output, today.setdefault((shares, context), output))
                micros = timed_us(query, data, given)
                terabytes = WORK.num_samples * context * 2 * KV_HEADS * DIM * data.element_size() / micros / 1e6
                row = {"shares": shares, "context": context, "warps": warps, "stages": stages, "us": micros, "same": same}
                print(f"{shares!s:>6} {context:8} {warps:6} {stages:6} {micros:8.1f} {terabytes:10.2f}   {same}", flush=True)
                print("RESULT " + json.dumps(row), flush=True)
    kernels._attend = kernel


if __name__ == "__main__":
    main()
