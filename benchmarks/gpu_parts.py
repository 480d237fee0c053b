"""The parts of a GRPO step on one GPU, each alone: the embedded engine writes, the torch strategy learns, its state moves.

The work of `gpu_step.py`, without scheduler, rewards and runtime; then what a checkpoint copies while the run stands still, and
the optimizer's way out and back of a lease. Beside the time on the clock stands the time that the GPU was busy, and in the
results which kernels took it. `python benchmarks/gpu_parts.py [--model FOLDER] [--rounds 3]`
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_step import write_model
from gpu_work import NUM_NEW_TOKENS, NUM_PROMPTS, NUM_SIBLINGS, NUM_TOKENS
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
from reroll.types import Request, Sample, SamplingParams

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from reroll_gpu_step import tree_of

PROMPT_TOKENS = 100
NUM_KERNELS_KEPT = 20


def random_prompts() -> list[tuple[int, ...]]:
    draw = np.random.default_rng(0)
    return [tuple(draw.integers(10, 40_000, size=PROMPT_TOKENS).tolist()) for _ in range(NUM_PROMPTS)]


def writing(folder: str) -> Callable[[], None]:
    """All samples of a step by the engine."""
    model = load_model(folder, dtype=torch.bfloat16, device="cuda")
    engine = EmbeddedEngine(model, load_tokenizer(folder), max_running=NUM_PROMPTS * NUM_SIBLINGS)
    prompts = random_prompts()

    def write() -> None:
        for number, prompt in enumerate(prompts):
            for sibling in range(NUM_SIBLINGS):
                sampling = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, seed=number * NUM_SIBLINGS + sibling)
                engine.submit(Request(id=f"{number}/{sibling}", prompt_ids=prompt, sampling=sampling))
        while engine.num_unfinished:
            engine.step()
        engine.load_weights(dict(model.named_parameters()), version=1)  # The next round must read its prompts again.

    return write


def learning(folder: str) -> Callable[[], None]:
    """One update on as many samples."""
    return policy(folder)[1]


def copying(folder: str) -> Callable[[], None]:
    """What a checkpoint writes is copied to the host."""
    strategy, learn = policy(folder)
    learn()  # Before its first step an optimizer has no state.

    def copy() -> None:
        strategy.stage(Path("nowhere"))  # What it returns would write.

    return copy


def leaving(folder: str) -> Callable[[], None]:
    """The optimizer makes room for an engine, and comes back."""
    strategy, learn = policy(folder)
    learn()

    def leave() -> None:
        strategy.to("cpu", weights=False)
        strategy.to("cuda:0", weights=False)

    return leave


def policy(folder: str) -> tuple[Strategy, Callable[[], None]]:
    """One that learns from as many samples as a step has, and what has it take one."""
    micro_batch_tokens, config = settings(folder)
    strategy = make_strategy(WorkerInfo("policy", 0, 1, "cuda:0"), config.policy, total_steps=100)
    draw, rows = np.random.default_rng(1), []
    for prompt in random_prompts():
        for _ in range(NUM_SIBLINGS):
            ids = np.concatenate([prompt, draw.integers(10, 40_000, size=NUM_TOKENS)])
            written = np.arange(len(ids)) >= PROMPT_TOKENS
            rows.append(Sample(ids=ids, loss_mask=written, logp=np.where(written, -11.9, 0.0), turn=np.where(written, 0, -1)))
    batch = pack(rows)
    batch = batch.replace(advantage=torch.where(batch.loss_mask, torch.randn(batch.num_tokens), 0.0))
    loss = policy_loss_of(config, kl_coef=0.0)
    prepared = loss.prepare(batch)

    def learn() -> None:
        for part in micro_batches(prepared, max_tokens=micro_batch_tokens):
            strategy.forward_backward(part, loss)
        strategy.optim_step()

    return strategy, learn


PARTS = {
    "engine writes": writing,
    "policy learns": learning,
    "checkpoint is copied": copying,
    "optimizer leaves and returns": leaving,
}


def settings(folder: str) -> tuple[int, Any]:
    """Those of the whole step."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = tree_of(folder, "embedded", Path(scratch))
        file = Path(scratch) / "step.yaml"
        file.write_text(json.dumps(tree))
        return tree["policy"]["strategy"]["micro_batch_tokens"], load_config(file, [])


def measured(name: str, work: Callable[[], None], *, rounds: int) -> tuple[dict[str, object], dict[str, float]]:
    """A row, and the GPU's milliseconds by kernel."""
    seconds = []
    for _ in range(rounds + 2):  # Two to warm up.
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    kernels = {event.key: event.self_device_time_total / 1e3 for event in profiler.key_averages()}
    wall_s = statistics.median(seconds[2:])
    row = {"part": name, "wall_s": wall_s, "gpu_busy_s": sum(kernels.values()) / 1e3}
    longest = sorted(kernels, key=kernels.__getitem__, reverse=True)[:NUM_KERNELS_KEPT]
    return row, {kernel: kernels[kernel] for kernel in longest}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder; by default one of the shape is made")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or scratch
        if args.model is None:
            write_model(Path(scratch))
        rows, kernels = [], {}
        for name, make in PARTS.items():
            row, kernels[name] = measured(name, make(folder), rounds=args.rounds)
            rows.append(row)
            torch.cuda.empty_cache()
    report(
        "gpu_parts",
        rows,
        title=__doc__.splitlines()[0],
        note=f"wall: median; {NUM_NEW_TOKENS:,} tokens are written and learned from",
        facts={"kernels_ms": kernels},
        save=args.save,
    )


if __name__ == "__main__":
    main()
