import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from reroll.config.parts import OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import micro_batches
from reroll.training.base import Divergence, Needs, Predictions, required
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Sample
from reroll_zoo.offline.distill import DistillLoss
from reroll_zoo.tiny_models import make_tiny

LENGTHS = (5, 21, 9, 13, 4, 17)
FORWARD = Divergence(kind="forward_kl")


def make_batch() -> Batch:
    rng = np.random.default_rng(0)
    samples = []
    for length in LENGTHS:
        mask = np.arange(length) >= 2
        ids, logp = rng.integers(4, 90, size=length), np.zeros(length, dtype=np.float32)
        samples.append(Sample(ids=ids, loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
    return pack(samples)


def strategy(folder: Path, seed: int) -> TorchStrategy:
    path = str(make_tiny(folder / str(seed), seed=seed, initializer_range=0.2))
    model = load_model(path, dtype=torch.float32, device="cpu")
    return TorchStrategy(model, load_tokenizer(path), TorchStrategyConfig(logprob_chunk=6), OptimConfig(), total_steps=10)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> TorchStrategy:
    return strategy(tmp_path_factory.mktemp("student"), 1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> TorchStrategy:
    return strategy(tmp_path_factory.mktemp("teacher"), 2)


def taught(teacher: TorchStrategy, *, temperature: float = 1.0, top_k: int = 8) -> Batch:
    said = teacher.forward(make_batch(), Needs(logp=False, top_k=top_k, temperature=temperature))
    return make_batch().replace(target_ids=said.top_ids, target_logp=said.top_logp)


def gradient(student: TorchStrategy, parts: list[Batch], loss: DistillLoss) -> tuple[dict[str, Tensor], float]:
    model = student._model
    model.zero_grad()
    total = sum(float(student.forward_backward(part, loss)["loss"].value) for part in parts)
    return {name: required(parameter.grad).clone() for name, parameter in model.named_parameters()}, total


def test_it_is_the_weighted_sum_of_its_parts() -> None:
    batch = make_batch()
    divergence = torch.where(batch.loss_mask, 0.25, 0.0)
    logp = torch.where(batch.loss_mask, -2.0, 0.0)
    loss = DistillLoss(divergence=FORWARD, temperature=3.0, sft_weight=0.1)
    output = loss(batch, Predictions(divergence=divergence, logp=logp))
    assert output.loss.item() == pytest.approx(0.9 * 9 * 0.25 + 0.1 * 2.0)
    assert output.stats.values_by_name() == pytest.approx({"divergence": 0.25, "cross_entropy": 2.0, "loss": 2.225})


def test_without_imitation_no_log_probs_are_asked_for() -> None:
    assert not DistillLoss(divergence=FORWARD).needs.logp
    assert DistillLoss(divergence=FORWARD, sft_weight=0.5).needs.logp


def test_it_travels() -> None:
    loss = DistillLoss(divergence=Divergence(kind="js", options={"beta": 0.3}), temperature=2.0, sft_weight=0.5)
    assert pickle.loads(pickle.dumps(loss)) == loss


@pytest.mark.parametrize("max_tokens", [1, 25, 1000])
def test_micro_batches_add_up_to_the_batch(student: TorchStrategy, teacher: TorchStrategy, max_tokens: int) -> None:
    batch = taught(teacher, temperature=2.0)
    loss = DistillLoss(divergence=FORWARD, temperature=2.0, sft_weight=0.3)
    whole, value = gradient(student, [batch], loss)
    parts, sum_of_parts = gradient(student, micro_batches(batch, max_tokens=max_tokens), loss)
    assert sum_of_parts == pytest.approx(value, rel=1e-5)
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, atol=1e-6, rtol=1e-4, msg=name)


def test_softening_leaves_the_cross_entropy_at_temperature_one(student: TorchStrategy, teacher: TorchStrategy) -> None:
    plain = -required(student.forward(make_batch(), Needs()).logp).sum() / make_batch().num_loss_tokens
    loss = DistillLoss(divergence=FORWARD, temperature=4.0, sft_weight=0.5)
    stats = student.forward_backward(taught(teacher, temperature=4.0), loss)
    assert stats["cross_entropy"].value == pytest.approx(float(plain), rel=1e-5)


def test_the_square_of_the_temperature_keeps_the_size_of_the_gradient(student: TorchStrategy, teacher: TorchStrategy) -> None:
    """At high temperatures the loss tends to half the variance of the difference in logits: it no longer depends on it."""
    norms = []
    for temperature in (20.0, 40.0):
        loss = DistillLoss(divergence=FORWARD, temperature=temperature)
        found, _ = gradient(student, [taught(teacher, temperature=temperature, top_k=1 << 30)], loss)
        norms.append(float(torch.stack([value.norm() for value in found.values()]).norm()))
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


@pytest.mark.parametrize("top_k", [1, 8, 1 << 30])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(student: TorchStrategy, top_k: int) -> None:
    found, value = gradient(
        student, [taught(student, top_k=top_k, temperature=2.0)], DistillLoss(divergence=FORWARD, temperature=2.0)
    )
    assert value == pytest.approx(0.0, abs=1e-6)
    assert max(float(one.abs().max()) for one in found.values()) < 1e-6
