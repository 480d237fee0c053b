"""Trainer and embedded engine on a GPU in bf16, equal to the bit: 64 together, one by one, packed, alone, as CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reroll.config.load import parse_config
from reroll.config.parts import LoraConfig
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.pipeline.run import train
from reroll.tokens.batch import pack
from reroll.training.base import Needs
from reroll.training.predict import predict
from reroll.training.torch_strategy import enable_gradient_checkpointing
from reroll.types import Request, Sample, SamplingParams
from reroll_zoo.paged_cache.graph_runner import can_be_captured
from reroll_zoo.tiny_models import make_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TEMPERATURE = 0.7
LENGTHS = (1, 18, 64, 66, 130, 7, 33, 200)
"""Of prompts: shorter and longer than a page of keys."""


@pytest.mark.parametrize("num_inputs", [128, 1000, 1024, 3072])
def test_a_row_of_a_product_has_the_same_bits_beside_any_number_of_others(num_inputs):
    from reroll_zoo import exact_kernels
    from reroll_zoo.exact_sums import telling_product

    x, weight = (part.cuda() for part in telling_product(1024, num_inputs, torch.bfloat16))
    tiles = exact_kernels.alike(num_inputs, torch.bfloat16, x.device)
    print(f"{num_inputs} inputs: {len(tiles)} of {len(exact_kernels.TILES)} tiles add up alike")
    whole = exact_kernels.product(x, weight)
    for rows in (slice(0, 1), slice(5, 6), slice(0, 17), slice(63, 130), slice(200, 712), slice(1, 1024)):
        assert_equal(exact_kernels.product(x[rows], weight), whole[rows], f"rows {rows}")
    for (*_, num_rows, shape, _), tile in exact_kernels._chosen.items():
        if shape == weight.shape:
            print(f"  {num_rows} rows: {tile}")


@pytest.mark.parametrize("changes", [{}, {"dim": 64, "num_heads": 32}, {"window": 100, "softcap": 30.0}, {"has_sinks": True}])
def test_the_program_for_one_token_of_each_sequence_gives_what_that_for_many_gives(changes):
    from reroll_zoo.exact_attention import READING, HeadShape, one_token_each, programs_alike, writing_program

    options = {"num_heads": 16, "num_kv_heads": 8, "dim": 128, "softcap": None, "window": None, "has_sinks": False}
    shape = HeadShape(**{**options, "dtype": torch.bfloat16, **changes})
    device = torch.device("cuda", 0)
    newest = one_token_each(shape, device, num_contexts=500)
    found = writing_program(shape, device)
    alike = [(program.num_warps, program.num_stages) for program in programs_alike(newest)]
    print(f"{changes}: of 16 rows alike (warps, stages) {alike}; taken {found}")
    assert_equal(newest(found), newest(READING), f"{found}")


@pytest.fixture(params=["qwen3", "llama", "mistral", "gemma2", "qwen3_moe"])
def folder(request, tmp_path):
    options = {"sliding_window": 20} if request.param in ("mistral", "gemma2") else {}
    return str(make_tiny(tmp_path, family=request.param, hidden=128, initializer_range=0.1, **options))


def load(folder, lora=None):
    return load_model(folder, dtype=torch.bfloat16, device="cuda", exact=True, lora=lora)


def requests(num_siblings):
    prompts = [[5 + (7 * i + j) % 90 for j in range(length)] for i, length in enumerate(LENGTHS)]
    return [
        Request(
            id=f"{i}.{j}",
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=12 + i, min_tokens=12 + i, seed=10 * i + j, temperature=TEMPERATURE, top_k=20 * (j == 1)
            ),
        )
        for i, prompt in enumerate(prompts)
        for j in range(num_siblings)
    ]


def written(engine, asked):
    for request in asked:
        engine.submit(request)
    done = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return {request.id: sample_of(request, done[request.id]) for request in asked}


def sample_of(request, completion):
    num_before, num_written = len(request.prompt_ids), len(completion.token_ids)
    return Sample(
        ids=np.array((*request.prompt_ids, *completion.token_ids)),
        loss_mask=np.arange(num_before + num_written) >= num_before,
        logp=np.array((*[0.0] * num_before, *completion.logprobs), dtype=np.float32),
        turn=np.array([-1] * num_before + [0] * num_written),
    )


def assert_trained_as_drawn(model, samples, what):
    batch = pack(samples).replace(temperature=TEMPERATURE).to("cuda")
    logp = predict(model, batch, Needs(), chunk=100).logp
    assert_equal(logp.detach()[batch.loss_mask], batch.logp[batch.loss_mask], what)
    return logp


def assert_equal(got, want, what):
    differing = (got != want).nonzero()
    gap = float((got.float() - want.float()).abs().max())
    assert not len(differing), (
        f"{what}: {len(differing)} of {want.numel()} differ, first {differing[0].tolist()}, at most {gap:.3g}"
    )


def test_a_token_has_one_log_prob_whatever_it_is_computed_with(folder):
    engine = EmbeddedEngine(load(folder), load_tokenizer(folder), max_running=64)
    together = written(engine, requests(8))
    assert bool(engine.backend._graphs._graphs) == can_be_captured(engine.backend._runner.model)
    by_one = written(EmbeddedEngine(load(folder), load_tokenizer(folder), max_running=1), requests(2)[:6])
    for name, one in by_one.items():
        assert_equal(torch.tensor(one.ids), torch.tensor(together[name].ids), f"tokens of {name} written alone")
        assert_equal(torch.tensor(one.logp), torch.tensor(together[name].logp), f"log-probs of {name} written alone")
    model = load(folder)
    samples = list(together.values())
    with torch.no_grad():
        for sample in samples[::9]:
            assert_trained_as_drawn(model, [sample], "trained alone")
        assert_trained_as_drawn(model, samples[::8], "trained without siblings")
    assert_trained_as_drawn(model, samples, "trained together").sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    enable_gradient_checkpointing(model)
    assert_trained_as_drawn(model, samples, "trained with gradient checkpointing").sum().backward()


def test_an_adapter_and_a_context_that_is_extended_change_no_bit(tmp_path):
    folder, lora = str(make_tiny(tmp_path, family="qwen3", hidden=128, initializer_range=0.1)), LoraConfig(rank=4, alpha=8)
    model = load(folder, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    engine = EmbeddedEngine(load(folder, lora), load_tokenizer(folder), max_running=32)
    trained = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    engine.load_weights(trained, version=1)
    first = written(engine, requests(4))
    assert_trained_as_drawn(model, list(first.values()), "first")
    longer = [
        Request(id=f"{name}+", prompt_ids=(*sample.ids.tolist(), 7, 8), sampling=SamplingParams(
            max_tokens=9, min_tokens=9, seed=place, temperature=TEMPERATURE))
        for place, (name, sample) in enumerate(first.items())
    ]  # fmt: skip
    assert_trained_as_drawn(model, list(written(engine, longer).values()), "extended")


def test_gradients_are_those_of_the_quick_ways_but_for_rounding(tmp_path):
    folder = str(make_tiny(tmp_path, family="gemma2", hidden=128, initializer_range=0.1, sliding_window=20))
    samples = list(written(EmbeddedEngine(load(folder), load_tokenizer(folder), max_running=32), requests(4)).values())
    gradients = []
    for is_exact in (True, False):
        model = load_model(folder, dtype=torch.bfloat16, device="cuda", exact=is_exact)
        batch = pack(samples).replace(temperature=TEMPERATURE).to("cuda")
        predict(model, batch, Needs(), chunk=100).logp.sum().backward()
        gradients.append(torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[1].norm()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy": {"lora": {"rank": 4}, "optim": {"lr": 5e-2}}},
        {"policy": {"strategy": {"precision": "bf16", "gradient_checkpointing": True}}},
    ],
    ids=["bf16", "lora", "checkpointing"],
)
def test_in_a_whole_run_no_log_prob_differs_and_the_ratio_is_one(rlvr_tree: dict[str, Any], changes: dict[str, Any]) -> None:
    rlvr_tree["policy"] |= {"devices": 0, "exact": True, "strategy": {"precision": "bf16"}, **changes.get("policy", {})}
    rlvr_tree["engine"] = {"devices": 0}
    rlvr_tree["rollout"]["temperature"] = 0.9
    rlvr_tree["old_policy"] = "sampler"
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    outcome = train(parse_config(rlvr_tree, folder=folder), code_folder=folder)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 3
    assert all(row["train/grad_norm"] > 0 for row in steps)
    assert all(row["train/sampler_gap_max"] == 0 and row["train/ratio"] == row["train/ratio_max"] == 1 for row in steps)
