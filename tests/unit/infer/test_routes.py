"""The engine tells which experts have read its tokens, whatever becomes of a request; who takes the same agrees with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import reroll.infer.embedded.engine as engine_module
from reroll.infer.embedded.drafts import DraftedTokens
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.infer.sequence import SequenceState
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.batch import Batch, pack
from reroll.tokens.samples import rows_of
from reroll.training.base import Needs, required
from reroll.training.predict import predict
from reroll.types import Completion, Group, Prompt, Request, SamplingParams, Status, Trajectory, Turn, WrittenTokens
from reroll_zoo.drafts import SiblingDrafter, SteadyPace
from reroll_zoo.tiny_models import make_tiny

PROMPT = tuple(range(5, 35))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("moe"))


def tiny(folder: Path, **options: Any) -> str:
    shape: dict[str, Any] = {"hidden": 32, "layers": 2, "initializer_range": 0.2, "max_positions": 256} | options
    return str(make_tiny(folder, **{"family": "qwen3_moe", **shape}))


def opened(folder: str, **options: Any) -> EmbeddedEngine:
    model = load_model(folder, dtype=torch.float32, device="cpu")
    return EmbeddedEngine(model, load_tokenizer(folder), **{"max_running": 4, "notes_routes": True, **options})


class Strays(SiblingDrafter):
    """Most of whose guesses are wrong: what was read of them is forgotten."""

    def draft(self, sequence: SequenceState, *, max_tokens: int, least: float) -> DraftedTokens:
        own = super().draft(sequence, max_tokens=max_tokens, least=0.0)
        num_more = max_tokens - len(own.tokens)
        return DraftedTokens((*own.tokens, *range(5, 5 + num_more)), (*own.kinds, *((0, 0),) * num_more))


def ask(name: str, prompt: tuple[int, ...] = PROMPT, *, seed: int = 0, num: int = 12, **options: Any) -> Request:
    sampling = SamplingParams(max_tokens=num, min_tokens=num, seed=seed)
    return Request(id=name, prompt_ids=prompt, sampling=sampling, **options)


def finish(engine: EmbeddedEngine) -> dict[str, Completion]:
    done = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


def write(engine: EmbeddedEngine, *requests: Request) -> dict[str, Completion]:
    for request in requests:
        engine.submit(request)
    return finish(engine)


@torch.no_grad()
def chosen(folder: str, ids: tuple[int, ...], *, scale: float = 1.0) -> np.ndarray:
    """What Hugging Face's own forward chooses for all of these but the last, which no engine has read."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.mul_(scale)
    seen: list[Tensor] = []
    for layer in model.base_model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, inputs, output: seen.append(output[2]))
    model(torch.tensor([ids[:-1]]), use_cache=False)
    return torch.stack(seen, 1).sort(-1).values.numpy()


def told(completion: Completion) -> np.ndarray:
    assert completion.routes is not None
    return np.sort(completion.routes, -1)


def batch_of(*trajectories: Trajectory) -> Batch:
    prompt = Prompt(id="p", messages=(), domain="d")
    return pack(rows_of([Group(number=0, prompt=prompt, version=0, trajectories=trajectories)]).samples)


def trajectory(*turns: tuple[Request, Completion]) -> Trajectory:
    played = tuple(Turn(prompt_ids=request.prompt_ids, completion=completion, text="") for request, completion in turns)
    return Trajectory(id="0.0", turns=played, status=Status.COMPLETED)


def opened_on_pages(folder: str, monkeypatch: pytest.MonkeyPatch) -> EmbeddedEngine:
    pytest.importorskip("triton")
    from reroll_zoo.paged_cache.backend import PagedBackend

    monkeypatch.setattr(engine_module, "make_backend", PagedBackend)
    return opened(folder)


