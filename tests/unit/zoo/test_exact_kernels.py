"""What `policy.exact` runs on a GPU, in Triton's interpreter: rows that depend on nothing but themselves, and an engine over
pages whose log-probs are the trainer's."""

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import interpreter

import reroll.infer.embedded.engine as engine_module
from reroll.config.parts import LoraConfig
from reroll.errors import ModelError
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models import exact, fused
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.batch import pack
from reroll.training.base import Needs
from reroll.training.predict import predict
from reroll.types import Request, Sample, SamplingParams
from reroll_zoo import exact_attention, exact_kernels, exact_sums, packed_linears
from reroll_zoo.paged_cache.backend import PagedBackend
from reroll_zoo.tiny_models import make_tiny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same on a GPU")

CPU = torch.device("cpu")
TEMPERATURE = 0.7


def one_after_the_other(self, a, b, d, input_precision, max_num_imprecise_acc):
    """A product that adds up alike in every row and column, as tensor cores do. NumPy's depends on where in its tile a row is,
    and takes the bits of bf16 for whole numbers."""
    total, left, right = d.data.copy(), in_fp32(a), in_fp32(b)
    for place in range(left.shape[1]):
        total += left[:, place, None] * right[None, place]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def in_fp32(handle):
    is_bf16 = handle.data.dtype == np.uint16
    return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bf16 else handle.data.astype(np.float32)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Kernels run where tensors are."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", one_after_the_other)
    monkeypatch.setattr(exact_kernels, "_TRIED_ROWS", 70)
    monkeypatch.setattr(exact_kernels, "_TRIED_COLUMNS", 8)
    monkeypatch.setattr(fused, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    monkeypatch.setattr(packed_linears, "packing_available", lambda device, dtype: False)  # As on a GPU.
    exact_kernels.alike.cache_clear()
    yield
    exact_kernels.alike.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_product_has_the_same_bits_beside_any_number_of_others(dtype):
    x, weight = exact_sums.telling_product(40, 96, dtype)
    bias = weight[:, 0].contiguous()
    want = x[:200].double() @ weight.double().T + bias.double()
    whole = exact_kernels.product(x[:200], weight, bias)
    torch.testing.assert_close(whole.double(), want, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-2)
    for tile in exact_kernels.alike(96, dtype, CPU):
        for rows in (slice(0, 1), slice(3, 20), slice(60, 200)):
            assert torch.equal(exact_kernels.multiply(x[rows], weight, bias, tile=tile), whole[rows]), tile
    assert torch.equal(exact_kernels.product(x[:200], weight.T.contiguous().T, bias), whole)


def test_a_tile_that_adds_up_in_another_way_is_not_used(monkeypatch):
    whole = exact_kernels.multiply

    def other(x, weight, bias, *, tile):
        output = whole(x, weight, bias, tile=tile)
        return output if tile.columns != 64 else torch.nextafter(output, torch.ones_like(output))

    monkeypatch.setattr(exact_kernels, "multiply", other)
    found = exact_kernels.alike(80, torch.bfloat16, CPU)
    assert found == tuple(tile for tile in exact_kernels.TILES if tile.columns != 64)
    monkeypatch.setattr(exact_kernels, "multiply", lambda x, *args, tile: whole(x, *args, tile=tile) * (1 + len(x)))
    with pytest.raises(ModelError, match=r"set policy\.exact to false"):
        exact_kernels.alike(48, torch.bfloat16, CPU)


def test_large_products_take_large_tiles_and_small_ones_fill_the_gpu():
    tiles = exact_kernels.TILES
    assert exact_kernels.fitting(tiles, 32_768, 3072, 132) == tiles[-1]
    assert exact_kernels.fitting(tiles, 1, 1024, 132) == tiles[0]
    assert exact_kernels.fitting(tiles, 1, 151_936, 132).rows == 64
    assert exact_kernels.fitting(tiles[:1], 32_768, 3072, 132) == tiles[0]


def test_small_tiles_are_not_tried_for_many_rows_nor_large_ones_for_few():
    tiles = exact_kernels.TILES
    assert {tile.rows for tile in exact_kernels.worth_trying(tiles, 1)} == {16, 32, 64}
    assert {tile.rows for tile in exact_kernels.worth_trying(tiles, 8192)} == {64, 128}
    assert exact_kernels.worth_trying(tiles[1:2], 8192) == tiles[1:2]


HEADS = exact_attention.HeadShape(
    num_heads=4, num_kv_heads=2, dim=16, dtype=torch.bfloat16, softcap=None, window=None, has_sinks=False
)


@pytest.mark.parametrize("changes", [{}, {"window": 70, "softcap": 20.0}, {"has_sinks": True, "dtype": torch.float32}])
def test_one_token_of_each_sequence_takes_smaller_programs_where_they_give_the_same_bits(changes):
    exact_attention.writing_program.cache_clear()
    shape = dataclasses.replace(HEADS, **changes)
    found = exact_attention.writing_program(shape, CPU)
    assert found in exact_attention.WRITING
    newest = exact_attention.one_token_each(shape, CPU, num_contexts=5)
    assert newest(found).dtype == torch.float32
    assert torch.equal(newest(found), newest(exact_attention.READING))
    assert not torch.equal(newest(found)[0], newest(found)[1])


def test_a_smaller_program_that_adds_up_in_another_way_is_not_used(monkeypatch):
    whole = exact_attention.attend

    def other(*args, rows, **options):
        output = whole(*args, rows=rows, **options)
        return output if rows == exact_attention.READING.rows else torch.nextafter(output, torch.ones_like(output))

    monkeypatch.setattr(exact_attention, "attend", other)
    exact_attention.writing_program.cache_clear()
    assert exact_attention.writing_program(HEADS, CPU) == exact_attention.READING
    exact_attention.writing_program.cache_clear()


def test_sums_and_means_of_rows_are_those_of_torch_but_for_rounding():
    x = torch.randn(3, 5, 1500, requires_grad=True)
    with exact_sums.exact_functions():
        found = [x.mean(-1, keepdim=True), torch.sum(x, dim=2), x.float().sum(-1), x.mean(-1, dtype=torch.float64).float()]
    wanted = [x.mean(-1, keepdim=True), torch.sum(x, dim=2), x.sum(-1), x.mean(-1)]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    grads = [torch.autograd.grad(each[0].square().sum(), x)[0] for each in (found, wanted)]
    torch.testing.assert_close(*grads)


def test_a_product_of_many_matrices_is_refused():
    with exact_sums.exact_functions():
        assert torch.equal(torch.ones(2, 3, 1) @ torch.ones(2, 1, 4), torch.ones(2, 3, 4))
        for product in (torch.matmul, torch.bmm):
            with pytest.raises(ModelError, match=r"on a GPU there is no fixed order of sums"):
                product(torch.ones(2, 3, 4), torch.ones(2, 4, 3))


def load(folder, *, is_exact=True, dtype=torch.bfloat16, lora=None):
    return load_model(folder, dtype=dtype, device="cpu", exact=is_exact, lora=lora)


def requests():
    """Siblings of a prompt that is longer than a page, and one that is not. One in two draws among the likeliest tokens."""
    prompts = [[5 + (7 * i + j) % 90 for j in range(length)] for i, length in enumerate((66, 3))]
    return [
        Request(
            id=f"{i}.{j}",
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=1 + j, min_tokens=1 + j, seed=10 * i + j, temperature=TEMPERATURE, top_k=20 * (j == 1)
            ),
        )
        for i, prompt in enumerate(prompts)
        for j in range(2 - i)
    ]


