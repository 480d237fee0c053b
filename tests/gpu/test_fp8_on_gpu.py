"""Linear layers in 8-bit floats on a CUDA device: kernels against plain PyTorch, an engine against the trainer, whole runs."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from reroll.config.load import parse_config
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model, load_tokenizer
from reroll.pipeline.run import train
from reroll.types import Request, SamplingParams
from reroll_zoo.fp8 import arithmetic
from reroll_zoo.fp8.arithmetic import CODES, num_blocks
from reroll_zoo.fp8.linears import Fp8Linear, quantize, quantize_linears
from reroll_zoo.tiny_models import make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with 8-bit floats"
    ),
]


def uneven(*shape: int) -> torch.Tensor:
    """Numbers of very different size, a row of zeros, and one that no scale helps."""
    numbers = torch.randn(*shape) * torch.exp(3 * torch.randn(*shape))
    numbers[0], numbers[-1] = 0, 1e-38
    return numbers.cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (3, 40), (300, 1000), (4096, 2560)])
def test_codes_and_scales_are_those_of_plain_pytorch_to_the_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from reroll_zoo.fp8 import kernels

    numbers = uneven(*shape).to(dtype)
    codes = torch.zeros(shape, dtype=torch.uint8, device="cuda").view(CODES)
    scales = torch.empty(*map(num_blocks, shape), device="cuda")
    kernels.quantize_weight_into(codes, scales, numbers)
    for ours, plain in (
        ((codes, scales), arithmetic.quantized_weight(numbers)),
        (kernels.quantized_rows(numbers), arithmetic.quantized_rows(numbers)),
    ):
        assert torch.equal(ours[1], plain[1])
        assert torch.equal(ours[0].view(torch.uint8), plain[0].view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 2560), (64, 2560), (5, 300), (700, 9728)])
def test_a_norm_and_a_gate_write_the_codes_of_their_result(shape: tuple[int, int]) -> None:
    from reroll_zoo.fp8 import kernels

    rows, up, weight = (torch.randn(*size, device="cuda").bfloat16() for size in (shape, shape, shape[1:]))
    normed, norm_codes = kernels.quantized_norm(rows, weight, 1e-6)
    gated, gate_codes = kernels.quantized_gate(rows, up)
    wide = torch.nn.functional.rms_norm(rows.float(), weight.shape, weight.float(), 1e-6)
    torch.testing.assert_close(normed, wide.bfloat16(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(gated, (torch.nn.functional.silu(rows.float()) * up.float()).bfloat16(), atol=1e-2, rtol=1e-2)
    for result, (codes, scales) in ((normed, norm_codes), (gated, gate_codes)):
        expected = arithmetic.quantized_rows(result)
        assert torch.equal(scales, expected[1])
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))


def linears(sizes: tuple[int, ...], width: int, *, bias: bool = False) -> list[torch.nn.Linear]:
    return [torch.nn.Linear(width, size, bias=bias, device="cuda", dtype=torch.bfloat16) for size in sizes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 16, 33, 64, 500, 4096])
@pytest.mark.parametrize(("sizes", "width"), [((4096, 1024, 1024), 2560), ((2560,), 9728), ((200, 72), 300), ((1024,), 2048)])
def test_a_product_is_that_of_plain_pytorch(sizes: tuple[int, ...], width: int, num_rows: int, bias: bool) -> None:
    linear = Fp8Linear(linears(sizes, width, bias=bias))
    x = torch.randn(1, num_rows, width, device="cuda", dtype=torch.bfloat16)
    plain = linear._anywhere(x[0])
    ours = torch.cat([output.flatten() for output in linear.outputs(x)])
    assert (ours.float() - plain.float()).norm() < 4e-3 * plain.float().norm()


def test_a_row_has_the_same_product_whatever_stands_beside_it() -> None:
    """But for the order of sums, which is that of the tiling."""
    linear = Fp8Linear(linears((1024,), 2048))
    x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
    together = linear.outputs(x)[0].float()
    alone = torch.cat([linear.outputs(x[row : row + 1])[0] for row in range(0, 512, 37)]).float()
    assert (together[::37] - alone).norm() < 2e-3 * alone.norm()


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_split_sums_are_added_in_order_whoever_is_last(splits: int) -> None:
    from reroll_zoo.fp8 import kernels

    linear, x = Fp8Linear(linears((2560,), 9728)), torch.randn(64, 9728, device="cuda", dtype=torch.bfloat16)
    codes = kernels.quantized_rows(x)

    def multiply(tiling: kernels.Tiling) -> torch.Tensor:
        weight, options = (linear._codes, linear._scales), {"num_columns": 2560, "dtype": torch.float32, "is_even": True}
        return kernels.product(codes, weight, linear._places, linear._arrivals, None, tiling=tiling, **options)

    whole, first = multiply(kernels.Tiling(64, 64, 1)), multiply(kernels.Tiling(64, 64, splits))
    torch.testing.assert_close(first, whole, atol=1e-3, rtol=1e-3)
    for _ in range(300):
        assert torch.equal(multiply(kernels.Tiling(64, 64, splits)), first)
    assert not linear._arrivals.any()


def test_a_graph_that_was_captured_before_a_push_multiplies_by_the_new_codes() -> None:
    layers = linears((1024, 512), 1024)
    linear, x = Fp8Linear(layers), torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        linear.outputs(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear.outputs(x)
    fresh = linears((1024, 512), 1024)
    for index, layer in enumerate(fresh):
        linear.take_weight(index, layer.weight)
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(captured, Fp8Linear(fresh).outputs(x), strict=True):
        assert torch.equal(ours, theirs)


def packed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    device = model.device
    with torch.no_grad():
        bounds = torch.tensor([0, len(ids)], device=device)
        hidden = hidden_states(model, ids.to(device), torch.arange(len(ids), device=device), PackedAttention(bounds))
        return logits(model, hidden).float().cpu()


@pytest.fixture(params=["llama", "qwen2", "qwen3", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(make_tiny(tmp_path / "model", family=request.param, hidden=256, layers=4, initializer_range=0.06))


def test_a_model_computes_what_it_computes_in_plain_pytorch(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to sums in another order: a number that falls on the border between two codes may get either."""
    ids = torch.randint(4, 90, (200,))
    plain = packed(load_model(folder, dtype=torch.bfloat16, device="cuda"), ids)
    model = load_model(folder, dtype=torch.bfloat16, device="cuda")
    quantize_linears(model)
    ours = packed(model, ids)
    monkeypatch.setattr(Fp8Linear, "_on_gpu", lambda linear, rows, _: linear._anywhere(rows))
    expected = packed(model, ids)
    assert (ours - expected).norm() < 0.6 * (expected - plain).norm()


