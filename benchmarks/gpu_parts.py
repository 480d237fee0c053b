"""The parts of a GRPO step on one GPU, each alone: the embedded engine writes, the torch strategy learns, its state moves.

The work of `gpu_step.py`, without scheduler, rewards and runtime; then what a checkpoint copies while the run stands still, and
the optimizer's way out and back of a lease. Beside the time on the clock stands the time that the GPU was busy, the share of
790 TFLOP/s that an update reaches (three forward passes over every distinct token), what the part allocated at most and what
the planner foretells of it; in the results, which kernels took the time.
`python benchmarks/gpu_parts.py [--shape 0.6b|4b|8b | --model FOLDER] [--rounds 3] [--parts "policy learns"]`; for 8B
`--set policy.lora.rank=16` or `policy.strategy.gradient_checkpointing=true`. Without a GPU a tiny model tries it out:
`python benchmarks/gpu_parts.py --prompts 2 --siblings 2 --tokens 8 --rounds 1`
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_shapes import SHAPES, add_work, default_shape, work_from, write_model
from gpu_work import Work
from report import arguments, report
from torch.profiler import ProfilerActivity, profile

from reroll.config.load import load_config
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.pipeline.credit import policy_loss_of
from reroll.runtime.base import WorkerInfo
from reroll.tokens.batch import pack
from reroll.tokens.packing import micro_batches
from reroll.training.base import Strategy
from reroll.training.make import make_strategy
from reroll.training.predict import repeat_cost
from reroll.types import Request, Sample, SamplingParams
from reroll_zoo.plan.plan import cluster_here
from reroll_zoo.plan.roles import Role, roles_of
from reroll_zoo.plan.timing import forward_flops

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from reroll_gpu_step import tree_of

NUM_KERNELS_KEPT = 20
PEAK_FLOPS = 790e12


@dataclass(frozen=True)
class Setting:
    """What all parts are made from."""

    folder: str
    work: Work
    config: Any
    """Of the whole step."""

    @property
    def device(self) -> str:
        return "cuda:0" if self.work.device == "cuda" else "cpu"

    def prompts(self) -> list[tuple[int, ...]]:
        draw = np.random.default_rng(0)
        return [tuple(self.ids(draw, self.work.prompt_tokens).tolist()) for _ in range(self.work.prompts)]

    def ids(self, draw: np.random.Generator, num: int) -> Any:
        """Of words that the model knows."""
        return draw.integers(10, 2000, size=num)

    def planned(self, name: str) -> Role | None:
        """What the planner says of `policy` or `engine`."""
        cluster = cluster_here(self.config)
        return None if cluster is None else next(role for role in roles_of(self.config, cluster) if role.name == name)


def writing(setting: Setting) -> Callable[[], None]:
    """All samples of a step by the engine."""
    work = setting.work
    model = load_model(setting.folder, dtype=torch.bfloat16, device=setting.device, exact=setting.config.policy.exact)
    weights = dict(model.named_parameters())  # By the names that a push has: on a CPU an engine wraps its layers.
    engine = EmbeddedEngine(model, load_tokenizer(setting.folder), max_running=work.num_samples)
    prompts = setting.prompts()

    def write() -> None:
        for number, prompt in enumerate(prompts):
            for sibling in range(work.siblings):
                seed = number * work.siblings + sibling
                sampling = SamplingParams(max_tokens=work.tokens, min_tokens=work.tokens, seed=seed)
                engine.submit(Request(id=f"{number}/{sibling}", prompt_ids=prompt, sampling=sampling))
        while engine.num_unfinished:
            engine.step()
        engine.load_weights(weights, version=1)  # The next round must read its prompts again.

    return write


def learning(setting: Setting) -> Callable[[], None]:
    """One update on as many samples."""
    return policy(setting)[1]


def copying(setting: Setting) -> Callable[[], None]:
    """What a checkpoint writes is copied to the host."""
    strategy, learn = policy(setting)
    learn()  # Before its first step an optimizer has no state.

    def copy() -> None:
        strategy.stage(Path("nowhere"))  # What it returns would write.

    return copy


def leaving(setting: Setting) -> Callable[[], None]:
    """The optimizer makes room for an engine, and comes back."""
    strategy, learn = policy(setting)
    learn()

    def leave() -> None:
        strategy.to("cpu", weights=False)
        strategy.to(setting.device, weights=False)

    return leave


def policy(setting: Setting) -> tuple[Strategy, Callable[[], None]]:
    """One that learns from as many samples as a step has, and what has it take one."""
    work, config = setting.work, setting.config
    strategy = make_strategy(WorkerInfo("policy", 0, 1, setting.device), config.policy, total_steps=100)
    draw, rows = np.random.default_rng(1), []
    for prompt in setting.prompts():
        for _ in range(work.siblings):
            ids = np.concatenate([prompt, setting.ids(draw, work.tokens)])
            written = np.arange(len(ids)) >= work.prompt_tokens
            rows.append(Sample(ids=ids, loss_mask=written, logp=np.where(written, -11.9, 0.0), turn=np.where(written, 0, -1)))
    batch = pack(rows)
    batch = batch.replace(advantage=torch.where(batch.loss_mask, torch.randn(batch.num_tokens), 0.0))
    loss = policy_loss_of(config, kl_coef=0.0)
    prepared = loss.prepare(batch)
    most, cost = config.policy.strategy.micro_batch_tokens, repeat_cost(setting.device, "bf16")

    def learn() -> None:
        for part in micro_batches(prepared, max_tokens=most, repeat_cost=cost):
            strategy.forward_backward(part, loss)
        strategy.optim_step()

    return strategy, learn


PARTS = {
    "engine writes": writing,
    "policy learns": learning,
    "checkpoint is copied": copying,
    "optimizer leaves and returns": leaving,
}


def setting_of(folder: str, work: Work, overrides: list[str]) -> Setting:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "step.yaml"
        file.write_text(json.dumps(tree_of(folder, "embedded", Path(scratch), work)))
        return Setting(folder, work, load_config(file, overrides))


def measured(name: str, work: Callable[[], None], *, rounds: int) -> tuple[dict[str, object], dict[str, float]]:
    """A row, and the GPU's milliseconds by kernel."""
    seconds = []
    for _ in range(rounds + 2):  # Two to warm up.
        seconds.append(timed(work))
    row = {"part": name, "wall_s": statistics.median(seconds[2:]), "first_s": seconds[0]}
    if not torch.cuda.is_available():
        return row | {"gpu_busy_s": math.nan, "allocated_gib": math.nan}, {}
    allocated = torch.cuda.max_memory_allocated() / 2**30
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    kernels = {event.key: event.self_device_time_total / 1e3 for event in profiler.key_averages()}
    longest = sorted(kernels, key=kernels.__getitem__, reverse=True)[:NUM_KERNELS_KEPT]
    row |= {"gpu_busy_s": sum(kernels.values()) / 1e3, "allocated_gib": allocated}
    return row, {kernel: kernels[kernel] for kernel in longest}


