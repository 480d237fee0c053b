"""What `policy.exact` costs on a CPU: generation and an update with it and without, in turns, in one process.

A random model of SmolLM2-135M's shape, 4 prompts × 8 siblings. CPU time counts beside the clock: on a machine with other work
it is what can be compared. `python benchmarks/exact.py [--precision fp32] [--tokens 64]`
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from report import arguments, report

from reroll.config.parts import OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import DTYPES, Precision, load_model, load_tokenizer
from reroll.tokens.batch import pack
from reroll.training.loss import SFT_LOSS
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Completion, Request, Sample, SamplingParams
from reroll_zoo.tiny_models import make_tiny

PROMPTS, SIBLINGS, PROMPT_TOKENS = 4, 8, 48
SHAPE = {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "vocab_size": 49152, "intermediate_size": 1536}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--running", type=int, default=64, help="requests decoded together")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(make_tiny(Path(scratch) / "model", **SHAPE))  # type: ignore[arg-type]
        works = {is_exact: Work(folder, args, is_exact=is_exact) for is_exact in (False, True)}
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
    report(
        "exact",
        rows,
        title=f"{args.precision} on CPU, shape of SmolLM2-135M, 4 prompts x 8 siblings x {args.tokens} tokens, exact and not",
        note=f"median of {args.rounds} interleaved rounds; largest gap between trainer and engine: "
        + ", ".join(f"{work.gap:.3g} {'exact' if is_exact else 'plain'}" for is_exact, work in works.items()),
        save=args.save,
    )


class Work:
    """An engine and a trainer over one model."""

    def __init__(self, folder: str, args: argparse.Namespace, *, is_exact: bool) -> None:
        precision: Precision = args.precision
        dtype, tokenizer = DTYPES[precision], load_tokenizer(folder)
        models = [load_model(folder, dtype=dtype, device="cpu", exact=is_exact) for _ in range(2)]
        self._engine = EmbeddedEngine(models[0], tokenizer, max_running=args.running)
        config = TorchStrategyConfig(precision=precision)
        self._trainer = TorchStrategy(models[1], tokenizer, config, OptimConfig(lr=1e-9), total_steps=1000)
        self._num_tokens: int = args.tokens
        self.gap = 0.0

    def round(self) -> dict[str, tuple[float, float]]:
        """Seconds by the clock and of the CPU, by part."""
        requests = [
            Request(
                id=f"{number}.{sibling}",
                prompt_ids=tuple(range(100 * number, 100 * number + PROMPT_TOKENS)),
                sampling=SamplingParams(max_tokens=self._num_tokens, min_tokens=self._num_tokens, seed=10 * number + sibling),
            )
            for number in range(PROMPTS)
            for sibling in range(SIBLINGS)
        ]
        done: dict[str, Completion] = {}

        def generate() -> None:
            for request in requests:
                self._engine.submit(request)
            while self._engine.num_unfinished:
                done.update({finished.request_id: finished.completion for finished in self._engine.step()})

        took = {"generation": timed(generate)}
        batch = pack([row(request, done[request.id]) for request in requests])
        stats = []
        took["update"] = timed(lambda: stats.append(self._trainer.forward_backward(batch, SFT_LOSS)))
        self.gap = max(self.gap, stats[0].values_by_name()["sampler_gap_max"])
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
    return time.perf_counter() - started, time.process_time() - cpu


if __name__ == "__main__":
    main()
