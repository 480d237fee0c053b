"""An engine whose linear layers hold 8-bit codes: what it computes, what a push does to it, and what it takes of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reroll.config.parts import LoraConfig
from reroll.errors import ModelError
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.infer.embedded.model_runner import ModelRunner
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model, load_tokenizer
from reroll.types import Request, SamplingParams
from reroll_zoo import fused_layers
from reroll_zoo.fp8 import handover
from reroll_zoo.fp8.arithmetic import quantized_rows, quantized_weight
from reroll_zoo.fp8.handover import Handover
from reroll_zoo.fp8.linears import Fp8Linear, Fp8Slice, quantize, quantize_linears
from reroll_zoo.plan.memory import engine_memory
from reroll_zoo.plan.shape import shape_of
from reroll_zoo.tiny_models import make_tiny

IDS, POSITIONS, BOUNDS = torch.tensor([5, 9, 30, 7, 8]), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 3, 5])


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return load_model(str(folder), dtype=dtype, device="cpu", **options)


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        return logits(model, hidden_states(model, IDS, POSITIONS, PackedAttention(BOUNDS))).float()


def dequantizing_model(folder: Path) -> Any:
    """The plain model, whose layers multiply the numbers that codes stand for."""
    model = load(folder)
    for layer in [module for module in model.base_model.modules() if isinstance(module, nn.Linear)]:
        codes, scales = quantized_weight(layer.weight)
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
        layer.weight.data = codes.float() * spread

        def on_rounded(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            rows = given[0].reshape(-1, given[0].shape[-1])
            row_codes, row_scales = quantized_rows(rows)
            return ((row_codes.float() * row_scales.repeat_interleave(128, 1)[:, : rows.shape[1]]).view(given[0].shape),)

        layer.register_forward_pre_hook(on_rounded)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "smollm3"])
def test_layers_multiply_what_codes_stand_for_and_the_rest_is_as_it_was(tmp_path: Path, family: Any) -> None:
    folder = make_tiny(tmp_path, family=family, hidden=96, initializer_range=0.1)
    runner = ModelRunner(load(folder), quantize=quantize_linears)
    ours = logits_of(runner.model)
    torch.testing.assert_close(ours, logits_of(dequantizing_model(folder)), atol=1e-4, rtol=1e-4)
    assert 0 < (ours - logits_of(load(folder))).abs().max() < 1.0
    left = [module for module in runner.model.base_model.modules() if isinstance(module, nn.Linear)]
    assert (left, isinstance(runner.model.lm_head, nn.Linear)) == ([], True)


@pytest.mark.parametrize("way", ["whole", "in parts", "of another precision"])
def test_a_push_makes_the_codes_anew(tmp_path: Path, way: str) -> None:
    folder = make_tiny(tmp_path / "a", family="qwen2", seed=1)
    other = make_tiny(tmp_path / "b", family="qwen2", seed=2, initializer_range=0.1)
    runner = ModelRunner(load(folder), quantize=quantize_linears)
    pushed = dict(load(other, torch.bfloat16 if way == "of another precision" else torch.float32).named_parameters())
    if way == "in parts":
        names = sorted(pushed)
        runner.load_part({name: pushed[name] for name in names if "_proj" in name})
        runner.load_part({name: pushed[name] for name in names if "_proj" not in name})
        runner.load({})
    else:
        runner.load(pushed)
    if way == "of another precision":
        expected = ModelRunner(load(other, torch.bfloat16).float(), quantize=quantize_linears)
    else:
        expected = ModelRunner(load(other), quantize=quantize_linears)
    assert torch.equal(logits_of(runner.model), logits_of(expected.model))


def test_what_the_trainer_writes_in_place_reaches_the_codes_with_the_next_push_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    trainer, runner = load(folder), ModelRunner(load(folder), quantize=quantize_linears)
    weights = dict(trainer.named_parameters())
    runner.load(weights)
    before = logits_of(runner.model)
    with torch.no_grad():
        for name, weight in weights.items():
            if "_proj" in name:
                weight.mul_(1.5)
    assert torch.equal(logits_of(runner.model), before)
    runner.load(weights)
    assert not torch.equal(logits_of(runner.model), before)
    assert weights["model.embed_tokens.weight"].data_ptr() == runner.model.model.embed_tokens.weight.data_ptr()


def test_the_engine_keeps_no_other_copy_and_the_plan_knows_its_bytes(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family="qwen3", hidden=256, heads=4, kv_heads=2)
    model = load(folder, torch.bfloat16)
    emptied = {name: parameter for name, parameter in model.named_parameters() if "_proj" in name}
    ModelRunner(model, quantize=quantize_linears)
    assert len(emptied) == 14
    assert {parameter.untyped_storage().nbytes() for parameter in emptied.values()} == {2}
    linears = {id(module._linear): module._linear for module in model.modules() if isinstance(module, Fp8Slice)}
    held = sum(linear._codes.nbytes + linear._scales.nbytes for linear in linears.values())
    options: Any = {"value_bytes": 2, "max_running": 8, "longest": 64, "num_requests": 8, "in_fp8": True}
    alone = engine_memory(shape_of(str(folder)), **options).held
    beside_the_trainer = engine_memory(shape_of(str(folder)), **options, shares_weights=True).held
    plain = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in map(id, emptied.values()))
    assert alone == {"weights": plain, "fp8 codes": held}
    assert beside_the_trainer == {"fp8 codes": held}


def test_siblings_are_one_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(load(make_tiny(tmp_path)), quantize=quantize_linears)
    sizes = []
    outputs = Fp8Linear.outputs
    monkeypatch.setattr(Fp8Linear, "outputs", lambda linear, x: sizes.append(len(linear._sizes)) or outputs(linear, x))
    logits_of(runner.model)
    assert sizes == [3, 1, 2, 1] * 2


@pytest.mark.parametrize("is_adapted", [False, True])
def test_norms_and_gates_hand_codes_to_the_products_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_adapted: bool
) -> None:
    """As on a GPU, by Triton's interpreter, which does not round to the nearest code."""
    pytest.importorskip("triton")
    folder = make_tiny(tmp_path, family="qwen3", hidden=128, initializer_range=0.1)
    lora = LoraConfig(rank=4) if is_adapted else None
    expected = logits_of(ModelRunner(load(folder, lora=lora), quantize=quantize_linears).model)
    model = load(folder, lora=lora)
    fused_layers.fuse(model)
    runner = ModelRunner(model, quantize=quantize_linears)
    monkeypatch.setattr(handover, "runs_kernels", lambda tensor: True)
    found = []
    multiply = Fp8Linear._anywhere

    def looked_at(linear: Fp8Linear, rows: Tensor, handed: tuple[Tensor, Tensor] | None) -> Tensor:
        found.append(handed is not None)
        if handed is not None:
            numbers = handed[0].float() * handed[1].repeat_interleave(128, 1)[:, : rows.shape[1]]
            assert (numbers - rows).norm() < 0.15 * rows.norm()
        return multiply(linear, rows, handed)

    monkeypatch.setattr(Fp8Linear, "_anywhere", looked_at)
    ours = logits_of(runner.model)
    assert found == [True, False, True, True] * 2
    assert (ours - expected).norm() < 0.3 * expected.norm()


