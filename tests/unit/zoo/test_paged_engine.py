"""The engine over pages, as a GPU runs it, against the engine over slots: in Triton's interpreter where there is no GPU."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("triton")

import reroll.infer.embedded.engine as engine_module
import reroll_zoo.paged_cache.backend as backend_module
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.types import Request, SamplingParams
from reroll_zoo.paged_cache.backend import PagedBackend
from reroll_zoo.paged_cache.graph_runner import asks_host
from reroll_zoo.tiny_models import make_tiny


def engine_with(folder, requests):
    """An engine that has room for two at a time."""
    engine = EmbeddedEngine(load_model(folder, dtype=torch.float32, device="cpu"), load_tokenizer(folder), max_running=2)
    for request in requests:
        engine.submit(request)
    return engine


def completions(folder, requests):
    """What such an engine writes."""
    engine, done = engine_with(folder, requests), {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


FAMILIES = {"llama": {}, "gemma2": {}, "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 8}}


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_and_slots_write_the_same_tokens(tmp_path, monkeypatch, family):
    folder = str(make_tiny(tmp_path, family=family, hidden=32, layers=2, initializer_range=0.2, **FAMILIES[family]))
    requests = [
        Request(
            id=f"{prompt}.{sibling}",
            prompt_ids=tuple(range(5, 8 + 30 * prompt)),
            sampling=SamplingParams(max_tokens=5, seed=sibling),
        )
        for prompt in range(2)
        for sibling in range(2)
    ]
    want = completions(folder, requests)
    monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    for name, completion in completions(folder, requests).items():
        assert completion.token_ids == want[name].token_ids
        assert completion.logprobs == pytest.approx(want[name].logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "dtype", "asks"),
    [
        ("llama", torch.float32, False),
        ("gpt_oss", torch.bfloat16, False),
        ("gpt_oss", torch.float32, True),
        ("llama4_text", torch.bfloat16, True),  # Its experts do not run through transformers' interface.
    ],
)
def test_a_model_is_not_captured_whose_experts_may_ask_the_host_for_counts(family, dtype, asks):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if family != "llama" else {}
    config = AutoConfig.for_model(family, **shape, **experts, num_key_value_heads=1, head_dim=16, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert asks_host(model) == asks


def test_what_the_requests_may_come_to_need_is_allocated_at_once(tmp_path, monkeypatch):
    folder = str(make_tiny(tmp_path, family="llama", hidden=32, layers=1, initializer_range=0.2))
    monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    monkeypatch.setattr(backend_module, "_FIRST_PAGES", 1)
    sampling = SamplingParams(max_tokens=5, min_tokens=5)  # Which begin another page.
    requests = [Request(id=str(id), prompt_ids=(5 + id,) * 62, sampling=sampling) for id in range(3)]
    engine, sizes = engine_with(folder, requests), set()
    while engine.num_unfinished:
        engine.step()
        sizes.add(engine.backend.pool.num_pages)
    assert len(sizes) == 1


def test_more_than_was_foreseen_grows_the_cache(tmp_path, monkeypatch):
    folder = str(make_tiny(tmp_path, family="llama", hidden=32, layers=1, initializer_range=0.2))
    short, long = (Request(id=str(num), prompt_ids=(7,) * num, sampling=SamplingParams(max_tokens=2)) for num in (4, 150))
    want = completions(folder, [long])["150"]
    monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    monkeypatch.setattr(backend_module, "_FIRST_PAGES", 1)
    engine = engine_with(folder, [short])
    while engine.num_unfinished:
        engine.step()
    before = engine.backend.pool.num_pages
    engine.submit(long)
    [finished] = [finished for _ in range(2) for finished in engine.step()]
    assert finished.completion.token_ids == want.token_ids
    assert engine.backend.pool.num_pages > before
