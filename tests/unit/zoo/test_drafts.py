"""Drafts change how many steps a completion takes, and nothing else: whatever is guessed, the same tokens are written."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import reroll.infer.embedded.engine as engine_module
from reroll.infer.embedded.drafts import DraftedTokens
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.infer.sequence import SequenceState
from reroll.models.load import load_model, load_tokenizer
from reroll.types import Completion, FinishReason, Request, SamplingParams, WrittenTokens
from reroll_zoo.drafts import SiblingDrafter, SteadyPace
from reroll_zoo.tiny_models import make_tiny

BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
Known = dict[str, Completion]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    options = {"sliding_window": 8, "tie_embeddings": False} if request.param == "gemma2" else {}
    tiny = make_tiny(
        tmp_path_factory.mktemp("tiny"), family=request.param, hidden=32, layers=2, heads=4, kv_heads=2,
        initializer_range=0.2, max_positions=160, **options,
    )  # fmt: skip
    return str(tiny)


class Guesses(SiblingDrafter):
    """Drafts of a test's making: the tokens to come, as they are known from a run without drafts, changed or not."""

    def __init__(self, known: Known, change: Callable[[list[int]], list[int]]) -> None:
        super().__init__()
        self._known, self._change = known, change

    def draft(self, sequence: SequenceState, *, max_tokens: int, least: float) -> DraftedTokens:
        ahead = list(self._known[sequence.request.id].token_ids[len(sequence.tokens) :])
        tokens = self._change([*ahead, *[7] * 8][:8])[: max(0, max_tokens)]
        return DraftedTokens(tuple(tokens), ((4, 0),) * len(tokens))


def changes() -> dict[str, Callable[[list[int]], list[int]]]:
    draw = random.Random(0)

    def sometimes(ahead: list[int]) -> list[int]:
        cut = draw.randrange(9)
        return [*ahead[:cut], *(draw.randrange(4, 90) for _ in ahead[cut:])][: draw.randrange(9)]

    return {
        "right": lambda ahead: ahead,
        "wrong": lambda ahead: [(token + 1) % 90 for token in ahead],
        "random": lambda ahead: [draw.randrange(4, 90) for _ in ahead],
        "sometimes": sometimes,
    }


def make(
    folder: str, drafter: SiblingDrafter | None = None, *, num_tokens: int | None = None, **options: Any
) -> EmbeddedEngine:
    model = load_model(folder, dtype=torch.float32, device="cpu")
    cache_bytes = None if num_tokens is None else num_tokens * BYTES_PER_TOKEN
    return EmbeddedEngine(
        model, load_tokenizer(folder), cache_bytes=cache_bytes, drafter=drafter, pace=SteadyPace(), max_running=6, **options
    )


def requests(num: int = 9, **sampling: Any) -> list[Request]:
    """Groups of three, of uneven lengths, that begin with a common word or two."""
    return [
        Request(
            id=str(number),
            prompt_ids=tuple(5 + (7 * place + number // 3) % 80 for place in range(2 + 9 * (number // 3))),
            sampling=SamplingParams(**{"max_tokens": 9 + 5 * (number % 5), "seed": number} | sampling),
        )
        for number in range(num)
    ]


def finish(engine: EmbeddedEngine, asked: Sequence[Request] = ()) -> Known:
    for request in asked:
        engine.submit(request)
    done: Known = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


def assert_same(ours: Known, expected: Known) -> None:
    assert ours.keys() == expected.keys()
    for name, completion in expected.items():
        assert replace(ours[name], logprobs=()) == replace(completion, logprobs=())
        assert ours[name].logprobs == pytest.approx(completion.logprobs, abs=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cut": {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    "late stop tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(4, 40))},
    "stop tokens": {"stop_token_ids": tuple(range(4, 16))},
    "the model's length": {"max_tokens": 500, "min_tokens": 500},
}