def written(engine: EmbeddedEngine, requests: list[Request]) -> dict[str, Any]:
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


def requests_of(num: int, *, tokens: int) -> list[Request]:
    return [
        Request(
            id=str(number),
            prompt_ids=(5, 6, 7 + number // 4),
            sampling=SamplingParams(max_tokens=tokens, min_tokens=tokens, seed=number),
        )
        for number in range(num)
    ]


def test_an_engine_writes_by_graphs_and_its_log_probs_are_near_the_trainers(folder: str) -> None:
    trainer, tokenizer = load_model(folder, dtype=torch.bfloat16, device="cuda"), load_tokenizer(folder)
    gaps: dict[str, float] = {}
    for precision, how in (("bf16", None), ("fp8", quantize)):
        engine = EmbeddedEngine(
            load_model(folder, dtype=torch.bfloat16, device="cuda"), tokenizer, max_running=16, quantize=how
        )
        engine.load_weights(dict(trainer.named_parameters()), version=1)
        requests = requests_of(16, tokens=40)
        done = written(engine, requests)
        assert engine.backend._graphs._graphs
        distances = []
        for request in requests:
            ids = torch.tensor([*request.prompt_ids, *done[request.id].token_ids])
            scores = torch.log_softmax(packed(trainer, ids)[:-1], -1).gather(1, ids[1:, None])[2:, 0]
            distances.append((scores - torch.tensor(done[request.id].logprobs)).abs())
        gaps[precision] = float(torch.cat(distances).mean())
    print(f"gap by precision: {gaps}")
    assert gaps["bf16"] < gaps["fp8"] < 0.3  # Of random weights, which dampen nothing.


def test_a_push_into_an_engine_that_has_graphs_is_that_into_a_new_one(folder: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    engine = EmbeddedEngine(
        load_model(folder, dtype=torch.bfloat16, device="cuda"), tokenizer, max_running=8, max_cached=0, quantize=quantize
    )
    written(engine, requests_of(8, tokens=24))
    moved = load_model(folder, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    weights = dict(moved.named_parameters())
    engine.load_weights(weights, version=1)
    fresh = EmbeddedEngine(
        load_model(folder, dtype=torch.bfloat16, device="cuda"), tokenizer, max_running=8, max_cached=0, quantize=quantize
    )
    names = sorted(weights)
    fresh.load_part({name: weights[name].cpu() for name in names[::2]})
    fresh.load_part({name: weights[name] for name in names[1::2]})
    fresh.load_weights({}, version=1)
    ours, theirs = (written(one, requests_of(8, tokens=24)) for one in (engine, fresh))
    same = [ours[name].token_ids == theirs[name].token_ids for name in ours]
    assert sum(same) >= 7  # A number on the border between two tokens may give either.


def test_an_engine_holds_half_of_what_it_held(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "wide", family="qwen3", hidden=1024, layers=4))
    held = {}
    for precision, how in (("bf16", None), ("fp8", quantize)):
        gc.collect()  # What earlier tests left behind would be freed in between.
        before = torch.cuda.memory_allocated()
        model = load_model(folder, dtype=torch.bfloat16, device="cuda")
        if how is not None:
            how(model)
        held[precision] = torch.cuda.memory_allocated() - before
        del model
    assert held["fp8"] < 0.55 * held["bf16"]


@pytest.mark.parametrize(("runtime", "staleness"), [("local", 0), ("local", 1), ("processes", 0)])
def test_a_run_learns_and_the_guard_is_quiet(rlvr_tree: dict[str, Any], runtime: str, staleness: int) -> None:
    rlvr_tree["runtime"] = {"kind": runtime}
    rlvr_tree["policy"] |= {"devices": 0, "strategy": {"kind": "torch", "precision": "bf16"}}
    rlvr_tree["engine"] = {"devices": 0, "precision": "fp8"}
    rlvr_tree["rollout"] |= {"max_staleness": staleness, "prompts_per_step": 8, "group_size": 8}
    rlvr_tree["run"]["steps"] = 12
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    outcome = train(parse_config(rlvr_tree, folder=folder), code_folder=folder)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in steps]
    gaps = [row["train/sampler_gap_current"] for row in steps if "train/sampler_gap_current" in row]
    print(f"{runtime}, staleness {staleness}: reward {rewards[0]:.3f} to {rewards[-1]:.3f}, largest gap {max(gaps):.4f}")
    assert len(steps) == 12
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.1
    assert 0 < max(gaps) < 0.15
