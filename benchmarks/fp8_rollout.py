"""The embedded engine in bf16 and in fp8, side by side on one GPU: the products of a layer, tokens a second, and the gap.

`products`: the linear layers of one decoder layer as CUDA graphs, for several numbers of rows; beside the tiling that the
engine takes, the best of some others. `engine`: both precisions take turns at the same requests; then a push, the memory that
stands after it, and the distance of the engine's log-probs from those of the bf16 model for the same tokens, the mean of all
and the largest of one (of random weights, which dampen no error: those of a trained model are nearer); the mean again after one
layer of that model, and after all, were drawn anew, as if a push had not arrived; and what a step runs longest. `curve`: the
same short GRPO run from a tiny random model with either.

`python benchmarks/fp8_rollout.py products engine [--shape 0.6b|4b|8b] [--running 64 512] [--tokens 128]`
Without a GPU a tiny model tries the engine out, in plain PyTorch, and the run in bf16:
`python benchmarks/fp8_rollout.py engine curve --running 4 --tokens 8 --rounds 1 --steps 5`
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_shapes import SHAPES, default_shape, device_here, write_model
from report import arguments, report
from torch import Tensor, nn
from torch.nn.functional import linear as plain_linear
from torch.profiler import ProfilerActivity, profile

from reroll.config.load import parse_config
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model, load_tokenizer
from reroll.pipeline.run import train
from reroll.types import Completion, Request, SamplingParams
from reroll_zoo.fp8.linears import Fp8Linear, quantize, quantize_linears
from reroll_zoo.tiny_models import make_tiny

ROWS = (8, 64, 512, 4096)
PROMPT_TOKENS = 100
SIBLINGS = 8
NUM_ASKED = 16
"""Answers whose log-probs are asked of the model again."""
NUM_PROFILED = 20
"""Steps whose kernels are counted, at most."""
NUM_TOLD = 10
"""Kernels that are told of a step, those that take longest."""

Row = dict[str, Any]


def groups_of(shape: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Of one decoder layer: the sizes of the linear layers that share an input, and its width."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    return {
        "q, k, v": ((queries, keys, keys), hidden),
        "o": ((hidden,), queries),
        "gate, up": ((inner, inner), hidden),
        "down": ((hidden,), inner),
    }


def products(shape: dict[str, Any]) -> list[Row]:
    """Microseconds of every group of linear layers, in both precisions."""
    from reroll_zoo.fp8 import kernels

    rows = []
    for name, (sizes, width) in groups_of(shape).items():
        layers = [nn.Linear(width, size, bias=False, device="cuda", dtype=torch.bfloat16) for size in sizes]
        fp8 = Fp8Linear(layers)
        for num_rows in ROWS:
            x = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
            taken = kernels.tiling_of(num_rows, len(fp8._places), fp8._scales.shape[1], kernels.num_processors(x.device))
            codes = kernels.quantized_rows(x)
            others = {tiling: micros(multiplying(fp8, codes, tiling)) for tiling in {taken, *tilings(num_rows)}}
            best = min(others, key=others.__getitem__)
            plain_us = micros(lambda: [plain_linear(x, layer.weight) for layer in layers])  # noqa: B023
            fp8_us = micros(lambda: fp8.outputs(x))  # noqa: B023
            rows.append(
                {
                    "layers": name,
                    "rows": num_rows,
                    "bf16_us": plain_us,
                    "fp8_us": fp8_us,
                    "times_bf16": plain_us / fp8_us,
                    "product_us": others[taken],
                    "scaled_mm_us": scaled_mm_micros(fp8, codes),
                    "tiling": told(taken),
                    "best_us": others[best],
                    "best": told(best),
                }
            )
            print(" ".join(f"{key} {value:.1f}" if isinstance(value, float) else str(value) for key, value in rows[-1].items()))
    return rows


def multiplying(fp8: Fp8Linear, codes: tuple[Tensor, Tensor], tiling: Any) -> Callable[[], Tensor]:
    from reroll_zoo.fp8 import kernels

    def multiply() -> Tensor:
        return kernels.product(
            codes,
            (fp8._codes, fp8._scales),
            fp8._places,
            fp8._arrivals,
            None,
            num_columns=sum(fp8._sizes),
            dtype=torch.bfloat16,
            is_even=True,
            tiling=tiling,
        )

    return multiply


def scaled_mm_micros(fp8: Fp8Linear, codes: tuple[Tensor, Tensor]) -> float:
    """Of PyTorch's own product of the same codes, where this build has it for such blocks; the layouts of scales that it takes
    differ from version to version."""
    (rows, scales), weight, own = codes, fp8._codes, fp8._scales
    expected = multiplying(fp8, codes, None)()
    padded = torch.zeros(len(own), -(-own.shape[1] // 4) * 4, device=own.device)
    padded[:, : own.shape[1]] = own
    for of_weight in (own.t(), own.t().contiguous(), padded[:, : own.shape[1]].t(), padded.t()):
        arguments = rows, weight.t(), scales.t().contiguous().t(), of_weight
        with suppress(RuntimeError, ValueError):
            product = torch._scaled_mm(*arguments, out_dtype=torch.bfloat16)
            parts = torch.cat([part.flatten() for part in product.split(fp8._sizes, 1)])
            if (parts.float() - expected.float()).norm() < 0.01 * expected.float().norm():
                return micros(lambda: torch._scaled_mm(*arguments, out_dtype=torch.bfloat16))  # noqa: B023
    return math.nan


def tilings(num_rows: int) -> list[Any]:
    """Few, for each is compiled."""
    from reroll_zoo.fp8.kernels import Tiling

    rows = max(16, min(128, 1 << (num_rows - 1).bit_length()))
    if num_rows > 128:
        return [Tiling(rows, 128, 1), Tiling(rows, 64, 1), *([Tiling(rows // 2, 128, 1)] if num_rows <= 512 else [])]
    return [*(Tiling(rows, 64, splits) for splits in (1, 2, 4, 8)), Tiling(rows, 128, 1), Tiling(rows, 128, 4)]


def told(tiling: Any) -> str:
    return f"{tiling.rows}×{tiling.columns}/{tiling.splits}"


def micros(work: Callable[[], object]) -> float:
    """Of one of 20 in a CUDA graph, the median of five tries. Each is preceded by what empties the cache of the GPU, as the
    other layers do between two uses of one; the time of that is taken off."""
    flush = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    both, alone = graph_of(lambda: (flush.zero_(), work())), graph_of(flush.zero_)
    return statistics.median(seconds(both) - seconds(alone) for _ in range(5)) / 20 * 1e6


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            work()
    return graph


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    started.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return float(started.elapsed_time(ended)) / 1e3


def engines(folder: str, running: list[int], tokens: int, rounds: int) -> list[Row]:
    """Tokens a second of both, for so many requests at once."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    trainer = load_model(folder, dtype=torch.bfloat16, device=device)
    weights = dict(trainer.named_parameters())
    ours: dict[str, EmbeddedEngine] = {}
    held_gib: dict[str, float] = {}
    for precision, how in (("bf16", None), ("fp8", quantize if device != "cpu" else quantize_linears)):
        before = allocated()
        model = load_model(folder, dtype=torch.bfloat16, device=device)
        ours[precision] = EmbeddedEngine(model, load_tokenizer(folder), max_running=max(running), max_cached=0, quantize=how)
        gc.collect()
        held_gib[precision] = allocated() - before
    rows = []
    for num in running:
        requests = requests_of(num, tokens)
        taken: dict[str, list[float]] = {precision: [] for precision in ours}
        answers: dict[str, dict[str, Completion]] = {}
        for _ in range(rounds + 2):  # Two to compile kernels and to capture graphs.
            for precision, engine in ours.items():
                wall_s, answers[precision] = written(engine, requests)
                taken[precision].append(wall_s)
        for precision, engine in ours.items():
            push_s, grown = pushed(engine, weights)
            rows.append(
                {
                    "engine": precision,
                    "running": num,
                    "tokens_per_s": num * tokens / statistics.median(taken[precision][2:]),
                    "times_bf16": statistics.median(
                        plain / own for plain, own in zip(taken["bf16"][2:], taken[precision][2:], strict=True)
                    ),
                    "first_s": taken[precision][0],
                    "weights_gib": held_gib[precision],
                    "push_ms": push_s * 1e3,
                    "push_grows_gib": grown,
                    **{f"gap {kind}": f"{value:.4f}" for kind, value in gaps_of(trainer, requests, answers[precision]).items()},
                }
            )
            print(rows[-1], flush=True)
            print_kernels(f"{precision}, {num} running", engine, requests)
    for kind, parts in (("one layer", trainer.model.layers[-1:]), ("all layers", trainer.model.layers)):
        draw_anew(parts)
        apart = {precision: gaps_of(trainer, requests, answers[precision])["mean"] for precision in ours}
        print(f"mean gap when {kind} of the trainer are others: {apart}", flush=True)
    return rows