def written(folder, model, *, max_running):
    engine, done = EmbeddedEngine(model, load_tokenizer(folder), max_running=max_running), {}
    for request in requests():
        engine.submit(request)
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return [sample_of(request, done[request.id]) for request in requests()]


def sample_of(request, completion):
    num_before, num_written = len(request.prompt_ids), len(completion.token_ids)
    return Sample(
        ids=np.array((*request.prompt_ids, *completion.token_ids)),
        loss_mask=np.arange(num_before + num_written) >= num_before,
        logp=np.array((*[0.0] * num_before, *completion.logprobs), dtype=np.float32),
        turn=np.array([-1] * num_before + [0] * num_written),
    )


def trained(model, samples):
    batch = pack(samples).replace(temperature=TEMPERATURE)
    return predict(model, batch, Needs(), chunk=7).logp


FAMILIES = {
    "qwen3": {},
    "gemma2": {"sliding_window": 20, "layers": 2},
    "gpt_oss": {"sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 2, "layers": 2},
    "qwen3_moe": {},
}


def tiny(folder, family):
    sizes = {"hidden": 32, "layers": 1, "initializer_range": 0.2} | FAMILIES[family]
    return str(make_tiny(folder, family=family, **sizes))


def test_what_an_engine_writes_is_what_is_trained_to_the_bit(tmp_path):
    folder = tiny(tmp_path, "qwen3")
    samples = written(folder, load(folder), max_running=4)
    batch, found = pack(samples), trained(load(folder), samples)  # The siblings' prompt is read once.
    assert torch.equal(found.detach()[batch.loss_mask], batch.logp[batch.loss_mask])
    assert found.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_has_one_log_prob_whatever_it_is_computed_with(tmp_path, family):
    folder = tiny(tmp_path, family)
    together = written(folder, load(folder), max_running=4)
    by_one = written(folder, load(folder), max_running=1)
    for one, other in zip(together, by_one, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.logp, other.logp)
    drawn = pack(together)
    packed = trained(load(folder), together)
    assert torch.equal(packed.detach()[drawn.loss_mask], drawn.logp[drawn.loss_mask])
    with torch.no_grad():
        alone = torch.cat([trained(load(folder), [sample]) for sample in together])
    assert torch.equal(alone[drawn.loss_mask], drawn.logp[drawn.loss_mask])
    packed.sum().backward()


@pytest.mark.slow
def test_an_adapter_changes_no_bit(tmp_path):
    folder, lora = str(make_tiny(tmp_path, hidden=32, layers=1, initializer_range=0.2)), LoraConfig(rank=4, alpha=8)
    model = load(folder, lora=lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape))
    samples = written(folder, model, max_running=4)
    batch = pack(samples)
    assert torch.equal(trained(model, samples).detach()[batch.loss_mask], batch.logp[batch.loss_mask])


@pytest.mark.slow
def test_gradients_are_those_of_the_quick_ways_but_for_rounding(tmp_path):
    folder = str(make_tiny(tmp_path, hidden=32, layers=2, initializer_range=0.2))
    samples = written(folder, load(folder, dtype=torch.float32), max_running=4)
    gradients = []
    for is_exact in (True, False):
        model = load(folder, is_exact=is_exact, dtype=torch.float32)
        trained(model, samples).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5 * float(want.abs().max()), rtol=1e-4)


def test_outside_of_a_forward_pass_nothing_is_exact(tmp_path):
    model = load(str(make_tiny(tmp_path, hidden=32, layers=1)))
    assert not exact.is_exact()
    with exact.exact_forward(model):
        assert exact.is_exact()
    assert not exact.is_exact()