def test_codes_of_another_tensor_are_not_taken() -> None:
    given, codes = torch.ones(2, 3), (torch.ones(2, 3), torch.ones(2, 1))
    hands = Handover()
    hands.give(given, codes)
    assert hands.take(given.clone()) is None
    assert hands.take(given) is codes
    assert hands.take(given) is None


def test_an_adapter_is_added_to_what_the_codes_give(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    trainer = load(folder, lora=LoraConfig(rank=4))
    runner = ModelRunner(load(folder, lora=LoraConfig(rank=4)), quantize=quantize_linears)
    adapter = {name: weight for name, weight in trainer.named_parameters() if weight.requires_grad}
    assert torch.equal(logits_of(runner.model), logits_of(ModelRunner(load(folder), quantize=quantize_linears).model))
    for weight in adapter.values():
        weight.data = torch.randn_like(weight)
    runner.load(adapter)
    gap, change = logits_of(runner.model) - logits_of(trainer), logits_of(trainer) - logits_of(load(folder))
    assert gap.norm() < 0.1 * change.norm()


def test_an_engine_writes_and_its_log_probs_are_near_the_trainers(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family="qwen3", hidden=128, initializer_range=0.1)
    trainer = load(folder, torch.bfloat16)
    engine = EmbeddedEngine(load(folder, torch.bfloat16), load_tokenizer(str(folder)), max_running=4, quantize=quantize_linears)
    engine.load_weights(dict(trainer.named_parameters()), version=1)
    for number in range(6):
        sampling = SamplingParams(max_tokens=12, min_tokens=12, seed=number)
        engine.submit(Request(id=str(number), prompt_ids=(5, 6, 7 + number // 2), sampling=sampling))
    gaps = []
    while engine.num_unfinished:
        for finished in engine.step():
            written = finished.completion
            ids = torch.tensor([5, 6, 7 + int(finished.request_id) // 2, *written.token_ids])
            with torch.inference_mode():
                states = hidden_states(trainer, ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
                scores = torch.log_softmax(logits(trainer, states).float()[:-1], -1)
            gaps.append((scores.gather(1, ids[1:, None])[2:, 0] - torch.tensor(written.logprobs)).abs())
    assert len(gaps) == 6
    assert 1e-4 < torch.cat(gaps).mean() < 0.3


def test_a_model_that_does_not_fit_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"fp8, but the engine is on cpu.*set it to bf16"):
        quantize(load(make_tiny(tmp_path / "dense")))
    with pytest.raises(ModelError, match="experts of qwen3_moe"):
        quantize(load(make_tiny(tmp_path / "experts", family="qwen3_moe")))
