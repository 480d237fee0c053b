"""The attention and the engine on a CUDA device, against the same on the CPU in fp32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from reroll.infer.embedded.drafts import DraftedTokens
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.batch import pack
from reroll.training.predict import token_states
from reroll.types import Request, Sample, SamplingParams, WrittenTokens
from reroll_zoo.drafts import MeasuredPace, SiblingDrafter, SteadyPace
from reroll_zoo.tiny_models import make_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["llama", "qwen3", "mistral", "gemma2", "gpt_oss"])
def folder(request, tmp_path):
    options = {"sliding_window": 8} if request.param in ("mistral", "gemma2", "gpt_oss") else {}
    if request.param == "gpt_oss":  # All experts: which of them a token goes to would change with rounding.
        options |= {"num_local_experts": 2, "num_experts_per_tok": 2}
    return str(make_tiny(tmp_path, family=request.param, hidden=128, initializer_range=0.1, **options))


def packed_logits(model, sequences):
    device = model.device
    bounds = torch.tensor([0, *(len(sequence) for sequence in sequences)], device=device).cumsum(0)
    positions = torch.cat([torch.arange(len(sequence), device=device) for sequence in sequences])
    with torch.no_grad():
        hidden = hidden_states(model, torch.cat(sequences).to(device), positions, PackedAttention(bounds))
        return logits(model, hidden).float().cpu()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_packed_logits_are_those_of_the_cpu(folder, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(4, 90, (length,), generator=generator) for length in (3, 60, 1, 9)]
    want = packed_logits(load_model(folder, dtype=torch.float32, device="cpu"), sequences)
    got = packed_logits(load_model(folder, dtype=dtype, device="cuda"), sequences)
    assert (got - want).norm() <= tolerance * want.norm()


def test_half_precision_on_a_gpu_differentiates(folder):
    model = load_model(folder, dtype=torch.bfloat16, device="cuda")
    ids, bounds = torch.randint(4, 90, (12,), device="cuda"), torch.tensor([0, 5, 12], device="cuda")
    positions = torch.cat([torch.arange(5), torch.arange(7)]).cuda()
    logits(model, hidden_states(model, ids, positions, PackedAttention(bounds))).float().logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_siblings_that_share_a_prompt_learn_what_they_learn_apart(folder):
    model = load_model(folder, dtype=torch.bfloat16, device="cuda")
    generator = np.random.default_rng(0)
    prompt = generator.integers(4, 90, size=70)
    rows = [np.concatenate([prompt, generator.integers(4, 90, size=size)]) for size in (30, 1, 130, 64)]
    rows += [rows[2], generator.integers(4, 90, size=9)]
    batch = pack([whole_sample(row) for row in rows]).to("cuda")
    results = []
    for states in (
        lambda: token_states(model, batch).hidden,
        lambda: hidden_states(model, batch.ids, batch.positions, PackedAttention(batch.cu_seqlens)),
    ):
        model.zero_grad()
        hidden = states()
        hidden.float().square().mean(-1).sum().backward()
        grads = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None]
        results.append((hidden.detach().float(), torch.cat(grads)))
    (hidden, grad), (want, want_grad) = results
    assert (hidden - want).norm() < 0.02 * want.norm()
    assert (grad - want_grad).norm() < 0.03 * want_grad.norm()


def whole_sample(row):
    places = np.arange(len(row))
    return Sample(ids=row, loss_mask=places > 0, logp=np.zeros(len(row)), turn=np.where(places > 0, 0, -1))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_the_engines_logprobs_are_the_trainers(folder, dtype, tolerance):
    model, tokenizer = load_model(folder, dtype=dtype, device="cuda"), load_tokenizer(folder)
    engine = EmbeddedEngine(load_model(folder, dtype=dtype, device="cuda"), tokenizer, max_running=4)
    engine.load_weights(dict(model.named_parameters()), version=1)
    requests = [
        Request(
            id=f"{i}.{j}", prompt_ids=tuple(range(5, 8 + 9 * i)), sampling=SamplingParams(max_tokens=6 + j, seed=10 * i + j)
        )
        for i in range(3)
        for j in range(3)
    ]
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    for request in requests:
        completion = done[request.id]
        ids = torch.tensor([*request.prompt_ids, *completion.token_ids])
        scores = torch.log_softmax(packed_logits(model, [ids])[:-1], -1)
        want = scores.gather(1, ids[1:, None])[len(request.prompt_ids) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), want, atol=tolerance, rtol=0)


def test_experts_in_half_precision_run_as_a_graph_and_in_fp32_without(tmp_path):
    folder = str(make_tiny(tmp_path, family="qwen3_moe", hidden=128, initializer_range=0.1))
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float32, 1e-4)):
        model = load_model(folder, dtype=dtype, device="cuda")
        engine = EmbeddedEngine(model, load_tokenizer(folder), max_running=4)
        request = Request(id="a", prompt_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=40, min_tokens=40, seed=1))
        engine.submit(request)
        done = []
        while engine.num_unfinished:
            done += engine.step()
        assert bool(engine.backend._graphs._graphs) == (dtype == torch.bfloat16)
        ids = torch.tensor([*request.prompt_ids, *done[0].completion.token_ids])
        scores = torch.log_softmax(packed_logits(model, [ids])[:-1], -1)
        want = scores.gather(1, ids[1:, None])[len(request.prompt_ids) - 1 :, 0]
        assert (torch.tensor(done[0].completion.logprobs) - want).abs().mean() < tolerance


def written(engine, requests, *, weights=None):
    """What comes of requests; after eight steps of the engine, weights come."""
    for request in requests:
        engine.submit(request)
    done, num_steps = {}, 0
    while engine.num_unfinished:
        num_steps += 1
        if weights is not None and num_steps == 8:
            engine.load_weights(weights, version=1)
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


def assert_same_completions(ours, expected):
    assert {name: one.token_ids for name, one in ours.items()} == {name: one.token_ids for name, one in expected.items()}
    for name, one in expected.items():
        torch.testing.assert_close(torch.tensor(ours[name].logprobs), torch.tensor(one.logprobs), atol=1e-4, rtol=0)


def test_a_tenth_of_the_cache_writes_the_same_tokens(folder):
    model, tokenizer = load_model(folder, dtype=torch.float32, device="cuda"), load_tokenizer(folder)
    requests = [
        Request(id=str(i), prompt_ids=(5, 6, 7 + i // 2), sampling=SamplingParams(max_tokens=400, min_tokens=400, seed=i))
        for i in range(32)
    ]
    free = EmbeddedEngine(model, tokenizer, max_running=32)
    expected = written(free, requests)
    tight = EmbeddedEngine(model, tokenizer, max_running=32, cache_bytes=free.backend.bytes_per_token * 32 * 403 // 10)
    assert_same_completions(written(tight, requests), expected)
    assert tight.counts.num_gave_way > 0


def test_new_weights_that_read_contexts_anew_write_as_if_they_had_read_them_from_the_start(folder):
    model, tokenizer = load_model(folder, dtype=torch.float32, device="cuda"), load_tokenizer(folder)
    forty = SamplingParams(max_tokens=40, min_tokens=40)
    weights = {name: 1.1 * parameter.detach() for name, parameter in model.named_parameters()}
    requests = [Request(id=str(i), prompt_ids=tuple(range(5, 70 + i // 2)), sampling=replace(forty, seed=i)) for i in range(8)]
    done = written(EmbeddedEngine(model, tokenizer, max_running=8, reads_again=True), requests, weights=weights)
    fresh = EmbeddedEngine(load_model(folder, dtype=torch.float32, device="cuda"), tokenizer, max_running=8)
    fresh.load_weights(weights, version=1)
    begun = [
        replace(request, written=WrittenTokens(
            token_ids=done[request.id].token_ids[: done[request.id].versions[0][1]],
            logprobs=done[request.id].logprobs[: done[request.id].versions[0][1]],
            versions=done[request.id].versions[:1],
        ))
        for request in requests
    ]  # fmt: skip
    assert all(len(one.versions) == 2 for one in done.values())
    assert_same_completions(written(fresh, begun), done)


class HalfRight(SiblingDrafter):
    """Drafts of eight tokens, of which a random number of the first are right."""

    def __init__(self, known):
        super().__init__()
        self._known, self._draw = known, np.random.default_rng(0)

    def draft(self, sequence, *, max_tokens, least):
        ahead = self._known[sequence.request.id].token_ids[len(sequence.tokens) :][: self._draw.integers(9)]
        tokens = [*ahead, *self._draw.integers(4, 90, size=8).tolist()][: max(0, min(max_tokens, self._draw.integers(9)))]
        return DraftedTokens(tuple(tokens), ((4, 0),) * len(tokens))


def test_drafts_write_the_same_tokens(folder):
    model, tokenizer = load_model(folder, dtype=torch.float32, device="cuda"), load_tokenizer(folder)
    requests = [
        Request(
            id=str(i), prompt_ids=(5, 6, 7 + i // 4), sampling=SamplingParams(max_tokens=60 + 9 * i, seed=i, top_k=40 * (i % 2))
        )
        for i in range(12)
    ]
    expected = written(EmbeddedEngine(model, tokenizer, max_running=8), requests)
    for drafter, pace in (
        (HalfRight(expected), SteadyPace()),
        (SiblingDrafter(), SteadyPace()),
        (SiblingDrafter(), MeasuredPace()),
    ):
        engine = EmbeddedEngine(model, tokenizer, max_running=8, drafter=drafter, pace=pace)
        assert_same_completions(written(engine, requests), expected)
        assert engine.counts.num_drafted > 0
