"""What `policy.exact` costs: generation and an update with it and without, in turns, in one process.

On a CPU a random model of SmolLM2-135M's shape, 4 prompts × 8 siblings × 64 tokens; CPU time counts beside the clock: on a
machine with other work it is what can be compared. On a GPU one of Qwen3-0.6B's shape, 64 prompts × 8 siblings × 256 tokens.
`python benchmarks/exact.py [--precision fp32] [--tokens 64] [--prompts 4] [--siblings 8]`
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gpu_shapes import SHAPES, device_here, write_model
from report import arguments, report

from reroll.config.parts import OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import DTYPES, Precision, load_model, load_tokenizer
from reroll.observe.metrics import Stats
from reroll.tokens.batch import pack
from reroll.tokens.packing import micro_batches
from reroll.training.loss import SFT_LOSS
from reroll.training.predict import repeat_cost
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Completion, Request, Sample, SamplingParams
from reroll_zoo.tiny_models import make_tiny

MICRO_BATCH_TOKENS = 32_768
SHAPE = {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "vocab_size": 49152, "intermediate_size": 1536}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    on_gpu = device_here() == "cuda"
    prompts, siblings, prompt_tokens, tokens = (64, 8, 100, 256) if on_gpu else (4, 8, 48, 64)
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--siblings", type=int, default=siblings)
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens)
    parser.add_argument("--tokens", type=int, default=tokens, help="of each answer")
    parser.add_argument("--running", type=int, default=512 if on_gpu else 64, help="requests decoded together")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        if on_gpu:
            write_model(folder, SHAPES["0.6b"])
        else:
            make_tiny(folder, **SHAPE)  # type: ignore[arg-type]
        works = {is_exact: Work(str(folder), args, is_exact=is_exact) for is_exact in (False, True)}
    for work in works.values():
        work.round()
    took: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for is_exact, work in works.items():
            for part, seconds in work.round().items():
                took.setdefault((part, is_exact), []).append(seconds)
    rows = []
    for part in ("generation", "update"):
        row: dict[str, float | str] = {"part": part}
        for column, name in enumerate(("s", "cpu_s")):
            plain, exact = (statistics.median(each[column] for each in took[part, which]) for which in (False, True))
            row |= {f"plain_{name}": plain, f"exact_{name}": exact, f"exact_over_plain_{name}": exact / plain}
        rows.append(row)
    work = f"{args.prompts} prompts x {args.siblings} siblings x {args.tokens} tokens"
    report(
        "exact_gpu" if on_gpu else "exact",
        rows,
        title=f"{args.precision}, shape of {'Qwen3-0.6B, GPU' if on_gpu else 'SmolLM2-135M, CPU'}, {work}, exact and not",
        note=f"median of {args.rounds} interleaved rounds; largest gap between trainer and engine: "
        + ", ".join(f"{work.gap:.3g} {'exact' if is_exact else 'plain'}" for is_exact, work in works.items()),
        save=args.save,
    )


class Work:
    """An engine and a trainer over one model."""

    def __init__(self, folder: str, args: argparse.Namespace, *, is_exact: bool) -> None:
        precision: Precision = args.precision
        dtype, tokenizer = DTYPES[precision], load_tokenizer(folder)
        models = [load_model(folder, dtype=dtype, device=device_here(), exact=is_exact) for _ in range(2)]
        self._engine = EmbeddedEngine(models[0], tokenizer, max_running=args.running)
        config = TorchStrategyConfig(precision=precision)
        self._trainer = TorchStrategy(models[1], tokenizer, config, OptimConfig(lr=1e-9), total_steps=1000)
        self._args = args
        self.gap = 0.0

    def round(self) -> dict[str, tuple[float, float]]:
        """Seconds by the clock and of the CPU, by part."""
        args = self._args
        requests = [
            Request(
                id=f"{number}.{sibling}",
                prompt_ids=tuple(range(20 * number + 10, 20 * number + 10 + args.prompt_tokens)),
                sampling=SamplingParams(max_tokens=args.tokens, min_tokens=args.tokens, seed=10 * number + sibling),
            )
            for number in range(args.prompts)
            for sibling in range(args.siblings)
        ]
        done: dict[str, Completion] = {}

        def generate() -> None:
            for request in requests:
                self._engine.submit(request)
            while self._engine.num_unfinished:
                done.update({finished.request_id: finished.completion for finished in self._engine.step()})

        took = {"generation": timed(generate)}
        batch = pack([row(request, done[request.id]) for request in requests])
        cost = repeat_cost(device_here(), args.precision)
        parts = list(micro_batches(batch, max_tokens=MICRO_BATCH_TOKENS, repeat_cost=cost))
        stats: list[Stats] = []
        took["update"] = timed(lambda: stats.extend(self._trainer.forward_backward(part, SFT_LOSS) for part in parts))
        self.gap = max(self.gap, *(each.values_by_name()["sampler_gap_max"] for each in stats))
        return took


def row(request: Request, completion: Completion) -> Sample:
    num_before, num_written = len(request.prompt_ids), len(completion.token_ids)
    return Sample(
        ids=np.array((*request.prompt_ids, *completion.token_ids)),
        loss_mask=np.arange(num_before + num_written) >= num_before,
        logp=np.array((*[0.0] * num_before, *completion.logprobs), dtype=np.float32),
        turn=np.array([-1] * num_before + [0] * num_written),
    )


def timed(run: Callable[[], None]) -> tuple[float, float]:
    started, cpu = time.perf_counter(), time.process_time()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - cpu


if __name__ == "__main__":
    main()