@torch.no_grad()
def draw_anew(layers: nn.Module) -> None:
    """Other numbers of the same size."""
    for parameter in layers.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=float(parameter.float().std()))


def print_kernels(title: str, engine: EmbeddedEngine, requests: list[Request]) -> None:
    """What runs longest in a step that writes a token of each."""
    on_gpu = torch.cuda.is_available()
    for request in requests:
        engine.submit(request)
    num_tokens = requests[0].sampling.max_tokens
    for _ in range(num_tokens // 4):  # Beyond what reads the prompts.
        engine.step()
    num_steps = min(NUM_PROFILED, num_tokens // 2)
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        started_s = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        synchronize()
        wall_s = time.perf_counter() - started_s
    while engine.num_unfinished:
        engine.step()
    times = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count, event.key)
        for event in found.key_averages()
    ]
    total_us, launches = (sum(column) / num_steps for column in list(zip(*times, strict=True))[:2])
    print(f"{title}: {wall_s / num_steps * 1e6:.0f} us a step, {launches:.0f} kernels in {total_us:.0f} us; the longest:")
    for taken_us, count, name in sorted(times, reverse=True)[:NUM_TOLD]:
        print(
            f"  {taken_us / num_steps:8.1f} us, {count / num_steps:6.1f} of {taken_us / count:6.1f} us: {name[:80]}", flush=True
        )