@pytest.mark.parametrize("case", CASES)
def test_any_draft_writes_the_tokens_that_none_writes(folder: str, case: str) -> None:
    asked = requests(**CASES[case])
    expected = finish(make(folder), asked)
    num_tokens = sum(len(completion.token_ids) for completion in expected.values())
    for name, change in changes().items():
        engine = make(folder, Guesses(expected, change))
        assert_same(finish(engine, asked), expected)
        assert engine.counts.num_tokens == num_tokens, name
        if name == "right":
            assert engine.counts.num_accepted > num_tokens / 3
            assert engine.counts.num_steps < max(len(completion.token_ids) for completion in expected.values())
        elif name == "wrong":
            assert engine.counts.num_accepted == 0 < engine.counts.num_drafted


def test_a_stop_string_inside_a_draft_ends_the_completion_there(folder: str) -> None:
    free = finish(make(folder), requests(3, max_tokens=20))
    name = max(free, key=lambda name: len(free[name].token_ids))
    tokenizer, tokens = load_tokenizer(folder), free[name].token_ids
    texts = [tokenizer.decode(tokens[start : start + 3]) for start in range(4, len(tokens) - 4)]
    text = next(text for text in texts if text in tokenizer.decode(tokens) and text.strip())
    asked = requests(3, max_tokens=20, stop=(text,))
    expected = finish(make(folder), asked)
    assert len(expected[name].token_ids) < len(tokens)
    assert expected[name].finish_reason is FinishReason.STOP
    engine = make(folder, Guesses(free, lambda ahead: ahead))
    assert_same(finish(engine, asked), expected)
    assert engine.counts.num_accepted > 0


def test_own_drafts_of_a_text_that_repeats_itself_save_steps(folder: str) -> None:
    asked = [replace(request, id=f"{name}.{request.id}") for name in "ab" for request in requests(6)]  # Twins: equal seeds.
    expected = finish(make(folder), asked)
    engine = make(folder, SiblingDrafter())
    assert_same(finish(engine, asked[:6]), {name: one for name, one in expected.items() if name[0] == "a"})
    num_steps, num_accepted = engine.counts.num_steps, engine.counts.num_accepted
    assert_same(finish(engine, asked[6:]), {name: one for name, one in expected.items() if name[0] == "b"})
    assert engine.counts.num_accepted - num_accepted > 30
    assert engine.counts.num_steps - num_steps < num_steps, "what was answered before is known"


def test_a_request_that_begins_with_tokens_goes_on_with_drafts(folder: str) -> None:
    asked = requests()
    expected = finish(make(folder), asked)
    begun = []
    for request in asked:
        done, num = expected[request.id], len(expected[request.id].token_ids) // 2
        written = WrittenTokens(
            token_ids=done.token_ids[:num], logprobs=done.logprobs[:num], versions=((0, num),) if num else ()
        )
        begun.append(replace(request, written=written))
    for change in changes().values():
        assert_same(finish(make(folder, Guesses(expected, change)), begun), expected)


def test_an_abort_keeps_tokens_that_are_those_of_a_run_without_drafts(folder: str) -> None:
    asked = requests(4, max_tokens=30, min_tokens=30)
    expected = finish(make(folder), asked)
    engine = make(folder, Guesses(expected, changes()["sometimes"]))
    for request in asked:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.abort("1")
    done = finish(engine)
    assert done["1"].finish_reason is FinishReason.ABORT
    num_tokens = len(done["1"].token_ids)
    assert 3 <= num_tokens < 30
    assert done["1"].token_ids == expected["1"].token_ids[:num_tokens]
    assert_same({**done, "1": expected["1"]}, expected)


