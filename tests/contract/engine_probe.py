"""What the engine tests share: tiny models of every family, requests, and the trainer's log-probs as oracle."""

import importlib.util
import os

import pytest
import torch

from reroll.infer.embedded.drafts import DraftedTokens
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model, load_tokenizer
from reroll.types import Request, SamplingParams
from reroll_zoo.drafts import SiblingDrafter, SteadyPace
from reroll_zoo.tiny_models import make_tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5 if DEVICE == "cpu" else 2e-5
"""Of log-probs in fp32, for each 64 that a model is wide: the wider, the longer the sums. A GPU adds in another order."""
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "smollm3", "mistral", "gemma2"]
SLOW_FAMILIES = {"qwen2": "llama with a bias", "mistral": "llama with a window, which every other layer of gemma2 has"}
"""With the embedded engine by hand, for what they have in common with others."""
NOT_IN_VLLM = {
    "smollm3": "vLLM runs it by changing the Hugging Face classes, which the trainer in the same process needs as they are",
    "gemma2": "vLLM knows it with tied embeddings only, and so tied a random one repeats a single token",
}
if DEVICE == "cpu":
    NOT_IN_VLLM["qwen3_moe"] = "only the names under which its weights reach vLLM are tested"
NOT_IN_SGLANG = {
    "qwen3_moe": "only the names under which its weights reach sglang are tested",
    "mistral": "sglang runs it without its sliding window",
    "gemma2": "sglang looks for `hidden_act`, which transformers leaves out of the config that it writes",
}


def open_embedded(folder, *, max_running=8, lora=None, dtype=torch.float32):
    return EmbeddedEngine(load(folder, lora, dtype), load_tokenizer(folder), max_running=max_running)


def open_drafting(folder, *, max_running=8, lora=None, dtype=torch.float32):
    """One whose every step checks guesses: its own where it has some, and strays."""
    model, tokenizer = load(folder, lora, dtype), load_tokenizer(folder)
    return EmbeddedEngine(model, tokenizer, max_running=max_running, drafter=Stray(), pace=SteadyPace())


class Stray(SiblingDrafter):
    def draft(self, sequence, *, max_tokens, least):
        own = super().draft(sequence, max_tokens=max_tokens, least=0.0)
        stray = tuple(5 + (sequence.length * 7 + place) % 90 for place in range(max_tokens - len(own.tokens)))
        return DraftedTokens((*own.tokens, *stray), (*own.kinds, *((0, 0),) * len(stray)))


def open_vllm(folder, **options):
    from vllm_probe import open_engine  # Imports vllm.

    return open_engine(folder, **options)


def open_sglang(folder, **options):
    from sglang_probe import open_engine  # Starts a process.

    return open_engine(folder, **options)


ENGINES = {
    "embedded": open_embedded,
    "drafting": open_drafting,
    "vllm": open_vllm,
    "vllm-ahead": open_vllm,
    "sglang": open_sglang,
}


def engines_and_families():
    """Every engine with every family; what cannot run here is skipped by name, with the reason."""
    for family in FAMILIES:
        marks = [pytest.mark.slow] if family in SLOW_FAMILIES else []
        yield pytest.param(("embedded", family), id=f"embedded-{family}", marks=marks)
    yield pytest.param(("drafting", "llama"), id="drafting-llama")
    yield pytest.param(("drafting", "gemma2"), id="drafting-gemma2", marks=pytest.mark.slow)
    yield from _sglang_and_families()
    if importlib.util.find_spec("vllm") is None:
        yield pytest.param(("vllm", "llama"), id="vllm", marks=pytest.mark.skip(reason="vllm is not installed: make test-vllm"))
        return
    for family in FAMILIES:
        marks = [pytest.mark.skip(reason=NOT_IN_VLLM[family])] if family in NOT_IN_VLLM else []
        yield pytest.param(("vllm", family), id=f"vllm-{family}", marks=marks)
    if DEVICE == "cpu":  # On a GPU it does so anyway.
        yield pytest.param(("vllm-ahead", "llama"), id="vllm-ahead-llama")


def _sglang_and_families():
    if "REROLL_SGLANG_PYTHON" not in os.environ:
        reason = "REROLL_SGLANG_PYTHON names no interpreter that has sglang: make test-sglang"
        yield pytest.param(("sglang", "llama"), id="sglang", marks=pytest.mark.skip(reason=reason))
        return
    for family in FAMILIES:
        marks = [pytest.mark.skip(reason=NOT_IN_SGLANG[family])] if family in NOT_IN_SGLANG else []
        yield pytest.param(("sglang", family), id=f"sglang-{family}", marks=marks)


def tiny_folder(folder, family, *, hidden=64):
    """A model whose windows, where its family has them, are shorter than the contexts of the tests."""
    options = {"sliding_window": 16} if family in ("mistral", "gemma2") else {}
    if family == "gemma2":  # Tied, its scaled embeddings make it repeat the last token with near certainty.
        options["tie_embeddings"] = False
    return str(make_tiny(folder, family=family, hidden=hidden, max_positions=128, initializer_range=0.2, **options))


def load(folder, lora=None, dtype=torch.float32):
    return load_model(folder, dtype=dtype, device=DEVICE, lora=lora)


def num_reusable(engine, num_common):
    """Of so many tokens that another request has read."""
    return num_common // engine.block_tokens * engine.block_tokens


def ask(name, prompt, *, max_tokens=12, min_tokens=0, **sampling):
    return Request(
        id=name, prompt_ids=tuple(prompt), sampling=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, **sampling)
    )


def finish(engine, requests=(), *, max_steps=500):
    for request in requests:
        engine.submit(request)
    done = {}
    for _ in range(max_steps):
        for finished in engine.step():
            assert finished.request_id not in done
            done[finished.request_id] = finished.completion
        if not engine.num_unfinished:
            return done
    raise AssertionError("the engine did not finish")


def trainer_logits(model, ids):
    """What training computes for one sequence, [L, vocab]."""
    ids = torch.tensor(ids, device=DEVICE)
    bounds = torch.tensor([0, len(ids)], device=DEVICE)
    with torch.no_grad():
        hidden = hidden_states(model, ids, torch.arange(len(ids), device=DEVICE), PackedAttention(bounds))
        return logits(model, hidden).float().cpu()


def trainer_logprobs(model, request, completion):
    """The log-probs that training computes for the same tokens."""
    ids = [*request.prompt_ids, *completion.token_ids]
    scores = trainer_logits(model, ids) / (request.sampling.temperature or 1.0)
    logp = torch.log_softmax(scores[:-1], -1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    return logp[len(request.prompt_ids) - 1 :]


def assert_logprobs_are_the_trainers(model, requests, done):
    for request in requests:
        completion = done[request.id]
        assert len(completion.logprobs) == len(completion.token_ids) > 0
        want = trainer_logprobs(model, request, completion)
        tolerance = TOLERANCE * model.config.hidden_size / 64
        torch.testing.assert_close(torch.tensor(completion.logprobs), want, atol=tolerance, rtol=0)


def perturbed(model, scale=1.2):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model
