"""Which numbers of rows give a row the same bits: products in bf16 of the shape of Qwen3-0.6B, and our other kernels.

The same first row is computed among M rows, M from 1 to 16,384, on sums whose large terms cancel, so that another order shows.
Numbers of rows that give it the same bits are a class; where the row stands among the others is tried too. On a GPU products
are cuBLAS's as they are, cuBLASLt's without sums in parts (no split-K), and those of `policy.exact`: beside the classes of the
first two stands for how many M their bits are those of the third, and what each takes. One class that is as `exact` may stand
in for it. `python benchmarks/exact_probe.py [--shapes 0.6b 4b]`; on a CPU `python benchmarks/exact_probe.py --most 16`
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from gpu_shapes import SHAPES, default_shape, device_here
from report import arguments, report
from torch import Tensor
from torch.nn import functional

from reroll.models.attention import PackedAttention, Scoring
from reroll.models.fused import kernels
from reroll_zoo import exact_sums

ONE_LENGTH = 64
"""Tokens of a sequence where M sequences are attended to at once."""
CONTEXT = 300
"""Keys of a sequence that is being written."""
PLACE = 15
"""Of the token that is looked at where one sequence has M tokens."""
STEPS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 384, 500, 512)
LARGE = (768, 1000, 1024, 2000, 2048, 4096, 8000, 8192, 16_384)
MOST_OUTPUTS = 1 << 30
"""Numbers that a product may give: the head is tried with fewer rows."""
TIMED = (64, 512, 16_384)

Rows = Callable[[int], Tensor]
"""What the row that is looked at becomes, among M."""
Product = Callable[..., Tensor]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: 0.6b, on a CPU tiny")
    parser.add_argument("--most", type=int, help="rows that are tried; default: 16,384, on a CPU 16")
    args = parser.parse_args()
    on_gpu = device_here() == "cuda"
    most = args.most or (LARGE[-1] if on_gpu else 16)
    tried = [num for num in (*STEPS, *LARGE) if num <= most]
    rows = []
    for name in args.shapes or [default_shape()]:
        for found in (*products(SHAPES[name], tried), *kernels_of(SHAPES[name], tried)):
            rows.append({"shape": name, **found})
            print(rows[-1], flush=True)
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    note = f"{where}, torch {torch.__version__}; M in one class give the row the same bits"
    report("exact_probe", rows, title=(__doc__ or "").splitlines()[0], note=note, save=args.save)
    for row in rows:  # What fits on a screen.
        took = " ".join(f"{row[f'ms_{num}']:8.3f}" for num in TIMED)
        print(f"{row['what']!s:34} {row['sums']!s:20} classes {row['classes']!s:3} as exact {row['as_exact']!s:9} ms {took}")


def products(sizes: dict[str, Any], tried: Sequence[int]) -> Iterator[dict[str, object]]:
    """A row for every matrix and way to add up."""
    for name, (width_out, width_in) in matrices(sizes).items():
        nums = [num for num in tried if num * width_out <= MOST_OUTPUTS]
        given, weight = telling(max(nums), width_in), telling(width_out, width_in, order=1)
        exactly = {num: exact_sums.linear(given[:num], weight)[0].clone() for num in nums}
        for way, (multiply, setting) in ways_to_add().items():
            with setting():
                found = judged(multiply, given, weight, nums, exactly)
            yield {"what": f"{name} {width_out} × {width_in}", "sums": way, **found}


def judged(
    multiply: Product, given: Tensor, weight: Tensor, nums: Sequence[int], exactly: dict[int, Tensor]
) -> dict[str, object]:
    """A product's classes, for how many M it is as `exactly`, and its time."""

    def first(num: int) -> Tensor:
        return multiply(given[:num], weight)[0]

    found = probed(first, nums)
    alike = sum(torch.equal(first(num), exactly[num]) for num in nums)
    place = place_matters(partial(multiply, weight=weight), given, nums[-3:])
    took = {f"ms_{num}": took_ms(partial(first, num)) if num in nums else math.nan for num in TIMED}
    return {**found, "place": place, "as_exact": f"{alike} of {len(nums)}", **took}


