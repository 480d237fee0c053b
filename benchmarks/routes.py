"""What the replay of experts is worth and costs: the gap of trainer and engine, and both halves of a step, with and without.

Random weights of Qwen3-MoE's layer shape (width 2,048; 128 experts of width 768, 8 of them chosen), 6 layers, bf16. An engine
that notes routes and one that does not take turns; so does one trainer, with the routes that were noted and without. On a GPU
`python benchmarks/routes.py [--rounds 3]`; on a CPU a tiny model tries it out:
`python benchmarks/routes.py --prompts 2 --siblings 2 --prompt-tokens 16 --tokens 8 --rounds 1`
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from gpu_shapes import TINY, device_here, halves_of_a_step, work_from, write_model
from gpu_work import Work
from halves import Learned, Learner, Writer, batch_of
from report import report

from reroll_zoo.plan.known import KNOWN

LARGE: dict[str, Any] = {**KNOWN["Qwen/Qwen3-30B-A3B"], "num_hidden_layers": 6, "norm_topk_prob": True}
SMALL: dict[str, Any] = {
    **LARGE,
    **TINY,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
}
WAYS = (False, True)
"""Whether routes are replayed."""


def main() -> None:
    args = halves_of_a_step(__doc__)
    work, sizes = work_from(args), LARGE if device_here() == "cuda" else SMALL
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), sizes)
        rows = compared(folder, work, rounds=args.rounds, micro_batch_tokens=args.micro_batch_tokens)
    experts = f"{sizes['num_experts']} experts of width {sizes['moe_intermediate_size']}, {sizes['num_experts_per_tok']} chosen"
    shape = f"{sizes['num_hidden_layers']} layers of width {sizes['hidden_size']}, {experts}"
    note = f"{shape}; {work.told()}; median of {args.rounds} rounds in turns"
    report("routes", rows, title=(__doc__ or "").splitlines()[0], note=note, save=args.save)


def compared(folder: str, work: Work, *, rounds: int, micro_batch_tokens: int) -> list[dict[str, object]]:
    """A row without the replay and one with it."""
    writers = {replays: Writer(folder, work, notes_routes=replays) for replays in WAYS}
    learner = Learner(folder, micro_batch_tokens=micro_batch_tokens)
    writing: dict[bool, list[float]] = {replays: [] for replays in WAYS}
    learning: dict[bool, list[Learned]] = {replays: [] for replays in WAYS}
    for number in range(rounds + 1):  # The first warms up.
        for replays, writer in writers.items():
            took_s, written = writer.write()
            learned = learner.learn(batch_of(written))
            if number:
                writing[replays].append(took_s)
                learning[replays].append(learned)
            print(f"round {number}, replay {replays}: written in {took_s:.2f} s, {learned}", flush=True)
    halves = {
        replays: (statistics.median(writing[replays]), statistics.median(each.seconds for each in learning[replays]))
        for replays in WAYS
    }
    return [
        {
            "replay": "yes" if replays else "no",
            "write_s": halves[replays][0],
            "learn_s": halves[replays][1],
            "both_over_none": sum(halves[replays]) / sum(halves[False]),
            "gap": f"{statistics.fmean(each.gap for each in learning[replays]):.2g}",
            "gap_max": f"{max(each.gap_max for each in learning[replays]):.2g}",
            "would_differ": f"{statistics.fmean(each.routes_differ for each in learning[replays]):.2%}",
        }
        for replays in WAYS
    ]


if __name__ == "__main__":
    main()