def timed(work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def foretold(name: str, setting: Setting, wall_s: float) -> dict[str, float]:
    """What the planner says of the part's memory, and how much of the GPU's arithmetic an update used."""
    role = setting.planned("engine" if name == "engine writes" else "policy")
    told = {"planned_gib": math.nan, "of_790_tflops": math.nan}
    if role is None:
        return told
    if name in ("engine writes", "policy learns"):
        told["planned_gib"] = sum((*role.memory.held.values(), *role.memory.working.values())) / 2**30
    if name == "engine writes" and role.shares_weights:  # Here it stands alone.
        told["planned_gib"] += role.shape.num_parameters * 2 / 2**30
    if name == "policy learns" and setting.work.device == "cuda":
        work = setting.work
        flops = 3 * forward_flops(role.shape, num_tokens=work.num_distinct_tokens, row_tokens=work.row_tokens)
        told["of_790_tflops"] = flops / wall_s / PEAK_FLOPS
    return told


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder; by default one of the shape is made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add_work(parser)
    args = parser.parse_args()
    shape, work = args.shape or default_shape(), work_from(args)
    with tempfile.TemporaryDirectory() as scratch:
        if args.model is None:
            write_model(Path(scratch), SHAPES[shape])
        setting = setting_of(args.model or scratch, work, args.set)
        rows, kernels = [], {}
        for name in args.parts:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            row, kernels[name] = measured(name, PARTS[name](setting), rounds=args.rounds)
            rows.append(row | foretold(name, setting, float(str(row["wall_s"]))))
            print(rows[-1], flush=True)
    report(
        "gpu_parts" if shape == "0.6b" else f"gpu_parts_{shape}",
        rows,
        title=(__doc__ or "").splitlines()[0],
        note=f"wall: median; {args.model or shape}, {work.told()}; {' '.join(args.set)}",
        facts={"kernels_ms": kernels},
        save=args.save,
    )


if __name__ == "__main__":
    main()
