"""The embedded engine with layers that carry a state: kept in slots, copied to siblings, parked between turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import reroll.infer.embedded.engine as engine_module
from reroll.errors import ModelError
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.infer.embedded.model_runner import ModelRunner
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model, load_tokenizer
from reroll.types import Completion, Request, SamplingParams
from reroll_zoo.drafts import SiblingDrafter
from reroll_zoo.recurrent_cache import RecurrentBackend
from reroll_zoo.tiny_models import make_tiny

DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip


MAMBA = {"mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_5_text": DELTA, "falcon_h1": MAMBA}
"""One has layers with a state and layers with attention, the other has both in every layer."""


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, options = tmp_path_factory.mktemp("tiny"), FAMILIES[request.param]
    return make_tiny(place, family=request.param, hidden=32, layers=3, initializer_range=0.1, max_positions=256, **options)


def load(folder: Path) -> PreTrainedModel:
    return load_model(str(folder), dtype=torch.float32, device="cpu")


def make(folder: Path, *, max_running: int = 8, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(load(folder), load_tokenizer(str(folder)), max_running=max_running, **options)


def ask(name: str, prompt: Iterable[int], *, num_tokens: int = 8, seed: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, seed=seed)
    return Request(id=name, prompt_ids=tuple(prompt), sampling=sampling)


def finish(engine: EmbeddedEngine, asked: Sequence[Request] = ()) -> dict[str, Completion]:
    for request in asked:
        engine.submit(request)
    done: dict[str, Completion] = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


def assert_trainers(model: PreTrainedModel, asked: Sequence[Request], done: dict[str, Completion]) -> None:
    """What the engine says of its tokens is what training computes for them."""
    for request in asked:
        wrote = done[request.id]
        ids = torch.tensor([*request.prompt_ids, *wrote.token_ids])
        with torch.no_grad():
            hidden = hidden_states(model, ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
            logp = logits(model, hidden)[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(wrote.logprobs), logp[len(request.prompt_ids) - 1 :], atol=1e-5, rtol=0)


def prompt(length: int, *, start: int = 0) -> list[int]:
    return [5 + (7 * place + start) % 80 for place in range(length)]


def test_siblings_get_a_copy_of_the_state_after_their_prompt(folder: Path) -> None:
    engine = make(folder)
    asked = [ask(f"{group}.{seed}", prompt(70 + group, start=group), seed=seed) for group in range(2) for seed in range(3)]
    done = finish(engine, asked)
    assert_trainers(load(folder), asked, done)
    assert len({completion.token_ids for completion in done.values()}) > 2
    assert engine.counts.num_prefill_tokens == 70 + 71


def test_siblings_for_whom_there_was_no_room_go_on_from_the_prompts_state(folder: Path) -> None:
    engine = make(folder, max_running=2)
    asked = [ask(str(seed), prompt(70), seed=seed, num_tokens=4 + seed) for seed in range(5)]
    assert_trainers(load(folder), asked, finish(engine, asked))
    assert engine.counts.num_prefill_tokens <= 70 + 4, "each of the others reads the prompt's last token"


def test_a_next_turn_reads_only_what_is_new(folder: Path) -> None:
    engine, model = make(folder), load(folder)
    contexts = [prompt(30 + talk, start=talk) for talk in range(3)]
    num_read = 0
    for turn in range(3):
        asked = [ask(f"{talk}.{turn}", context, seed=talk) for talk, context in enumerate(contexts)]
        done = finish(engine, asked)
        assert_trainers(model, asked, done)
        for talk, context in enumerate(contexts):
            context += [*done[f"{talk}.{turn}"].token_ids, *prompt(4, start=turn)]
        num_read += 5 * 3 if turn else 30 + 31 + 32  # The last token that was written had not been read.
        assert engine.counts.num_prefill_tokens == num_read


def test_a_state_is_not_cut_back_so_another_ending_is_read_anew(folder: Path) -> None:
    engine = make(folder)
    first = ask("a", prompt(60))
    done = finish(engine, [first])
    edited = [ask("b", [*prompt(50), 7, 8, 9]), ask("c", prompt(60), seed=3)]
    done |= finish(engine, edited)
    assert_trainers(load(folder), [first, *edited], done)
    assert engine.counts.num_reused_tokens == 0


def test_a_prompt_read_in_parts_is_read_as_if_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [ask("short", prompt(20)), ask("long", prompt(75)), ask("sibling", prompt(75), seed=1)]
    monkeypatch.setattr(engine_module, "_MAX_PREFILL_TOKENS", 16)
    assert_trainers(load(folder), asked, finish(make(folder), asked))


def test_a_tight_cache_counts_states_and_those_that_give_way_write_the_same(folder: Path) -> None:
    asked = [ask(str(number), prompt(20, start=number), num_tokens=70, seed=number) for number in range(4)]
    free = make(folder)
    per_slot = free.backend.bytes_per_state + 90 * free.backend.bytes_per_token
    assert free.backend.bytes_per_state > 20 * free.backend.bytes_per_token > 0
    tight = make(folder, cache_bytes=int(2.9 * per_slot))
    tight_done, most = {}, 0
    for request in asked:
        tight.submit(request)
    while tight.num_unfinished:
        tight_done |= {finished.request_id: finished.completion for finished in tight.step()}
        most = max(most, len(tight._running))
    expected = finish(free, asked)
    assert {name: done.token_ids for name, done in tight_done.items()} == {n: done.token_ids for n, done in expected.items()}
    assert most == 3, "at first they are short"
    assert tight.counts.num_gave_way > 0
    with pytest.raises(ModelError, match=r"raise engine\.cache_gib"):
        finish(make(folder, cache_bytes=free.backend.bytes_per_state), asked[:1])


def test_parked_states_count_with_their_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make(folder).backend
    bytes_per_prefix = backend.bytes_per_state + 21 * backend.bytes_per_token
    monkeypatch.setattr(engine_module, "_MAX_CACHED_BYTES", int(2.9 * bytes_per_prefix))
    engine = make(folder)
    for number in range(5):
        finish(engine, [ask(str(number), prompt(20, start=number), num_tokens=2)])
    assert len(engine.cached_prefixes) == 2


def plain(folder: Path, scale: float = 1.0) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale)
    return model


@torch.no_grad()
def continued(old: PreTrainedModel, new: PreTrainedModel, ids: torch.Tensor, *, num_old: int) -> torch.Tensor:
    """Log-probs of ids[num_old + 1 :] when Hugging Face's own reads so many with old weights, and the rest with new ones."""
    cache = DynamicCache(config=old.config)
    old(ids[None, :num_old], past_key_values=cache, use_cache=True)
    scores = [new(token[None, None], past_key_values=cache, use_cache=True).logits[0] for token in ids[num_old:-1]]
    return torch.cat(scores).log_softmax(-1).gather(1, ids[num_old + 1 :, None])[:, 0]


