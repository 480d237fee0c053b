"""A cache that is too small for all that runs: requests wait and give way, and write what they would have written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import reroll.infer.embedded.engine as engine_module
from reroll.errors import ModelError
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.types import Completion, FinishReason, Request, SamplingParams
from reroll_zoo.tiny_models import make_tiny

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 8
BYTES_PER_TOKEN = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, layers=NUM_LAYERS, heads=4, kv_heads=2, initializer_range=0.2)
    return str(tiny)


def make(folder: str, *, num_tokens: int | None = None, **options: Any) -> EmbeddedEngine:
    """An engine whose cache has room for so many tokens."""
    model = load_model(folder, dtype=torch.float32, device="cpu")
    cache_bytes = None if num_tokens is None else num_tokens * BYTES_PER_TOKEN
    return EmbeddedEngine(model, load_tokenizer(folder), cache_bytes=cache_bytes, **options)


def requests(num: int, *, num_prompt: int = 20, num_tokens: int = 120) -> list[Request]:
    """Pairs of siblings."""
    return [
        Request(
            id=str(number),
            prompt_ids=tuple(5 + (7 * place + number // 2) % 80 for place in range(num_prompt)),
            sampling=SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, seed=number),
        )
        for number in range(num)
    ]


def finish(engine: EmbeddedEngine, asked: Sequence[Request]) -> dict[str, Completion]:
    for request in asked:
        engine.submit(request)
    done: dict[str, Completion] = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


def assert_same(ours: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert ours.keys() == expected.keys()
    for name, completion in expected.items():
        assert ours[name].token_ids == completion.token_ids
        assert ours[name].logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_slots_at_a_tenth_of_the_cache_write_the_same(folder: str) -> None:
    asked = requests(14)
    expected = finish(make(folder), asked)
    tight = make(folder, num_tokens=196)  # All fourteen at their longest take 14 × 140.
    assert_same(finish(tight, asked), expected)
    assert tight.counts.num_gave_way > 0
    assert tight.counts.num_tokens == sum(len(completion.token_ids) for completion in expected.values())


def test_pages_that_are_too_few_write_the_same(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from reroll_zoo.paged_cache.backend import PAGE, PagedBackend

    asked = requests(4, num_prompt=120, num_tokens=12)
    expected = finish(make(folder), asked)
    monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    monkeypatch.setattr(engine_module, "_RESERVE_TOKENS", 0)  # Or so few tokens would never be too many.
    tight = make(folder, num_tokens=6 * PAGE)  # One page is for padding; three prompts fill the others, and go on to a third.
    assert_same(finish(tight, asked), expected)
    assert tight.counts.num_gave_way > 0
    backend = tight.backend
    assert isinstance(backend, PagedBackend)
    assert backend.pool.num_pages == 6, "what was allowed is there, once"
    tight.cached_prefixes.clear()
    assert backend.pool.num_free == 5, "no page is lost"


def test_the_oldest_goes_on_and_the_youngest_gives_way(folder: str) -> None:
    engine = make(folder, num_tokens=196)
    order: list[str] = []
    for request in requests(4):
        engine.submit(request)
    while engine.num_unfinished:
        order += [finished.request_id for finished in engine.step()]
    assert order == ["0", "1", "2", "3"]
    assert engine.counts.num_gave_way > 0


def test_what_was_written_is_kept_when_a_request_that_gave_way_is_aborted(folder: str) -> None:
    engine = make(folder, num_tokens=196)
    for request in requests(2):
        engine.submit(request)
    while engine.num_unfinished and not engine.counts.num_gave_way:
        engine.step()
    engine.abort("1")
    [ended] = engine.step()
    assert ended.request_id == "1"
    assert ended.completion.finish_reason is FinishReason.ABORT
    assert len(ended.completion.token_ids) > 20


@pytest.mark.parametrize("num_tokens", [10, 40])
def test_a_context_that_can_never_fit_is_an_error_with_the_fix(folder: str, num_tokens: int) -> None:
    with pytest.raises(ModelError, match=r"does not fit into the engine's cache: raise engine\.cache_gib"):
        finish(make(folder, num_tokens=num_tokens), requests(1))


@pytest.mark.parametrize("has_pages", [False, True])
def test_long_prompts_are_read_in_parts_while_others_write(
    folder: str, monkeypatch: pytest.MonkeyPatch, has_pages: bool
) -> None:
    short, long = requests(1, num_tokens=12), requests(6, num_prompt=75, num_tokens=3)[2:]
    expected = {**finish(make(folder), short), **finish(make(folder), long)}
    if has_pages:
        pytest.importorskip("triton")
        from reroll_zoo.paged_cache.backend import PagedBackend

        monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    monkeypatch.setattr(engine_module, "_MAX_PREFILL_TOKENS", 16)
    engine = make(folder)
    read: list[int] = []
    original = engine.backend.forward_and_sample

    def counted(starts: Any, uncached: Any, **options: Any) -> Any:
        read.append(max(map(len, uncached)))
        return original(starts, uncached, **options)

    monkeypatch.setattr(engine.backend, "forward_and_sample", counted)
    assert_same(finish(engine, [*short, *long]), expected)
    assert max(read) == 16
    assert engine.counts.num_prefill_tokens == 20 + 2 * (75 + 1), "siblings wait for the one that reads, and read one token"


def test_no_context_is_read_by_two_versions(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [request] = requests(1, num_prompt=75, num_tokens=4)
    monkeypatch.setattr(engine_module, "_MAX_PREFILL_TOKENS", 16)
    engine = make(folder)
    other = load_model(folder, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    engine.submit(request)
    engine.step()
    engine.load_weights(dict(other.named_parameters()), version=3)
    done = finish(engine, [])
    fresh = make(folder)
    fresh.load_weights(dict(other.named_parameters()), version=3)
    assert_same(done, finish(fresh, [request]))
    assert done["0"].versions == ((3, 4),)


def test_a_cache_as_tight_still_reuses_prefixes_and_drops_them_when_it_must(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from reroll_zoo.paged_cache.backend import PAGE, PagedBackend

    asked = requests(8, num_prompt=60, num_tokens=6)
    expected = finish(make(folder), asked)
    monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    engine = make(folder, num_tokens=6 * PAGE)
    ours: dict[str, Completion] = {}
    for request in asked:  # One after the other: each leaves its prefix behind, more than there is room for.
        ours |= finish(engine, [request])
    assert_same(ours, expected)
    assert engine.counts.num_reused_tokens > 0
    assert engine.counts.num_gave_way == 0


def test_pages_of_contexts_that_are_read_anew_are_given_back(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from reroll_zoo.paged_cache.backend import PagedBackend

    other = load_model(folder, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)

    def interrupted() -> dict[str, Completion]:
        engine = make(folder, reads_again=True)
        for request in requests(3, num_prompt=70, num_tokens=6):
            engine.submit(request)
        engine.step()
        engine.step()
        engine.load_weights(dict(other.named_parameters()), version=1)
        return finish(engine, [])

    expected = interrupted()
    monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    assert_same(interrupted(), expected)