@pytest.mark.parametrize("reads_again", [False, True])
def test_weights_that_come_in_the_midst_write_the_same_from_the_same_place_on(folder: str, reads_again: bool) -> None:
    """Drafts may write more tokens before weights come, so what they wrote by then is given to an engine without."""
    other = load_model(folder, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    weights = {name: weight.detach().clone() for name, weight in other.named_parameters()}
    asked = requests(3, max_tokens=30, min_tokens=30)
    expected = finish(make(folder), asked)
    engine = make(folder, Guesses(expected, changes()["sometimes"]), reads_again=reads_again)
    for request in asked:
        engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.load_weights(weights, version=3)
    done = finish(engine)
    for request in asked:
        completion = done[request.id]
        (old, num_old), (new, num_new) = completion.versions
        assert (old, new, num_old + num_new) == (0, 3, 30)
        assert completion.token_ids[:num_old] == expected[request.id].token_ids[:num_old]
        if reads_again:
            fresh = make(folder)
            fresh.load_weights(weights, version=3)
            written = WrittenTokens(
                token_ids=completion.token_ids[:num_old], logprobs=completion.logprobs[:num_old], versions=((0, num_old),)
            )
            assert_same({request.id: completion}, finish(fresh, [replace(request, written=written)]))


def test_a_cache_that_is_too_small_for_all_writes_the_same_with_drafts(folder: str) -> None:
    asked = requests(6, max_tokens=120, min_tokens=120)
    expected = finish(make(folder), asked)
    for change in changes().values():
        engine = make(folder, Guesses(expected, change), num_tokens=196)
        assert_same(finish(engine, asked), expected)
        assert engine.counts.num_gave_way > 0


def test_pages_write_the_same_with_drafts(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from reroll_zoo.paged_cache.backend import PAGE, PagedBackend

    asked = requests(6, max_tokens=10)
    expected = finish(make(folder), asked)
    monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    engine = make(folder, Guesses(expected, changes()["sometimes"]), num_tokens=8 * PAGE)
    assert_same(finish(engine, asked), expected)
    assert engine.counts.num_accepted > 0
    engine.cached_prefixes.clear()
    assert isinstance(engine.backend, PagedBackend)
    assert engine.backend.pool.num_free == 7, "no page is lost"


def state(prompt: Sequence[int], tokens: Sequence[int] = ()) -> SequenceState:
    sequence = SequenceState(Request(id="a", prompt_ids=tuple(prompt), sampling=SamplingParams(max_tokens=99)), frozenset())
    sequence.tokens.extend(tokens)
    return sequence


def test_a_draft_continues_as_a_sibling_did_and_the_context_itself() -> None:
    drafter, prompt = SiblingDrafter(), (1, 2, 3, 4, 5, 1, 2)
    first, second = state(prompt, [60, 61, 62, 63]), state(prompt, [60])
    drafter.join(first)
    drafter.join(second)
    assert drafter.draft(second, max_tokens=3, least=0.0).tokens == (61, 62, 63)
    drafter.leave(first)
    assert drafter.draft(second, max_tokens=2, least=0.0).tokens == (61, 62), "an ended sibling is still known"
    fresh = state((1, 2, 3, 4, 5, 1, 2))
    alone = SiblingDrafter()
    alone.join(fresh)
    assert alone.draft(fresh, max_tokens=2, least=0.0).tokens == (3, 4)
    stranger = state((8, 9))
    alone.join(stranger)
    assert alone.draft(stranger, max_tokens=2, least=0.0).tokens == ()


def test_kinds_of_guesses_that_prove_wrong_are_left_out() -> None:
    drafter, sequence = SiblingDrafter(), state((1, 2, 1, 2, 1))
    drafter.join(sequence)
    assert drafter.draft(sequence, max_tokens=8, least=0.4).tokens == (2,)
    for _ in range(20):
        draft = drafter.draft(sequence, max_tokens=1, least=0.0)
        drafter.learn(draft, num_right=0, num_known=1)
    assert drafter.draft(sequence, max_tokens=8, least=0.4).tokens == ()
    for _ in range(200):
        drafter.learn(draft, num_right=1, num_known=1)
    assert drafter.draft(sequence, max_tokens=1, least=0.4).tokens == (2,)


def test_what_is_kept_of_ended_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reroll_zoo.drafts.siblings._MAX_KEPT_TOKENS", 100)
    drafter = SiblingDrafter()
    running = state((1, 2), range(50))
    drafter.join(running)
    for number in range(40):
        sequence = state((number, 3), range(20))
        drafter.join(sequence)
        drafter.leave(sequence)
    assert drafter._num_kept <= 100
    assert len(drafter._groups) <= 5
    assert drafter.draft(running, max_tokens=1, least=0.0).tokens == ()
    drafter.leave(running)
