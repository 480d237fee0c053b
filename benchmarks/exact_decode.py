"""Where a decode step of `policy.exact` spends its time: kernel by kernel beside a plain one, and what its programs could take.

On a GPU a random model of Qwen3-0.6B's shape, 512 and 64 running requests. After the steps come the programs of attention for
one token of each sequence (those of one letter give the same bits, `A` those of the trainer) and the tiles of every product
beside cuBLAS. On a CPU the steps of a tiny model alone. `python benchmarks/exact_decode.py [--running 512 64] [--most 12]`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from exact_probe import drawn, matrices
from gpu_shapes import SHAPES, default_shape, device_here, write_model
from report import arguments, report
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.types import Request, SamplingParams

WARM, TIMED, PROFILED = 24, 16, 8
"""Steps, one after the other."""
SIBLINGS = 8
PROMPT_TOKENS = 150
"""A step then looks at what it looks at in the middle of an answer of 256 tokens to a prompt of 100."""


def main() -> None:
    parser = arguments(__doc__)
    on_gpu = device_here() == "cuda"
    parser.add_argument("--running", type=int, nargs="+", default=[512, 64] if on_gpu else [16])
    parser.add_argument("--most", type=int, default=12, help="kernels that are named")
    args = parser.parse_args()
    shape = SHAPES[default_shape()]
    rows = list(steps(shape, args))
    if on_gpu:
        for line in (*programs(shape), *tiles(shape, args.running)):
            print(line, flush=True)
    report("exact_decode", rows, title=(__doc__ or "").splitlines()[0], note="ms of a decode step", save=args.save)


def steps(shape: dict[str, Any], args: argparse.Namespace) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(scratch) / "model")
        write_model(Path(folder), shape)
        for running in args.running:
            row: dict[str, object] = {"running": running}
            for name, is_exact in (("plain", False), ("exact", True)):
                took, kernels = step_of(folder, running, is_exact=is_exact)
                row[f"{name}_ms"] = took
                print(f"{name}, {running} running: {took:.3f} ms a step", flush=True)
                for ms, count, kernel in kernels[: args.most]:
                    print(f"  {ms:7.3f} ms {count:6.1f} x {kernel[:60]}", flush=True)
            row["exact_over_plain"] = float(str(row["exact_ms"])) / float(str(row["plain_ms"]))
            yield row


def step_of(folder: str, running: int, *, is_exact: bool) -> tuple[float, list[tuple[float, float, str]]]:
    """Milliseconds of a decode step; and of each kernel in it: milliseconds, launches, name."""
    model = load_model(folder, dtype=torch.bfloat16, device=device_here(), exact=is_exact)
    engine = EmbeddedEngine(model, load_tokenizer(folder), max_running=running)
    num_tokens = WARM + TIMED + PROFILED + 8
    for number in range(running):
        first = 10 + 3 * (number // SIBLINGS)
        prompt = tuple(range(first, first + PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, seed=number)
        engine.submit(Request(id=str(number), prompt_ids=prompt, sampling=sampling))
    advance(engine, WARM)
    started = time.perf_counter()
    advance(engine, TIMED)
    took = (time.perf_counter() - started) / TIMED * 1e3
    on_gpu = device_here() == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        advance(engine, PROFILED)
    where, attribute = (DeviceType.CUDA, "self_device_time_total") if on_gpu else (DeviceType.CPU, "self_cpu_time_total")
    kernels = [
        (getattr(event, attribute) / 1e3 / PROFILED, event.count / PROFILED, event.key)
        for event in seen.key_averages()
        if event.device_type == where
    ]
    while engine.num_unfinished:
        engine.step()
    return took, sorted(kernels, reverse=True)


def advance(engine: EmbeddedEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def programs(shape: dict[str, Any]) -> Iterator[str]:
    """One line for each program that attends to one token of each of 512 sequences."""
    from reroll_zoo.exact_attention import READING, WRITING, HeadShape, one_token_each
    from reroll_zoo.exact_kernels import took_ms
    from reroll_zoo.paged_cache.kernels import READING_ROWS

    heads = HeadShape(
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        dim=shape["head_dim"],
        dtype=torch.bfloat16,
        softcap=None,
        window=None,
        has_sinks=False,
    )
    newest = one_token_each(heads, torch.device(device_here()), num_contexts=512)
    classes: list[torch.Tensor] = []
    others = [type(READING)(rows, num_warps) for rows, num_warps in ((32, 2), (32, 4), (READING_ROWS, 2), (READING_ROWS, 8))]
    for program in (READING, *WRITING, *others):
        got = newest(program)
        number = next((place for place, like in enumerate(classes) if torch.equal(like, got)), len(classes))
        classes += [got] if number == len(classes) else []
        name = f"attention {program.rows} rows, {program.num_warps or 'own'} warps, {program.num_stages} stages"
        differing = int((got != classes[0]).sum())
        took = took_ms(partial(newest, program))
        yield f"{'ABCDEFGHIJ'[number]} {name:44} {took:7.4f} ms, {differing} of {got.numel()} differ"


def tiles(shape: dict[str, Any], nums: Sequence[int]) -> Iterator[str]:
    """One line for each product: cuBLAS, and the tiles from the quickest on, in microseconds."""
    from reroll_zoo.exact_kernels import TILES, alike, multiply, took_ms

    for name, (width_out, width_in) in matrices(shape).items():
        weight = drawn(width_out, width_in)
        same = alike(width_in, torch.bfloat16, weight.device)
        for num in nums:
            x = drawn(num, width_in)
            plain = took_ms(partial(functional.linear, x, weight)) * 1e3
            timed = {
                tile: took_ms(partial(multiply, x, weight, None, tile=tile)) * 1e3 for tile in same if tile.rows <= max(num, 64)
            }
            took = sorted((us, TILES.index(tile)) for tile, us in timed.items())
            found = ", ".join(f"{us:.1f} {shown(TILES[place])}" for us, place in took[:4])
            yield f"{name} {num} ({len(same)} of {len(TILES)} alike): cuBLAS {plain:.1f} us; {found}"


def shown(tile: Any) -> str:
    return f"{tile.rows}x{tile.columns}/{tile.step} w{tile.num_warps} s{tile.num_stages}"


if __name__ == "__main__":
    main()