@pytest.mark.parametrize("where", ["slots", "a tight cache", "drafts", "pages"])
def test_every_token_that_was_read_is_told_of(folder: str, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "pages":
        engine, num = opened_on_pages(folder, monkeypatch), 4
    elif where == "drafts":
        engine, num = opened(folder, drafter=Strays(), pace=SteadyPace()), 12
    else:
        engine, num = opened(folder), 12
        if where == "a tight cache":  # Room for three of them while they are short.
            engine, num = opened(folder, cache_bytes=3 * 100 * engine.backend.bytes_per_token), 80
    requests = [ask(f"{n}", PROMPT[: 30 - n // 3], seed=n, num=num) for n in range(2 if where == "pages" else 5)]
    done = write(engine, *requests)
    assert (engine.counts.num_gave_way > 0) == (where == "a tight cache")
    assert (engine.counts.num_drafted > 0) == (where == "drafts")
    for request in requests:
        completion = done[request.id]
        assert np.array_equal(told(completion), chosen(folder, request.prompt_ids + completion.token_ids))


def test_a_later_turn_tells_what_is_new_and_the_row_has_each_token_as_it_was_first_read(folder: str) -> None:
    engine = opened(folder)
    first = ask("0")
    opening = write(engine, first)["0"]
    with torch.no_grad():
        new = {name: 1.1 * parameter for name, parameter in load_weights(folder).items()}
    engine.load_weights(new, version=1)
    context = PROMPT + opening.token_ids
    second = ask("1", (*context, 50, 51, 52), num_routed=len(context) - 1)
    answer = write(engine, second)["1"]
    assert answer.routes is not None
    assert len(answer.routes) == 1 + 3 + 12 - 1
    routes = required(batch_of(trajectory((first, opening), (second, answer))).routes).numpy()
    before, after = chosen(folder, context), chosen(folder, second.prompt_ids + answer.token_ids, scale=1.1)
    assert not np.array_equal(before, after[: len(before)])
    assert np.array_equal(np.sort(routes[: len(before)], -1), before)
    assert np.array_equal(np.sort(routes[len(before) : -1], -1), after[len(before) :])
    assert (routes[-1] == 255).all()


def load_weights(folder: str) -> dict[str, Tensor]:
    return dict(load_model(folder, dtype=torch.float32, device="cpu").named_parameters())


def test_a_turn_that_extends_no_other_begins_a_row_with_routes_of_its_own(folder: str) -> None:
    engine = opened(folder)
    first, second = ask("0"), ask("1", PROMPT[3:])
    done = write(engine, first, second)
    routes = required(batch_of(trajectory((first, done["0"]), (second, done["1"]))).routes).numpy()
    assert np.array_equal(np.sort(routes[: 30 + 11], -1), told(done["0"]))
    assert np.array_equal(np.sort(routes[30 + 12 : -1], -1), told(done["1"]))


def test_a_completion_that_another_engine_goes_on_with_is_told_of_as_a_whole(folder: str) -> None:
    whole = write(opened(folder), ask("0"))["0"]
    written = WrittenTokens(token_ids=whole.token_ids[:5], logprobs=whole.logprobs[:5], versions=((0, 5),))
    rest = write(opened(folder), ask("0", written=written))["0"]
    assert rest.token_ids == whole.token_ids
    assert np.array_equal(told(rest), told(whole))


def test_requests_that_are_put_aside_are_told_of_after_they_are_read_again(folder: str) -> None:
    engine = opened(folder)
    engine.submit(ask("0"))
    for _ in range(4):
        engine.step()
    engine.sleep()
    engine.wake()
    assert np.array_equal(told(finish(engine)["0"]), chosen(folder, PROMPT + write(opened(folder), ask("0"))["0"].token_ids))


def test_an_engine_that_was_not_asked_to_tells_nothing(folder: str) -> None:
    assert write(opened(folder, notes_routes=False), ask("0"))["0"].routes is None


def test_what_they_take_is_counted_as_cache(folder: str) -> None:
    plain, noting = (opened(folder, notes_routes=notes).backend.bytes_per_token for notes in (False, True))
    assert noting == plain + 2 * 2


def test_in_bf16_the_gap_to_the_sampler_falls_to_that_of_a_dense_model(tmp_path: Path) -> None:
    """Experts come in pairs whose scores nearly tie: which of two is taken is decided by how a pass happens to round."""
    experts = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    batch, free = drawn_in_bf16(tiny(tmp_path / "moe", hidden=64, layers=4, **experts))
    replayed = largest_gap(free, batch)
    dense_batch, dense = drawn_in_bf16(tiny(tmp_path / "dense", family="llama", hidden=64, layers=4))
    assert largest_gap(free, batch.replace(routes=None)) > 0.5
    assert replayed < 2 * largest_gap(dense, dense_batch) < 0.5
    assert 0 < predicted(free, batch)[1] < 0.2


def drawn_in_bf16(folder: str) -> tuple[Batch, PreTrainedModel]:
    """What an engine writes, and a trainer of the same weights."""
    drawing, training = (tied(load_model(folder, dtype=torch.bfloat16, device="cpu")) for _ in range(2))
    engine = EmbeddedEngine(drawing, load_tokenizer(folder), notes_routes="moe" in folder)
    requests = [ask(f"{n}", PROMPT[n // 4 :], seed=n, num=48) for n in range(16)]
    done = write(engine, *requests)
    return batch_of(*(trajectory((request, done[request.id])) for request in requests)), training


def tied(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight[1::2] = weight[::2] + 0.005 * torch.randn(weight[::2].shape, generator=generator)
    return model


@torch.no_grad()
def predicted(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, float]:
    answer = predict(model, batch, Needs(), chunk=512)
    share = 0.0 if answer.routes_differ is None else float(answer.routes_differ[batch.loss_mask].mean())
    return required(answer.logp), share


def largest_gap(model: PreTrainedModel, batch: Batch) -> float:
    return float((predicted(model, batch)[0] - batch.logp)[batch.loss_mask].abs().max())


def test_rows_of_engines_that_tell_and_of_some_that_do_not_are_packed_together(folder: str) -> None:
    request = ask("0")
    completion = write(opened(folder), request)["0"]
    silent = replace(completion, routes=None)
    assert batch_of(trajectory((request, silent))).routes is None
    both = required(batch_of(trajectory((request, completion)), trajectory((request, silent))).routes)
    assert (both[len(both) // 2 :] == 255).all()
    assert torch.equal(both[: len(PROMPT)], torch.from_numpy(completion.routes)[: len(PROMPT)])
