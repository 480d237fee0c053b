"""What a model says about a batch, against plain transformers and NumPy."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from reroll.models.load import load_model
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Divergence, Needs, Predictions, required
from reroll.training.loss import PolicyLoss
from reroll.training.predict import predict
from reroll.types import Sample
from reroll_zoo.tiny_models import make_tiny

FAMILIES = ["llama", "gemma2"]  # The second caps its logits.
LENGTHS = (9, 4, 14)


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one family."""
    root = tmp_path_factory.mktemp("tiny")
    capped = {"final_logit_softcapping": 5.0} if request.param == "gemma2" else {}
    return [make_tiny(root / str(seed), family=request.param, seed=seed, initializer_range=0.2, **capped) for seed in (1, 2)]


@pytest.fixture
def models(folders: list[Path]) -> list[PreTrainedModel]:
    return [load_model(str(folder), dtype=torch.float32, device="cpu") for folder in folders]


def make_batch(*, temperature: float = 1.0) -> Batch:
    rng = np.random.default_rng(0)
    samples = []
    for length in LENGTHS:
        mask = (rng.random(length) < 0.7) & (np.arange(length) > 0)
        ids, logp = rng.integers(4, 90, size=length), np.zeros(length, dtype=np.float32)
        samples.append(Sample(ids=ids, loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
    return pack(samples, temperature=temperature)


def plain_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """[P, V] of the tokens in the loss: plain transformers, one sequence at a time."""
    rows = [model(ids[None]).logits[0].roll(1, 0) for ids in batch.ids.split(batch.lengths)]
    return torch.cat(rows)[batch.loss_mask]


def plain_logp(folder: Path, batch: Batch, *, temperature: float) -> np.ndarray:
    """[P, V] in NumPy, double precision."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        scores = plain_logits(model, batch).double().numpy() / temperature
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


def on_mask(batch: Batch, value: Tensor | None) -> np.ndarray:
    """[P, …]: the entries of the tokens in the loss; all others must be zero."""
    whole = required(value)
    assert not whole[~batch.loss_mask].any()
    return whole[batch.loss_mask].detach().double().numpy()


def ask(model: PreTrainedModel, batch: Batch, **needs: object) -> Predictions:
    with torch.no_grad():
        return predict(model, batch, Needs(**needs), chunk=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_everything_at_once_is_what_numpy_says(models: list[PreTrainedModel], folders: list[Path], temperature: float) -> None:
    batch = make_batch(temperature=temperature)
    logp = plain_logp(folders[0], batch, temperature=temperature)
    targets = batch.ids[batch.loss_mask].numpy()
    said = ask(models[0], batch, entropy=True, score_norm=True, top_k=5)
    rows = np.arange(len(targets))
    np.testing.assert_allclose(on_mask(batch, said.logp), logp[rows, targets], atol=1e-4)
    np.testing.assert_allclose(on_mask(batch, said.entropy), -(np.exp(logp) * logp).sum(1), atol=1e-4)
    onehot = np.eye(logp.shape[1])[targets]
    np.testing.assert_allclose(on_mask(batch, said.score_norm), ((onehot - np.exp(logp)) ** 2).sum(1), atol=1e-4)
    best = np.argsort(-logp, 1)[:, :5]
    assert (on_mask(batch, said.top_ids) == best).all()
    named = np.take_along_axis(logp, best, 1)
    expected = np.concatenate([named, np.log1p(-np.exp(named).sum(1, keepdims=True))], 1)
    np.testing.assert_allclose(on_mask(batch, said.top_logp), expected, atol=1e-4)
    assert said.divergence is said.value is said.score is None


def test_as_many_likeliest_tokens_as_there_are_come_in_the_order_of_their_ids(
    models: list[PreTrainedModel], folders: list[Path]
) -> None:
    batch = make_batch()
    said = ask(models[0], batch, top_k=1 << 30, logp=False)
    assert said.top_ids is said.logp is None
    np.testing.assert_allclose(on_mask(batch, said.top_logp), plain_logp(folders[0], batch, temperature=1.0), atol=1e-4)


def test_a_temperature_of_its_own_leaves_the_log_probs_at_the_batch_s(
    models: list[PreTrainedModel], folders: list[Path]
) -> None:
    batch = make_batch()
    soft = plain_logp(folders[0], batch, temperature=3.0)
    said = ask(models[0], batch, entropy=True, temperature=3.0)
    np.testing.assert_allclose(on_mask(batch, said.entropy), -(np.exp(soft) * soft).sum(1), atol=1e-4)
    assert torch.equal(required(said.logp), required(ask(models[0], batch).logp))


def test_a_smaller_vocabulary_leaves_out_the_other_ids(models: list[PreTrainedModel], folders: list[Path]) -> None:
    batch = make_batch()
    scores = plain_logp(folders[0], batch, temperature=1.0)[:, :30]
    expected = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    np.testing.assert_allclose(on_mask(batch, ask(models[0], batch, top_k=99, vocabulary=30).top_logp), expected, atol=1e-4)
    assert on_mask(batch, ask(models[0], batch, top_k=29, vocabulary=30).top_ids).max() < 30


@pytest.mark.parametrize("top_k", [1, 7, 1 << 30])
def test_a_divergence_and_its_gradient_are_those_of_all_logits_at_once(
    models: list[PreTrainedModel], folders: list[Path], top_k: int
) -> None:
    student, teacher = models
    batch = taught(make_batch(temperature=0.8), teacher, top_k=top_k)
    gradients = []
    for compute in (_chunked, _dense):
        student.zero_grad()
        plain = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
        model = student if compute is _chunked else plain
        result = compute(model, batch)
        result.square().sum().backward()
        gradients.append((result.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(gradients[0][0], gradients[1][0], atol=1e-5, rtol=1e-4)
    for name, expected in gradients[1][1].items():
        torch.testing.assert_close(gradients[0][1][name], expected, atol=1e-4, rtol=1e-3, msg=name)


def taught(batch: Batch, teacher: PreTrainedModel, *, top_k: int) -> Batch:
    said = ask(teacher, batch, logp=False, top_k=top_k)
    return batch.replace(target_ids=said.top_ids, target_logp=said.top_logp)


def _chunked(model: PreTrainedModel, batch: Batch) -> Tensor:
    needs = Needs(logp=False, divergence=Divergence(kind="forward_kl"))
    return required(predict(model, batch, needs, chunk=4).divergence)[batch.loss_mask]


def _dense(model: PreTrainedModel, batch: Batch) -> Tensor:
    """KL(teacher || student) over the named tokens and the rest, from probabilities."""
    p = (plain_logits(model, batch) / batch.temperature).softmax(-1)
    teacher = required(batch.target_logp)[batch.loss_mask].exp()
    if batch.target_ids is not None:
        named = p.gather(1, batch.target_ids[batch.loss_mask])
        p = torch.cat([named, 1 - named.sum(1, keepdim=True)], 1)
    return (teacher * (teacher / p).log()).sum(1)


def test_a_full_kl_penalty_is_the_exact_kl_over_the_vocabulary(models: list[PreTrainedModel], folders: list[Path]) -> None:
    policy, reference = models
    batch = taught(make_batch(temperature=0.7), reference, top_k=1 << 30).replace(advantage=torch.zeros(sum(LENGTHS)))
    loss = PolicyLoss(kind="reinforce", kl_coef=0.5, kl_estimator="full")
    result = loss(batch, predict(policy, batch, loss.needs, chunk=4))
    p, q = (plain_logp(folder, batch, temperature=0.7) for folder in folders)
    exact = (np.exp(p) * (p - q)).sum(1).mean()
    assert result.loss.item() == pytest.approx(0.5 * exact, rel=1e-4)
    assert result.stats["kl_ref"].value == pytest.approx(exact, rel=1e-4)

    result.loss.backward()
    plain = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    logp = (plain_logits(plain, batch) / 0.7).log_softmax(-1)
    (0.5 * (logp.exp() * (logp - torch.from_numpy(q))).sum(1).mean()).float().backward()
    ours = dict(policy.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_a_micro_batch_without_loss_tokens_has_answers_of_the_same_shape(models: list[PreTrainedModel]) -> None:
    batch = make_batch()
    said = ask(models[0], replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), entropy=True, top_k=3)
    assert required(said.entropy).shape == (sum(LENGTHS),)
    assert required(said.top_ids).shape == (sum(LENGTHS), 3)
    assert required(said.top_logp).shape == (sum(LENGTHS), 4)


def test_one_product_with_the_head_serves_every_question(
    models: list[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, calls = make_batch(), []
    head: Callable[..., Tensor] = models[0].get_output_embeddings().forward

    def counted(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return head(rows)

    monkeypatch.setattr(models[0].get_output_embeddings(), "forward", counted)
    ask(models[0], batch, logp=False, entropy=True, score_norm=True, top_k=3)
    assert sum(calls) == batch.num_loss_tokens