def ways_to_add() -> dict[str, tuple[Product, Any]]:
    """How a product adds up, and inside what it is computed."""
    ways: dict[str, tuple[Product, Any]] = {"as they are": (functional.linear, in_parts)}
    if device_here() == "cuda":
        try:
            with without_parts():
                ways["cuBLASLt, no parts"] = (functional.linear, without_parts)
        except (RuntimeError, TypeError) as error:  # Older versions of torch have no such setting.
            print(f"cuBLASLt cannot be told to sum without parts: {error}")
    return {**ways, "exact": (exact_sums.linear, in_parts)}


@contextmanager
def in_parts() -> Iterator[None]:
    """As PyTorch is set."""
    yield


@contextmanager
def without_parts() -> Iterator[None]:
    """Only cuBLASLt can be told to leave split-K alone."""
    backend, settings = torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.matmul
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        settings.allow_bf16_reduced_precision_reduction = (False, False)
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = True
        torch.backends.cuda.preferred_blas_library(backend)


def took_ms(work: Callable[[], Tensor], *, times: int = 10) -> float:
    """One product, in the middle of many."""
    for _ in range(2):
        work()
    synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    synchronize()
    return (time.perf_counter() - started) / times * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def telling(num_rows: int, width: int, *, order: int = -1) -> Tensor:
    """Half of the terms of a sum of products of two such rows cancel the other half, if one has `order` 1."""
    half = drawn(num_rows, -(-width // 2))
    mixed = torch.randperm(2 * half.shape[1], generator=torch.Generator().manual_seed(0)).to(half.device)
    return torch.cat((half, order * half), 1)[:, mixed][:, :width].contiguous()


def matrices(sizes: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Of a layer and the head: width of what comes out, and of what goes in."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    queries, keys = (sizes["head_dim"] * sizes[f"num_{name}_heads"] for name in ("attention", "key_value"))
    return {
        "queries": (queries, hidden),
        "keys": (keys, hidden),
        "attention's output": (hidden, queries),
        "gate": (inner, hidden),
        "down": (hidden, inner),
        "head": (sizes["vocab_size"], hidden),
    }


def kernels_of(sizes: dict[str, Any], tried: Sequence[int]) -> Iterator[dict[str, object]]:
    """A row for everything else that sums or rounds, as trainer and engine compute it here."""
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    few = [num for num in tried if num <= STEPS[-1]]
    states, gates = drawn(max(tried), hidden), drawn(max(few), sizes["intermediate_size"])
    scores, targets = drawn(max(few), vocabulary), torch.arange(max(few), device=device_here())
    ways: dict[str, tuple[Rows, Sequence[int]]] = {
        "norm": (lambda num: norm(states[:num])[0], tried),
        "gated silu": (lambda num: gated(gates[:num], gates[:num].flip(1))[0], few),
        "log-probs": (lambda num: logprobs(scores[:num], targets[:num])[:1], few),
        "attention, M sequences": (sequences(sizes, max(few)), few),
        "attention, one sequence of M": (one_sequence(sizes, max(tried)), [num for num in tried if num > PLACE]),
    }
    if device_here() == "cuda":
        from reroll_zoo.paged_cache.kernels import READING_ROWS, WRITING_ROWS  # Imports triton.

        for num_rows in (WRITING_ROWS, READING_ROWS):
            ways[f"writing M, {num_rows} rows a program"] = (written(sizes, max(few), num_rows), few)
    for name, (way, nums) in ways.items():
        if nums:
            nothing = {"place": "-", "as_exact": "-", **{f"ms_{num}": math.nan for num in TIMED}}
            yield {"what": name, "sums": "-", **probed(way, nums), **nothing}


def probed(way: Rows, tried: Sequence[int]) -> dict[str, object]:
    """The classes, by what they give."""
    found: list[tuple[Tensor, list[int]]] = []
    with torch.no_grad():
        for num in tried:
            row = way(num)
            alike = next((nums for other, nums in found if torch.equal(row, other)), None)
            if alike is None:
                found.append((row.clone(), [num]))
            else:
                alike.append(num)
    return {"classes": len(found), "M": " | ".join(spans(nums, tried) for _, nums in found)}


def place_matters(way: Callable[[Tensor], Tensor], given: Tensor, tried: Sequence[int]) -> str:
    """Numbers of rows among which a row's bits depend on where it stands."""
    moved = []
    with torch.no_grad():
        for num in tried:
            rows = way(given[:1].expand(num, -1).contiguous())
            if not torch.equal(rows, rows[:1].expand_as(rows)):
                moved.append(num)
    return spans(moved, tried) if moved else "no"


def spans(nums: Sequence[int], tried: Sequence[int]) -> str:
    """1, 3-7, 2048: neighbours are those that were tried one after the other."""
    places = [tried.index(num) for num in nums]
    breaks = [0, *(at + 1 for at, (one, next_) in enumerate(pairwise(places)) if next_ > one + 1), len(nums)]
    parts = [nums[start:end] for start, end in pairwise(breaks)]
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def drawn(*shape: int) -> Tensor:
    """Normal, the same on every call of this shape."""
    generator = torch.Generator(device_here()).manual_seed(0)
    return torch.randn(*shape, device=device_here(), dtype=torch.bfloat16, generator=generator)


def norm(states: Tensor) -> Tensor:
    weight = drawn(states.shape[-1])
    if not states.is_cuda:
        return functional.rms_norm(states, weight.shape, weight, 1e-6)
    normed: Tensor = kernels().RmsNorm.apply(states, weight, 1e-6)
    return normed


def gated(gate: Tensor, up: Tensor) -> Tensor:
    if not gate.is_cuda:
        return functional.silu(gate) * up
    product: Tensor = kernels().GatedSilu.apply(gate, up)
    return product


def logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    if not logits.is_cuda:
        return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None]).squeeze(1)
    found: Tensor = kernels().chosen_logprobs(logits, targets, temperature=1.0)[0]
    return found


def heads_of(sizes: dict[str, Any], num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Scoring]:
    dim, kv = sizes["head_dim"], sizes["num_key_value_heads"]
    query, both = drawn(num_tokens, sizes["num_attention_heads"], dim), drawn(2, num_tokens, kv, dim)
    return query, both[0], both[1], Scoring(scaling=dim**-0.5)


def sequences(sizes: dict[str, Any], most: int) -> Rows:
    """The trainer's attention: the first of M sequences."""
    query, key, value, scoring = heads_of(sizes, most * ONE_LENGTH)

    def first(num: int) -> Tensor:
        bounds = torch.arange(0, (num + 1) * ONE_LENGTH, ONE_LENGTH, device=query.device)
        end = num * ONE_LENGTH
        return PackedAttention(bounds).attend(0, query[:end], key[:end], value[:end], scoring=scoring)[:ONE_LENGTH]

    return first


def one_sequence(sizes: dict[str, Any], most: int) -> Rows:
    """The trainer's attention: an early token of a sequence of M."""
    query, key, value, scoring = heads_of(sizes, most)

    def early(num: int) -> Tensor:
        bounds = torch.tensor([0, num], device=query.device)
        return PackedAttention(bounds).attend(0, query[:num], key[:num], value[:num], scoring=scoring)[PLACE]

    return early


def written(sizes: dict[str, Any], most: int, num_rows: int) -> Rows:
    """The engine's attention on a GPU: the newest token of the first of M sequences."""
    from reroll_zoo.paged_cache.kernels import PAGE, attend

    num_pages = -(-CONTEXT // PAGE)
    query, _, _, scoring = heads_of(sizes, most)
    kept = drawn(2, num_pages * most, PAGE, sizes["num_key_value_heads"], sizes["head_dim"])
    tables = torch.arange(num_pages * most, dtype=torch.int32, device=query.device).view(most, num_pages)

    def newest(num: int) -> Tensor:
        counted = torch.arange(num + 1, dtype=torch.int32, device=query.device)
        output: Tensor = attend(
            query[:num],
            kept[0],
            kept[1],
            tables=tables[:num],
            starts=torch.full_like(counted[:num], CONTEXT - 1),
            bounds=counted,
            block_sequence=counted[:num],
            block_first=torch.zeros_like(counted[:num]),
            rows=num_rows,
            scoring=scoring,
        )
        return output[0]

    return newest


if __name__ == "__main__":
    main()
