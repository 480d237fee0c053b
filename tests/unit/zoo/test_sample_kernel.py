"""The drawing kernel against the sampler it stands for: on a GPU, or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from reroll.infer.embedded import sampler
from reroll_zoo.paged_cache import sample_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
END_IDS = (3, 5500)


def inputs(num_rows, vocabulary, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": (torch.randn(num_rows, vocabulary, generator=generator) * 3).to(DEVICE),
        "temperatures": torch.tensor([(1.0, 0.0, 0.6)[row % 3] for row in range(num_rows)], dtype=torch.float64, device=DEVICE),
        "uniform": torch.rand(num_rows, generator=generator, dtype=torch.float64).to(DEVICE),
        "may_end": torch.tensor([float(row % 2) for row in range(num_rows)], dtype=torch.float64, device=DEVICE),
        "end_ids": torch.tensor([end for end in END_IDS if end < vocabulary], device=DEVICE),
    }


def sampled(given):
    return sample_kernel.sample_plain_on_device(given.pop("logits"), **given)


@pytest.mark.parametrize("vocabulary", [7, 4096, 13_000])
def test_the_kernel_draws_what_the_sampler_draws(vocabulary):
    given = inputs(12, vocabulary)

    rows = [
        sampler.RowSampling(
            seed=0, temperature=float(temperature), forbidden=() if may_end else tuple(given["end_ids"].tolist())
        )
        for temperature, may_end in zip(given["temperatures"], given["may_end"], strict=True)
    ]
    probs = sampler._probabilities(given["logits"].cpu(), [row.temperature or 1.0 for row in rows])
    weights = sampler._without_forbidden(probs, [row.forbidden for row in rows])
    tokens = sampler.invert(weights, given["uniform"].cpu())
    want = torch.where(given["temperatures"].cpu() > 0, tokens, weights.argmax(-1))
    got, logprobs = sampled(given).cpu()
    assert got.long().tolist() == want.tolist()
    torch.testing.assert_close(logprobs.float(), probs.gather(1, want[:, None])[:, 0].log(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_line_are_tokens_that_may_be_drawn(uniform):
    given = inputs(2, 13_000)
    given["temperatures"][:] = 1.0
    given["uniform"][:] = uniform
    given["may_end"][:] = 0.0
    given["logits"][:] = -1e4  # Without weight, but for these three, of which the ends must not be drawn.
    given["logits"][:, [3, 5555, 5500]] = torch.tensor([9.0, 1.0, 9.0], device=DEVICE)
    assert sampled(given)[0].tolist() == [5555.0, 5555.0]


def test_frequencies_are_those_of_the_softmax():
    count, logits = 60, torch.tensor([0.5, 0.2, 0.05, 0.25]).log()
    given = inputs(count, 4)
    given["end_ids"] = given["end_ids"][:0]
    given["logits"] = logits.expand(count, 4).contiguous().to(DEVICE)
    given["temperatures"][:] = 1.0
    given["uniform"] = torch.arange(count, dtype=torch.float64, device=DEVICE) / count + 0.5 / count
    seen = sampled(given)[0].long().bincount(minlength=4).cpu()
    assert (seen - logits.exp() * count).abs().max() <= 1