def allocated() -> float:
    return torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else math.nan


def pushed(engine: EmbeddedEngine, weights: dict[str, Any]) -> tuple[float, float]:
    """Seconds of the second push by address, as between roles of one process; and what the device holds more than before it."""
    engine.load_weights(weights, version=1)
    synchronize()
    before, started_s = allocated(), time.perf_counter()
    engine.load_weights(weights, version=2)
    synchronize()
    return time.perf_counter() - started_s, allocated() - before


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def requests_of(num: int, tokens: int) -> list[Request]:
    draw = np.random.default_rng(0)
    prompts = [tuple(draw.integers(10, 2000, size=PROMPT_TOKENS).tolist()) for _ in range(-(-num // SIBLINGS))]
    return [
        Request(
            id=str(number),
            prompt_ids=prompts[number // SIBLINGS],
            sampling=SamplingParams(max_tokens=tokens, min_tokens=tokens, seed=number),
        )
        for number in range(num)
    ]


def written(engine: EmbeddedEngine, requests: list[Request]) -> tuple[float, dict[str, Completion]]:
    synchronize()
    started_s = time.perf_counter()
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return time.perf_counter() - started_s, done


@torch.no_grad()
def gaps_of(trainer: Any, requests: list[Request], answers: dict[str, Completion]) -> dict[str, float]:
    """How far the log-probs that came with some of these answers are from those of the trainer, in nats. The guard looks at
    the mean."""
    distances = []
    for request in requests[:NUM_ASKED]:
        ids = torch.tensor([*request.prompt_ids, *answers[request.id].token_ids], device=trainer.device)
        bounds, places = torch.tensor([0, len(ids)], device=ids.device), torch.arange(len(ids), device=ids.device)
        scores = logits(trainer, hidden_states(trainer, ids, places, PackedAttention(bounds))).float().log_softmax(-1)
        own = scores[:-1].gather(1, ids[1:, None])[len(request.prompt_ids) - 1 :, 0].cpu()
        distances.append((own - torch.tensor(answers[request.id].logprobs)).abs())
    found = torch.cat(distances)
    return {"mean": float(found.mean()), "largest": float(found.max())}


REWARD = """
def has_digit(prompt, trajectory):
    return sum(character.isdigit() for character in trajectory.text) / 6
"""


def curves(steps: int, seeds: int) -> list[Row]:
    """The rewards of a run by each precision of the engine, from the same tiny random model, with the same corrections."""
    rows = []
    for seed in range(seeds):
        for precision in ("bf16", "fp8") if torch.cuda.is_available() else ("bf16",):
            with tempfile.TemporaryDirectory() as scratch:
                rows.append(curve(Path(scratch), precision, steps=steps, seed=seed))
            print(rows[-1], flush=True)
    return rows


def curve(folder: Path, precision: str, *, steps: int, seed: int) -> Row:
    model = make_tiny(folder / "model", family="qwen3", hidden=128, layers=4, seed=seed)
    devices = 0 if torch.cuda.is_available() else "cpu"
    (folder / "fp8_curve_rewards.py").write_text(REWARD)
    (folder / "digits.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {digit}", "answer": str(digit)}) + "\n" for digit in range(10))
    )
    tree = {
        "pipeline": "rlvr",
        "run": {"name": precision, "runs_dir": str(folder / "runs"), "steps": steps, "seed": seed},
        "policy": {
            "model": str(model),
            "devices": devices,
            "strategy": {"kind": "torch", "precision": "bf16"},
            "optim": {"lr": 1e-3},
        },
        "engine": {"devices": devices, "precision": precision},
        "old_policy": "trainer",
        "corrections": [{"level": "token", "mode": "truncate", "high": 2.0}],
        "data": {"train": [{"kind": "jsonl", "path": str(folder / "digits.jsonl")}]},
        "rewards": {"default": {"kind": "import", "path": "fp8_curve_rewards:has_digit"}},
        "reward_workers": {"num_processes": 1},
        "rollout": {"prompts_per_step": 8, "group_size": 8, "max_prompt_tokens": 32, "max_tokens": 6},
    }
    started_s = time.perf_counter()
    outcome = train(parse_config(tree, folder=folder), code_folder=folder)
    lines = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if "reward/mean" in line]
    tenths = [statistics.fmean(line["reward/mean"] for line in part) for part in np.array_split(np.array(told), 5)]
    gaps = [line["train/sampler_gap_current"] for line in told if "train/sampler_gap_current" in line]
    weights = [value for line in told for name, value in line.items() if name.endswith("truncate_bounded")]
    return {
        "engine": precision,
        "seed": seed,
        "steps": len(told),
        **{f"reward {part + 1}/5": reward for part, reward in enumerate(tenths)},
        "gap": f"{statistics.fmean(gaps):.4f}",
        "largest gap": f"{max(gaps):.4f}",
        "share cut": f"{statistics.fmean(weights):.4f}" if weights else "",
        "wall_s": time.perf_counter() - started_s,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("parts", nargs="+", choices=["products", "engine", "curve"])
    parser.add_argument("--shape", choices=SHAPES, default=default_shape())
    parser.add_argument("--running", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    for part in args.parts:
        title = f"fp8 beside bf16: {part}"
        if part == "products":
            rows = products(SHAPES[args.shape])
        elif part == "curve":
            rows = curves(args.steps, args.seeds)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                write_model(Path(scratch), SHAPES[args.shape])
                rows = engines(scratch, args.running, args.tokens, args.rounds)
        note = f"{args.shape}; {PROMPT_TOKENS} + {args.tokens} tokens, {SIBLINGS} siblings; {device_here()}"
        report(f"fp8_{part}_{args.shape}", rows, title=title, note=note, save=args.save)


if __name__ == "__main__":
    main()
