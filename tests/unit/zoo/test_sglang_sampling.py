import numpy as np
import pytest
import torch

from reroll.infer.embedded.sampler import RowSampling, sample
from reroll.infer.embedded.sampler import uniforms as host_uniforms
from reroll_zoo.sglang.messages import StartRequest
from reroll_zoo.sglang.sampling import RequestTable, uniforms

CPU = torch.device("cpu")
SEEDS = [0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -5, 123456789012345678901]


def start(row, *, name="a", num_context=3, held_until=0):
    return StartRequest(external_id=name, context=(5,) * num_context, max_tokens=9, row=row, held_until=held_until)


def logits(num_rows, width=97):
    return 3 * torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows))


def drawn(starts, scores, positions):
    tokens, logprobs = RequestTable(starts, device=CPU).sample(scores.clone(), torch.tensor(positions))
    return tokens.tolist(), logprobs.tolist()


def test_numbers_made_on_the_device_are_the_embedded_engines():
    words = torch.from_numpy(np.array([seed & (2**64 - 1) for seed in SEEDS], dtype=np.uint64).view(np.int64))
    for position in (0, 1, 77, 2**20):
        positions = [position] * len(SEEDS)
        assert uniforms(words, torch.tensor(positions)).tolist() == host_uniforms(SEEDS, positions).tolist()


@pytest.mark.parametrize(
    "cut", [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_p": 0.7, "top_k": 9}], ids=["plain", "cool", "greedy", "cut"]
)
def test_tokens_and_logprobs_are_the_embedded_samplers(cut):
    rows = [RowSampling(seed=seed, **cut) for seed in SEEDS]
    scores, positions = logits(len(rows)), list(range(10, 10 + len(rows)))
    tokens, logprobs = sample(scores, rows, positions)
    got_tokens, got_logprobs = drawn([start(row) for row in rows], scores, positions)
    assert got_tokens == tokens
    assert got_logprobs == pytest.approx(logprobs, abs=1e-6)


@pytest.mark.parametrize("others", [[], [{"top_k": 5}], [{"forbidden": (1,)}]], ids=["alike", "one is cut", "other ends"])
def test_tokens_are_held_back_before_a_position_and_not_from_it_on(others):
    held = [start(RowSampling(seed=seed, forbidden=tuple(range(90))), num_context=20, held_until=24) for seed in range(8)]
    rest = [start(RowSampling(seed=50, **other), num_context=20, held_until=30) for other in others]
    scores = logits(len(held) + len(rest))
    early, _ = drawn(held + rest, scores, [23] * len(scores))
    late, _ = drawn(held + rest, scores, [24] * len(scores))
    assert all(token >= 90 for token in early[:8])
    assert any(token < 90 for token in late[:8])
    assert late[:8] == sample(scores[:8], [RowSampling(seed=seed) for seed in range(8)], [24] * 8)[0]


def test_a_batch_is_of_the_very_requests_it_was_made_of():
    first, twin = start(RowSampling(seed=1)), start(RowSampling(seed=1))
    batch = RequestTable([first, twin], device=CPU)
    assert batch.is_of([first, twin])
    assert not batch.is_of([twin, first])
    assert not batch.is_of([first])
