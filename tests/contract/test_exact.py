"""Trainer and embedded engine, equal to the bit: every family, packed, alone, decoded, extended, under an adapter."""

import numpy as np
import pytest
import torch
from engine_probe import FAMILIES, Stray, ask, finish, perturbed, tiny_folder

from reroll.config.parts import LoraConfig
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.batch import pack
from reroll.training.base import Needs
from reroll.training.predict import predict
from reroll.types import Sample
from reroll_zoo import exact_sums
from reroll_zoo.drafts import SteadyPace

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="exact runs on CPUs")

TEMPERATURE = 0.7


QUICK = ("llama", "qwen3_moe", "gemma2")
"""Between them they have what the others have: windows, soft caps, experts, norms of heads."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def folder(request, tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp(request.param), request.param)


def load(folder, dtype, *, is_exact=True, lora=None):
    return load_model(folder, dtype=dtype, device="cpu", exact=is_exact, lora=lora)


def open_engine(folder, model, max_running, **options):
    return EmbeddedEngine(model, load_tokenizer(folder), max_running=max_running, **options)


def requests():
    """Siblings of prompts shorter and longer than a block of keys, with answers of all lengths."""
    prompts = [[5 + (7 * i + j) % 90 for j in range(length)] for i, length in enumerate((1, 18, 66))]
    return [
        ask(f"{i}.{j}", prompt, seed=10 * i + j, max_tokens=3 + 5 * j, min_tokens=3 + 5 * j, temperature=TEMPERATURE)
        for i, prompt in enumerate(prompts)
        for j in range(3)
    ]


def sample_of(request, completion):
    num_before, num_written = len(request.prompt_ids), len(completion.token_ids)
    return Sample(
        ids=np.array((*request.prompt_ids, *completion.token_ids)),
        loss_mask=np.arange(num_before + num_written) >= num_before,
        logp=np.array((*[0.0] * num_before, *completion.logprobs), dtype=np.float32),
        turn=np.array([-1] * num_before + [0] * num_written),
    )


def trained_logp(model, samples, *, chunk=7):
    batch = pack(samples).replace(temperature=TEMPERATURE)
    return predict(model, batch, Needs(), chunk=chunk).logp.detach()[batch.loss_mask], batch.logp[batch.loss_mask]


def assert_same(model, asked, done):
    samples = [sample_of(request, done[request.id]) for request in asked]
    trained, drawn = trained_logp(model, samples)  # Packed, with the siblings' prompts read once.
    assert torch.equal(trained, drawn)
    with torch.no_grad():
        alone = torch.cat([trained_logp(model, [sample], chunk=1000)[0] for sample in samples])
    assert torch.equal(alone, drawn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_token_has_one_log_prob_whatever_it_is_computed_with(folder, dtype):
    model, asked = load(folder, dtype), requests()
    done = finish(open_engine(folder, load(folder, dtype), 64), asked)
    assert_same(model, asked, done)
    assert finish(open_engine(folder, load(folder, dtype), 1), asked) == done
    drafting = open_engine(folder, load(folder, dtype), 4, drafter=Stray(), pace=SteadyPace())
    assert finish(drafting, asked) == done


def test_a_context_that_is_extended_and_new_weights_change_no_bit(folder):
    dtype = torch.bfloat16
    engine, first = open_engine(folder, load(folder, dtype), 3), requests()
    done = finish(engine, first)
    extended = [
        ask(f"{r.id}+", [*r.prompt_ids, *done[r.id].token_ids, 7, 8, 9], seed=i, temperature=TEMPERATURE)
        for i, r in enumerate(first)
    ]
    before = engine.counts.num_reused_tokens
    done = finish(engine, extended)
    assert engine.counts.num_reused_tokens > before
    assert_same(load(folder, dtype), extended, done)
    new = perturbed(load(folder, dtype))
    engine.load_weights({name: weight.detach().clone() for name, weight in new.named_parameters()}, version=1)
    assert_same(new, first, finish(engine, first))


def test_an_adapter_changes_no_bit_and_learns(folder):
    lora = LoraConfig(rank=4, alpha=8)
    model, dtype = load(folder, torch.bfloat16, lora=lora), torch.bfloat16
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    engine, asked = open_engine(folder, load(folder, dtype, lora=lora), 8), requests()
    engine.load_weights({name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}, version=1)
    assert_same(model, asked, finish(engine, asked))


def test_values_and_gradients_are_those_of_the_quick_ways_but_for_rounding(folder):
    asked = requests()
    done = finish(open_engine(folder, load(folder, torch.float32), 8), asked)
    batch = pack([sample_of(request, done[request.id]) for request in asked])
    logp, gradients = {}, {}
    for is_exact in (True, False):
        model = load(folder, torch.float32, is_exact=is_exact)
        found = predict(model, batch, Needs(entropy=True), chunk=7)
        (found.logp.sum() + found.entropy.sum()).backward()
        logp[is_exact] = found.logp.detach()
        gradients[is_exact] = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(logp[True], logp[False], atol=2e-5, rtol=0)
    for name, gradient in gradients[True].items():
        largest = gradients[False][name].abs().max()
        assert (gradient - gradients[False][name]).abs().max() <= 2e-4 * largest, name


def test_a_product_is_told_to_depend_on_its_rows_where_it_does():
    """What `exact` rests on: the trial finds that this machine's products of few rows add up in another way, where they do."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((8, 64), (64, 64), (576, 1536)):
            x, weight = exact_sums.telling_product(*shape, dtype)
            whole = exact_sums.linear(x, weight)
            for num in (1, 2, 3, 7, 16, 31):
                assert torch.equal(exact_sums.linear(x[:num], weight), whole[:num])
            other = torch.stack([(row * weight).float().sum(-1) for row in x[:4]]).to(dtype)
            assert not torch.equal(other, whole[:4]), "the rows show an order of sums"
