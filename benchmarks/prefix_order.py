"""Tokens that an update computes when rows that begin alike are cut apart by length, and when they are kept together.

Two shapes: siblings with long prompts, and agents' rows whose context grows. Counts tokens on any machine;
`python benchmarks/prefix_order.py --gpu [--rounds 2]` then times the update of a model of Qwen3-0.6B's shape with random
weights in both orders, in turns, with the memory it takes. `--cpu` does so with a small model, to try it out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from report import arguments, report
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from reroll.models.attention import IMPLEMENTATION
from reroll.models.fused import fuse
from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import micro_batches, shared_prefixes
from reroll.training.loss import PolicyLoss
from reroll.training.predict import predict, repeat_cost
from reroll.types import Sample

LOSS = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2})
LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128}
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
Cut = Callable[[Batch], list[Batch]]


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    batch: Batch
    max_tokens: int
    """Of a micro-batch."""


def siblings(num_prompts: int, group_size: int, *, prompt: int, written: int) -> Batch:
    """Groups of rows with the same prompt."""
    draw, rows = np.random.default_rng(0), []
    for _ in range(num_prompts):
        begin = draw.integers(10, 40_000, prompt)
        rows += [row(begin, words(draw, written)) for _ in range(group_size)]
    return packed(rows)


def episodes(num_episodes: int, num_turns: int, *, prompt: int, written: int, reply: int) -> Batch:
    """A row for each turn: all that was said before it is its prompt."""
    draw, rows = np.random.default_rng(0), []
    for _ in range(num_episodes):
        context = draw.integers(10, 40_000, prompt)
        for _ in range(num_turns):
            said = words(draw, written)
            rows.append(row(context, said))
            context = np.concatenate([context, said, words(draw, reply)])
    return packed(rows)


def words(draw: np.random.Generator, mean: int) -> np.ndarray:
    """Of a length that nobody chose: from a quarter of the mean to seven quarters."""
    return draw.integers(10, 40_000, int(draw.integers(mean // 4, 2 * mean - mean // 4 + 1)))


def row(prompt: np.ndarray, written: np.ndarray) -> Sample:
    ids = np.concatenate([prompt, written])
    mask = np.arange(len(ids)) >= len(prompt)
    return Sample(ids=ids, loss_mask=mask, logp=np.where(mask, -11.9, 0.0).astype(np.float32), turn=np.where(mask, 0, -1))


def packed(rows: Sequence[Sample]) -> Batch:
    batch = pack(rows)
    by_row = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    return batch.replace(advantage=torch.where(batch.loss_mask, by_row[batch.sequence_index], 0.0))


def by_length(batch: Batch, *, max_tokens: int) -> list[Batch]:
    """As it was before: first-fit decreasing, every token counted."""
    parts: list[list[int]] = []
    room: list[int] = []
    lengths = batch.lengths
    for index in sorted(range(len(batch)), key=lambda index: (-lengths[index], index)):
        place = next((place for place, left in enumerate(room) if lengths[index] <= left), None)
        if place is None:
            parts.append([])
            room.append(max_tokens)
            place = len(parts) - 1
        parts[place].append(index)
        room[place] -= lengths[index]
    return [batch.select(part) for part in parts]


def orders(max_tokens: int, device: str) -> dict[str, Cut]:
    cost = repeat_cost(device, "bf16" if device == "cuda" else "fp32")
    return {
        "by length": partial(by_length, max_tokens=max_tokens),
        "by prefix": partial(micro_batches, max_tokens=max_tokens, repeat_cost=cost),
    }


def num_distinct(batch: Batch) -> int:
    return len(shared_prefixes(batch.ids, batch.cu_seqlens).first)


def counted(shape: Shape, name: str, cut: Cut) -> dict[str, object]:
    started_s = time.perf_counter()
    parts = cut(shape.batch)
    cut_s = time.perf_counter() - started_s
    return {
        "rows": shape.name,
        "order": name,
        "tokens": shape.batch.num_tokens,
        "distinct": num_distinct(shape.batch),
        "computed": sum(map(num_distinct, parts)),
        "passes": len(parts),
        "cut_s": cut_s,
    }


def make_model(device: str) -> PreTrainedModel:
    shape = LARGE if device == "cuda" else SMALL
    config = Qwen3Config(
        vocab_size=151_936 if device == "cuda" else 40_000,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        **shape,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    if device == "cuda":
        fuse(model)
    return model


def learn(model: PreTrainedModel, parts: Sequence[Batch], *, chunk: int) -> float:
    """The gradient of all parts; its norm."""
    model.zero_grad()
    for part in parts:
        here = part.to(model.device)
        LOSS(here, predict(model, here, LOSS.needs, chunk=chunk)).loss.backward()  # type: ignore[no-untyped-call]
    norms = [weight.grad.float().norm() for weight in model.parameters() if weight.grad is not None]
    return float(torch.stack(norms).norm())


def timed(model: PreTrainedModel, shape: Shape, *, rounds: int) -> list[dict[str, object]]:
    """Both orders in turns, cutting included; peak memory without the weights."""
    on_gpu = model.device.type == "cuda"
    cuts = orders(shape.max_tokens, model.device.type)
    seconds: dict[str, list[float]] = {name: [] for name in cuts}
    gib, norm = dict.fromkeys(cuts, 0.0), {}
    for number in range(rounds + 1):  # The first warms up.
        for name, cut in cuts.items():
            if on_gpu:
                model.zero_grad()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            started_s = time.perf_counter()
            norm[name] = learn(model, cut(shape.batch), chunk=4096)
            if number:
                seconds[name].append(time.perf_counter() - started_s)
            if on_gpu:
                gib[name] = max(gib[name], (torch.cuda.max_memory_allocated() - held) / 2**30)
            print(f"{shape.name}, {name}: round {number}, {time.perf_counter() - started_s:.2f} s", flush=True)
    before_s = statistics.median(seconds["by length"])
    return [
        {
            "rows": shape.name,
            "order": name,
            "update_s": (took_s := statistics.median(seconds[name])),
            "times_as_fast": before_s / took_s,
            "peak_gib": gib[name],
            "passes": len(cut(shape.batch)),
            "computed": sum(map(num_distinct, cut(shape.batch))),
            "grad_norm": f"{norm[name]:.5g}",
        }
        for name, cut in cuts.items()
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gpu", action="store_true", help="time the update on a GPU")
    parser.add_argument("--cpu", action="store_true", help="time that of a small model here")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=16_384, help="of a micro-batch")
    args = parser.parse_args()
    large = [
        Shape("64 prompts × 8, 1,024 + 512", siblings(64, 8, prompt=1024, written=512), args.max_tokens),
        Shape("128 episodes × 12 turns", episodes(128, 12, prompt=1024, written=256, reply=264), args.max_tokens),
    ]
    device = "cuda" if args.gpu else "cpu"
    counts = [counted(shape, name, cut) for shape in large for name, cut in orders(args.max_tokens, "cuda").items()]
    note = f"micro-batches of {args.max_tokens:,} tokens, as on a GPU in bf16"
    report("prefix_order", counts, title="Tokens that an update computes", note=note, save=args.save)
    if not args.gpu and not args.cpu:
        return
    shapes = [
        Shape("16 prompts × 16, 1,024 + 256", siblings(16, 16, prompt=1024, written=256), args.max_tokens),
        Shape("8 episodes × 12 turns", episodes(8, 12, prompt=1024, written=256, reply=264), args.max_tokens),
    ]
    if not args.gpu:
        shapes = [
            Shape("4 prompts × 8, 128 + 32", siblings(4, 8, prompt=128, written=32), 1024),
            Shape("4 episodes × 6 turns", episodes(4, 6, prompt=64, written=24, reply=24), 1024),
        ]
    model = make_model(device)
    rows = [row for shape in shapes for row in timed(model, shape, rounds=args.rounds)]
    where = torch.cuda.get_device_name() if args.gpu else "a small model on the CPU"
    title = f"The gradient of an update: {where}"
    report(f"prefix_order_{device}", rows, title=title, note="median; peak: without the weights", save=args.save)


if __name__ == "__main__":
    main()
