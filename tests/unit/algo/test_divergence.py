import math

import numpy as np
import pytest
import torch
from torch import Tensor

from reroll.algo.divergence import coarse, reverse_kl
from reroll.config.divergence import DivergenceConfig
from reroll.config.formula import find_function
from reroll_zoo.algorithms.divergences import adaptive_kl, forward_kl, js, skewed_forward_kl

DIVERGENCES = {kind: find_function(DivergenceConfig.group, kind) for kind in DivergenceConfig.kinds()}

OPTIONS: dict[str, dict[str, float]] = {
    "forward_kl": {},
    "reverse_kl": {},
    "skewed_forward_kl": {"skew": 0.1},
    "skewed_reverse_kl": {"skew": 0.1},
    "adaptive_kl": {"head": 0.5},
    "js": {"beta": 0.3},
}
SHRINKS_WHEN_MERGED = [kind for kind in OPTIONS if kind != "adaptive_kl"]


def distance(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    return DIVERGENCES[kind](student, teacher, **OPTIONS[kind])


def random_logits(seed: int, *shape: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logp(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def expected(kind: str, p: np.ndarray, q: np.ndarray) -> float:
    """The definitions of the papers, for one token: p is the teacher, q the student."""

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return float((a * np.log(a / b)).sum())

    if kind == "forward_kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    if kind == "skewed_forward_kl":
        return kl(p, 0.1 * p + 0.9 * q)
    if kind == "skewed_reverse_kl":
        return kl(q, 0.9 * p + 0.1 * q)
    if kind == "js":
        middle = 0.3 * p + 0.7 * q
        return 0.3 * kl(p, middle) + 0.7 * kl(q, middle)
    head: list[int] = []
    for outcome in np.argsort(-p):
        if p[head].sum() >= 0.5:
            break
        head.append(outcome)
    gap = np.abs(p - q)
    weight = gap[head].sum() / gap.sum()
    return float(weight * kl(p, q) + (1 - weight) * kl(q, p))


def test_the_options_here_and_in_the_config_are_those_of_the_functions() -> None:
    nodes = DivergenceConfig.kinds()
    assert set(nodes) == set(DIVERGENCES) == set(OPTIONS)
    student, teacher = (random_logits(seed, 3, 5).log_softmax(-1) for seed in (0, 1))
    for kind, node in nodes.items():
        options = node(kind=kind).arguments
        assert set(options) == set(OPTIONS[kind])
        assert DIVERGENCES[kind](student, teacher, **options).shape == (3,)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_distance_is_the_one_its_paper_defines(kind: str) -> None:
    student, teacher = (random_logits(seed, 20, 11).double().log_softmax(-1) for seed in (0, 1))
    ours = distance(kind, student, teacher)
    theirs = [expected(kind, p, q) for p, q in zip(teacher.exp().numpy(), student.exp().numpy(), strict=True)]
    assert ours.tolist() == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("k", [1, 4, None])
def test_a_student_that_agrees_is_at_distance_zero_and_stays_there(kind: str, k: int | None) -> None:
    scores = random_logits(3, 6, 50, spread=5.0).requires_grad_()
    student = scores.log_softmax(-1)
    ids = None if k is None else student.detach().topk(k).indices
    result = distance(kind, coarse(student, ids), coarse(student.detach(), ids))
    result.sum().backward()
    assert scores.grad is not None
    assert result.abs().max() < 1e-6
    assert scores.grad.abs().max() < 1e-6


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_descent_on_a_distance_leads_to_the_teacher(kind: str) -> None:
    teacher = random_logits(5, 4, 8).log_softmax(-1)
    scores = random_logits(6, 4, 8).requires_grad_()
    optimizer = torch.optim.Adam([scores], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        distance(kind, scores.log_softmax(-1), teacher).sum().backward()
        optimizer.step()
    torch.testing.assert_close(scores.detach().softmax(-1), teacher.exp(), atol=1e-2, rtol=0)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_gradient_is_that_of_the_value(kind: str) -> None:
    teacher = random_logits(7, 3, 6).double().log_softmax(-1)
    scores = random_logits(8, 3, 6).double().requires_grad_()
    # The weights of adaptive_kl are held fixed, so the slope of its value is its gradient only where they are constant.
    options = {"head": 1.0} if kind == "adaptive_kl" else OPTIONS[kind]
    assert torch.autograd.gradcheck(lambda x: DIVERGENCES[kind](x.log_softmax(-1), teacher, **options), (scores,))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_outcomes_that_cannot_happen_leave_everything_finite(kind: str) -> None:
    never = -math.inf
    scores = torch.tensor([[0.0, never, 3.0, -300.0], [never, 0.0, never, 0.0], [90.0, 0.0, -90.0, never]]).requires_grad_()
    teacher = torch.tensor([[never, 0.0, 2.0, 0.0], [never, 0.0, 0.0, 0.0], [never, never, never, 0.0]]).log_softmax(-1)
    result = distance(kind, scores.log_softmax(-1), teacher)
    result.sum().backward()
    assert scores.grad is not None
    assert result.isfinite().all()
    assert scores.grad.isfinite().all()
    assert (result > 0).all()


@pytest.mark.parametrize("kind", SHRINKS_WHEN_MERGED)
@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
def test_naming_fewer_tokens_only_brings_the_two_closer(kind: str, spread: float) -> None:
    student, teacher = (random_logits(seed, 50, 40, spread=spread).double().log_softmax(-1) for seed in (10, 11))
    whole = distance(kind, student, teacher)
    last = torch.zeros(50, dtype=torch.float64)
    for k in (1, 2, 5, 20, 39):
        ids = teacher.topk(k).indices
        now = distance(kind, coarse(student, ids), coarse(teacher, ids))
        assert (now >= last - 1e-12).all()
        assert (now <= whole + 1e-12).all()
        last = now
    torch.testing.assert_close(last, whole)  # 39 named and a bucket of one: all of them.


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_naming_every_token_is_looking_at_the_whole_vocabulary(kind: str) -> None:
    teacher = random_logits(13, 9, 12).log_softmax(-1)
    ids = teacher.topk(12).indices
    gradients = []
    for named in (ids, None):
        scores = random_logits(12, 9, 12).requires_grad_()
        result = distance(kind, coarse(scores.log_softmax(-1), named), coarse(teacher, named))
        result.sum().backward()
        assert scores.grad is not None
        gradients.append((result.detach(), scores.grad))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)


def test_the_bucket_holds_what_the_named_tokens_leave() -> None:
    merged = coarse(logp(0.5, 0.2, 0.2, 0.1), torch.tensor([[1, 0]]))
    assert merged.exp().flatten().tolist() == pytest.approx([0.2, 0.5, 0.3])


def test_the_bucket_is_exact_where_the_named_tokens_are_nearly_everything() -> None:
    """One minus the named would be zero in single precision, and its logarithm -inf."""
    scores = torch.tensor([[40.0, 0.0, 0.0, 1.0]]).requires_grad_()
    merged = coarse(scores.log_softmax(-1), torch.tensor([[0]]))
    assert merged[0, 1].item() == pytest.approx(math.log(2 + math.e) - 40, abs=1e-4)
    merged[0, 1].backward()
    assert scores.grad is not None
    assert scores.grad[0].tolist() == pytest.approx([-1.0, *(np.array([1, 1, math.e]) / (2 + math.e))], abs=1e-5)


def test_a_student_that_shuns_the_bucket_is_pulled_back_into_it() -> None:
    scores = torch.tensor([[60.0, 0.0, 0.0]]).requires_grad_()
    ids = torch.tensor([[0]])
    forward_kl(coarse(scores.log_softmax(-1), ids), logp(0.9, 0.1)).sum().backward()
    assert scores.grad is not None
    assert scores.grad[0].tolist() == pytest.approx([0.1, -0.05, -0.05], abs=1e-5)


def test_the_two_kls_are_each_other_with_the_roles_swapped_and_not_the_same() -> None:
    one, two = logp(0.7, 0.2, 0.1), logp(0.1, 0.3, 0.6)
    assert forward_kl(one, two).item() == reverse_kl(two, one).item() != reverse_kl(one, two).item()


def test_a_skewed_kl_is_bounded_where_the_plain_one_is_not() -> None:
    student, teacher = logp(1.0, 0.0), logp(0.0, 1.0)
    assert skewed_forward_kl(student, teacher, skew=0.1).item() == pytest.approx(-math.log(0.1))
    assert forward_kl(student, teacher).item() > 1000


def test_jensen_shannon_lies_between_the_kls() -> None:
    student, teacher = logp(0.7, 0.2, 0.1), logp(0.1, 0.3, 0.6)
    assert js(student, teacher, beta=1e-4).item() / 1e-4 == pytest.approx(forward_kl(student, teacher).item(), rel=1e-2)
    nearly_reverse = js(student.double(), teacher.double(), beta=1 - 1e-4).item() / 1e-4
    assert nearly_reverse == pytest.approx(reverse_kl(student, teacher).item(), rel=1e-2)
    assert js(student, teacher, beta=0.5).item() == pytest.approx(js(teacher, student, beta=0.5).item())


def test_adaptive_kl_is_forward_for_a_gap_at_the_head_and_reverse_for_one_at_the_tail() -> None:
    teacher = logp(0.6, 0.2, 0.1, 0.1)
    at_tail = logp(0.6, 0.05, 0.05, 0.3)
    assert adaptive_kl(at_tail, teacher, head=0.5).item() == pytest.approx(reverse_kl(at_tail, teacher).item(), abs=1e-6)
    everywhere = logp(0.2, 0.4, 0.2, 0.2)
    mean = (forward_kl(everywhere, teacher) + reverse_kl(everywhere, teacher)).item() / 2
    assert adaptive_kl(everywhere, teacher, head=0.5).item() == pytest.approx(mean)
    assert adaptive_kl(everywhere, teacher, head=1.0).item() == pytest.approx(forward_kl(everywhere, teacher).item())


def test_the_outcome_that_takes_the_head_over_its_share_belongs_to_it() -> None:
    teacher, student = logp(0.4, 0.35, 0.25), logp(0.4, 0.25, 0.35)
    half = (forward_kl(student, teacher) + reverse_kl(student, teacher)).item() / 2
    assert adaptive_kl(student, teacher, head=0.5).item() == pytest.approx(half)
    assert adaptive_kl(student, teacher, head=0.4).item() == pytest.approx(reverse_kl(student, teacher).item())
