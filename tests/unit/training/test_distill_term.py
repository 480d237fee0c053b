"""A teacher's distribution as a term of the policy loss, held against plain torch on the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from reroll.models.load import load_model
from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import micro_batches
from reroll.tokens.samples import sft_sample
from reroll.training.base import Divergence, Needs, required
from reroll.training.loss import PolicyLoss
from reroll.training.predict import predict
from reroll_zoo.tiny_models import make_tiny

ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15], [20, 21, 22, 23, 24, 25, 26, 27, 28]]
PROMPT = 2
TEMPERATURE = 0.7
WEIGHTS = (0.5, 0.0, 2.0)
"""How much each row is taught: the second has no teacher."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Student and teacher as reroll runs them, and as plain transformers does, in double precision."""
    folder = tmp_path_factory.mktemp("models")
    paths = [make_tiny(folder / str(seed), seed=seed, initializer_range=0.3) for seed in (1, 2)]
    ours = [load_model(str(path), dtype=torch.float32, device="cpu") for path in paths]
    return (*ours, *(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in paths))


def make_batch(teacher: Any, *, top_k: int) -> Batch:
    batch = pack([sft_sample(row, [place >= PROMPT for place in range(len(row))]) for row in ROWS], temperature=TEMPERATURE)
    with torch.no_grad():
        said = predict(teacher, batch, Needs(logp=False, top_k=top_k), chunk=4)
    weight = torch.tensor(WEIGHTS)[batch.sequence_index] * batch.loss_mask
    advantage = torch.zeros_like(batch.advantage)
    return batch.replace(advantage=advantage, target_ids=said.top_ids, target_logp=said.top_logp, target_weight=weight)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def distance(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    """Of probabilities, in double precision, from the definitions."""
    if kind == "forward_kl":
        return kl(teacher, student)
    if kind == "reverse_kl":
        return kl(student, teacher)
    middle = 0.3 * teacher + 0.7 * student
    return 0.3 * kl(teacher, middle) + 0.7 * kl(student, middle)


def merged(p: Tensor, named: Tensor) -> Tensor:
    """The probabilities of the named tokens, and of all others together."""
    named_p = p.gather(-1, named)
    return torch.cat([named_p, 1 - named_p.sum(-1, keepdim=True)], -1)


def reference_gradient(student: Any, teacher: Any, kind: str, *, top_k: int | None) -> tuple[float, dict[str, Tensor]]:
    """The weighted mean over all tokens, by the models' own forward pass, one row at a time, unpacked."""
    student.zero_grad()
    num_tokens, total = sum(len(row) - PROMPT for row in ROWS), torch.zeros((), dtype=torch.float64)
    for row, weight in zip(ROWS, WEIGHTS, strict=True):
        ids = torch.tensor([row])
        ours = (student(ids).logits[0, PROMPT - 1 : -1].double() / TEMPERATURE).softmax(-1)
        with torch.no_grad():
            theirs = (teacher(ids).logits[0, PROMPT - 1 : -1].double() / TEMPERATURE).softmax(-1)
        if top_k is not None:
            named = theirs.topk(top_k).indices
            ours, theirs = merged(ours, named), merged(theirs, named)
        total = total + weight * distance(kind, ours, theirs).sum() / num_tokens
    total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach()), {name: required(parameter.grad).clone() for name, parameter in student.named_parameters()}


OPTIONS: dict[str, dict[str, float]] = {"forward_kl": {}, "reverse_kl": {}, "js": {"beta": 0.3}}


@pytest.mark.parametrize("max_tokens", [1, 1000])
@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("kind", OPTIONS)
def test_its_weight_gradient_is_that_of_the_definition(models: Any, kind: str, top_k: int | None, max_tokens: int) -> None:
    student, teacher, plain_student, plain_teacher = models
    value, expected = reference_gradient(plain_student, plain_teacher, kind, top_k=top_k)
    loss = PolicyLoss(kind="reinforce", distill=Divergence(kind=kind, options=OPTIONS[kind]))
    student.zero_grad()
    total = 0.0
    for part in micro_batches(make_batch(teacher, top_k=top_k or 1 << 30), max_tokens=max_tokens):
        output = loss(part, predict(student, part, loss.needs, chunk=4))
        output.loss.backward()  # type: ignore[no-untyped-call]
        total += output.loss.item()
    assert total == pytest.approx(value, rel=1e-4)
    assert value > 0.01
    for name, parameter in student.named_parameters():
        # Single precision, transformers' own as well as ours, is up to 1.4e-5 of the largest entry away from the double one.
        off = (required(parameter.grad).double() - expected[name]).abs().max()
        assert off <= 5e-5 * expected[name].abs().max(), name


def test_only_taught_tokens_count_in_the_reported_divergence(models: Any) -> None:
    student, teacher, *_ = models
    batch = make_batch(teacher, top_k=1 << 30)
    loss = PolicyLoss(kind="reinforce", distill=Divergence(kind="reverse_kl"))
    said = predict(student, batch, loss.needs, chunk=4)
    taught = batch.loss_mask & (batch.sequence_index != 1)
    assert loss(batch, said).stats["teacher_divergence"].value == pytest.approx(float(required(said.divergence)[taught].mean()))


def test_without_it_no_distribution_is_asked_for() -> None:
    assert PolicyLoss(kind="reinforce").needs.divergence is None
