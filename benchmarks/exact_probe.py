"""Which numbers of rows give a row the same bits: products in bf16 of the shapes of Qwen3-0.6B and 4B, and our other kernels.

The same first row is computed among M rows, for M of 1 to 512, 2,048 and 32,768. Numbers of rows that give it the same bits are
a class; where the row stands among the others is tried too. On a GPU products are tried as they are, without sums in parts that
meet in bf16, and without sums in parts (torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction, and its split-K).
Few classes are few cases that the arithmetic of `policy.exact` has to know. On a GPU, or with small shapes on a CPU:
`python benchmarks/exact_probe.py [--shapes 0.6b 4b] [--most 512]`, `python benchmarks/exact_probe.py --shapes tiny --most 16`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

ONE_LENGTH = 64
"""Tokens of a sequence where M sequences are attended to at once."""
CONTEXT = 300
"""Keys of a sequence that is being written."""
PLACE = 15
"""Of the token that is looked at where one sequence has M tokens."""

Rows = Callable[[int], Tensor]
"""What the row that is looked at becomes, among M."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: 0.6b and 4b, on a CPU tiny")
    parser.add_argument("--most", type=int, help="all M up to this are tried; default: 512, on a CPU 16")
    args = parser.parse_args()
    on_gpu = device_here() == "cuda"
    most = args.most or (512 if on_gpu else 16)
    tried = [*range(1, most + 1), *([2048, 32_768] if on_gpu else [])]
    rows = []
    for name in args.shapes or (["0.6b", "4b"] if on_gpu else [default_shape()]):
        for found in (*products(SHAPES[name], tried), *kernels_of(SHAPES[name], tried)):
            rows.append({"shape": name, **found})
            print(rows[-1], flush=True)
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    note = f"{where}, torch {torch.__version__}; M in one class give the row the same bits"
    report("exact_probe", rows, title=(__doc__ or "").splitlines()[0], note=note, save=args.save)


def products(sizes: dict[str, Any], tried: Sequence[int]) -> Iterator[dict[str, object]]:
    """A row for every matrix and way to add up."""
    for name, (width_out, width_in) in matrices(sizes).items():
        weight = drawn(width_out, width_in) / width_in**0.5
        given, product = drawn(max(tried), width_in), partial(functional.linear, weight=weight)
        for way, setting in ways_to_add().items():
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = setting
            found = probed(partial(first_row, product, given), tried)
            place = place_matters(product, given, tried)
            yield {"what": f"{name} {width_out} × {width_in}", "sums": way, **found, "place": place}
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


def ways_to_add() -> dict[str, Any]:
    """How parts of a sum may be added up apart (split-K), with what PyTorch is told; on a CPU it is told nothing."""
    if device_here() == "cpu":
        return {"as they are": True}
    ways: dict[str, Any] = {"as they are": True, "parts meet in fp32": False}
    if hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k"):
        ways["no parts"] = (False, False)
    return ways


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
    few = [num for num in tried if num <= 512]
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
        ways["attention of M that are written"] = (written(sizes, max(few)), few)
    for name, (way, nums) in ways.items():
        if nums:
            yield {"what": name, "sums": "-", **probed(way, nums), "place": "-"}


def first_row(way: Callable[[Tensor], Tensor], given: Tensor, num: int) -> Tensor:
    """What the way makes of the first row, beside num - 1 others."""
    return way(given[:num])[0]


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


def written(sizes: dict[str, Any], most: int) -> Rows:
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
            rows=16,
            scoring=scoring,
        )
        return output[0]

    return newest


if __name__ == "__main__":
    main()
