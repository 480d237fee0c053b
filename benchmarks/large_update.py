"""One update of a model that is large for its GPU: its seconds and its memory on GPU and host, beside what was planned.

The weights are drawn where they are used, so that no folder is written or read. `full` trains all of them, with the optimizer
where the planner puts it; `lora` an adapter. Two micro-batches and more, so that gradients are summed beside activations.
`--cases` without any: how long page-locked memory takes to get, alone.
`python benchmarks/large_update.py [--shape 8b] [--cases lora full] [--prompts 4 --siblings 4 --tokens 412] [--rounds 2]`;
`--set policy.strategy.micro_batch_tokens=4096` and the like for both. Without a GPU: `--shape tiny --prompts 2 --siblings 2
--tokens 8 --set policy.strategy.optimizer=host`
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_parts import PEAK_FLOPS, Setting, policy, setting_of, timed
from gpu_shapes import MAX_POSITIONS, SHAPES, add_work, default_shape, device_here, work_from
from gpu_work import WORDS
from report import arguments, report
from transformers import AutoConfig

from reroll.models import load
from reroll.models.attention import IMPLEMENTATION
from reroll.pipeline.planner import assign_devices
from reroll_zoo.plan.timing import forward_flops
from reroll_zoo.tiny_models import tiny_tokenizer

CASES = {"lora": ["policy.lora.rank=16"], "full": []}
GIB = 2**30


def write_card(folder: Path, sizes: dict[str, Any]) -> None:
    """A model's folder without its weights."""
    tokenizer = tiny_tokenizer(words=WORDS, max_positions=MAX_POSITIONS)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    tokenizer.save_pretrained(folder)
    AutoConfig.for_model(**sizes, **ends, max_position_embeddings=MAX_POSITIONS).save_pretrained(folder)


@contextmanager
def drawn_weights() -> Iterator[None]:
    """Inside, models are drawn at random on the device in the place of being read."""

    def draw(auto: Any, source: str, dtype: torch.dtype, **_: Any) -> tuple[Any, bool]:
        torch.manual_seed(0)
        with torch.device(device_here()):
            config = AutoConfig.from_pretrained(source)
            return auto.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION), True

    with patch.object(load, "_load", draw):
        yield


def measured(setting: Setting, *, rounds: int) -> dict[str, object]:
    """A row: what one update took, and what was planned of it."""
    started_s, free = time.perf_counter(), available_gib()
    strategy, learn = policy(setting)
    sync()
    build_s = time.perf_counter() - started_s
    optimizer_s: list[float] = []
    step = strategy.optim_step

    def timed_step() -> Any:
        sync()
        found: list[Any] = []
        optimizer_s.append(timed(lambda: found.append(step())))
        return found[0]

    strategy.optim_step = timed_step  # type: ignore[method-assign]
    first_s = timed(learn)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    update_s = statistics.median(timed(learn) for _ in range(rounds))
    row: dict[str, object] = {"built_s": build_s, "first_s": first_s, "update_s": update_s}
    row |= {"optimizer_s": statistics.median(optimizer_s[1:]), "allocated_gib": math.nan, "reserved_gib": math.nan}
    if torch.cuda.is_available():
        row["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return row | {"host_less_gib": free - available_gib()} | planned(setting, row)


def planned(setting: Setting, row: dict[str, Any]) -> dict[str, object]:
    role, work = setting.planned("policy"), setting.work
    if role is None:
        return {"planned_gib": math.nan, "off": "", "planned_host_gib": math.nan, "of_790_tflops": math.nan}
    gib = sum((*role.memory.held.values(), *role.memory.working.values())) / GIB
    flops = 3 * forward_flops(role.shape, num_tokens=work.num_distinct_tokens, row_tokens=work.row_tokens)
    return {
        "planned_gib": gib,
        "off": f"{gib / row['allocated_gib'] - 1:+.1%}",
        "planned_host_gib": sum(role.host.values()) / GIB,
        "of_790_tflops": flops / row["update_s"] / PEAK_FLOPS,
    }


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def available_gib() -> float:
    """Of the host's memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 / GIB


def placed(setting: Setting) -> Setting:
    """With the optimizer where the planner puts it."""
    return replace(setting, config=assign_devices(setting.config, num_gpus=torch.cuda.device_count()))


def pinning_s(gib: float = 4.0) -> float:
    """How long a GiB of page-locked memory takes to get."""
    started_s = time.perf_counter()
    torch.empty(int(gib * GIB), dtype=torch.uint8, pin_memory=True)
    return (time.perf_counter() - started_s) / gib


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    add_work(parser)
    parser.set_defaults(prompts=4, siblings=4, tokens=412)
    args = parser.parse_args()
    shape, work = args.shape or ("8b" if torch.cuda.is_available() else default_shape()), work_from(args)
    common = ["policy.strategy.micro_batch_tokens=2048", "policy.strategy.logprob_chunk=2048", "engine.sleep=true", *args.set]
    facts: dict[str, object] = {"pinning_s_per_gib": pinning_s()} if torch.cuda.is_available() else {}
    print(json.dumps(facts), flush=True)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch, drawn_weights():
        write_card(Path(scratch), SHAPES[shape])
        for case in args.cases:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            setting = placed(setting_of(scratch, work, [*common, *CASES[case]]))
            row = measured(setting, rounds=args.rounds)
            rows.append({"case": case, "optimizer": setting.config.policy.strategy.optimizer} | row)
            print(json.dumps(rows[-1] | facts), flush=True)
    if not rows:
        return
    report(
        f"large_update_{shape}",
        rows,
        title=(__doc__ or "").splitlines()[0],
        note=f"update: median of {args.rounds}; {shape}, {work.told()}; {' '.join(common)}",
        facts=facts,
        save=args.save,
    )


if __name__ == "__main__":
    main()
