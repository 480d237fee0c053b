"""Rows that were drawn at different temperatures lie in one batch, each judged at its own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from reroll.models.load import load_model
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Needs, required
from reroll.training.predict import predict
from reroll.types import Sample
from reroll_zoo.tiny_models import make_tiny

TEMPERATURES = (0.6, 1.0, 1.4)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    capped = {"final_logit_softcapping": 5.0} if request.param == "gemma2" else {}
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", family=request.param, initializer_range=0.2, **capped)


def make_batch() -> Batch:
    rng = np.random.default_rng(0)
    samples = []
    for length in (9, 4, 14):
        mask = np.arange(length) > 1
        ids, logp = rng.integers(4, 90, size=length), np.zeros(length, dtype=np.float32)
        samples.append(Sample(ids=ids, loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
    return pack(samples)


def mixed(batch: Batch) -> Batch:
    return batch.replace(temperature=torch.tensor(TEMPERATURES)[batch.sequence_index])


def answers(folder: Path, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies, and the gradient of a sum over both."""
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    said = predict(model, batch, Needs(entropy=True), chunk=4)
    logp, entropy = required(said.logp), required(said.entropy)
    (logp.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return logp.detach(), entropy.detach(), gradient


def test_a_batch_of_several_temperatures_is_as_good_as_one_batch_for_each(folder: Path) -> None:
    batch = make_batch()
    logp, entropy, gradient = answers(folder, mixed(batch))
    alone = [answers(folder, batch.select([index]).replace(temperature=value)) for index, value in enumerate(TEMPERATURES)]
    torch.testing.assert_close(logp, torch.cat([one[0] for one in alone]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.cat([one[1] for one in alone]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, sum((one[2] for one in alone), torch.zeros(())), atol=1e-4, rtol=1e-4)


def test_equal_temperatures_by_token_are_the_same_as_one_for_all(folder: Path) -> None:
    batch = make_batch()
    by_token = batch.replace(temperature=torch.full((batch.num_tokens,), 0.6))
    for mine, theirs in zip(answers(folder, by_token), answers(folder, batch.replace(temperature=0.6)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_temperatures_travel_with_their_rows() -> None:
    batch = mixed(make_batch())
    picked = batch.select([2, 0])
    assert isinstance(picked.temperature, Tensor)
    assert picked.temperature.tolist() == pytest.approx([1.4] * 14 + [0.6] * 9)
    assert isinstance(batch.select([1]).to("cpu").temperature, Tensor)