@pytest.mark.parametrize("reads_again", [False, True])
def test_a_state_is_carried_over_a_push_or_read_again(folder: Path, reads_again: bool) -> None:
    new = load(folder)
    with torch.no_grad():
        for weight in new.parameters():
            weight.mul_(1.05)
    engine, asked = make(folder, reads_again=reads_again), ask("a", prompt(40), num_tokens=12)
    engine.submit(asked)
    for _ in range(5):
        engine.step()
    engine.load_weights({name: weight.detach().clone() for name, weight in new.named_parameters()}, version=1)
    wrote = finish(engine)["a"]
    assert wrote.versions == ((0, 5), (1, 7))
    ids = torch.tensor([*asked.prompt_ids, *wrote.token_ids])
    carried = continued(plain(folder), plain(folder, 1.05), ids, num_old=44)
    anew = continued(plain(folder, 1.05), plain(folder, 1.05), ids, num_old=44)
    assert (carried - anew).abs().max() > 1e-3, "the two differ"
    want = anew if reads_again else carried
    torch.testing.assert_close(torch.tensor(wrote.logprobs[5:]), want, atol=1e-5, rtol=0)
    later, before = ask("b", [*asked.prompt_ids, *wrote.token_ids, 9]), engine.counts.num_reused_tokens
    assert_trainers(new, [later], finish(engine, [later]))
    assert (engine.counts.num_reused_tokens > before) == reads_again, "what two versions have read is not reused"


def test_slots_that_end_in_any_order_keep_their_states(folder: Path) -> None:
    engine = make(folder, max_running=3)
    asked = [
        ask(str(number), prompt(18 + number, start=number), num_tokens=1 + 5 * number % 7, seed=number) for number in range(9)
    ]
    engine.submit(ask("gone", prompt(25)))
    engine.step()
    engine.abort("gone")
    done = finish(engine, asked)
    assert_trainers(load(folder), asked, done)


def test_sleep_gives_the_states_back(folder: Path) -> None:
    engine = make(folder)
    finish(engine, [ask("a", prompt(30))])
    engine.sleep()
    backend = engine.backend
    assert isinstance(backend, RecurrentBackend)
    assert all(part.numel() == 0 for part in backend._states._data)
    engine.wake()
    asked = [ask("b", prompt(30))]
    assert_trainers(load(folder), asked, finish(engine, asked))


def test_drafts_are_refused_with_the_reason(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"engine\.draft to off"):
        make(folder, drafter=SiblingDrafter())


def test_attention_alone_has_room_for_keys(folder: Path) -> None:
    runner = ModelRunner(load(folder))
    num_layers = 1 if runner.model.config.model_type == "qwen3_5_text" else 3
    assert RecurrentBackend(runner).bytes_per_token == num_layers * 2 * 2 * 8 * 4
