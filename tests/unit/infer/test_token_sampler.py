import numpy as np
import pytest
import torch

from reroll.infer.embedded.sampler import RowSampling, sample, uniforms
from reroll_zoo.paged_cache.plain_sampling import is_plain, sample_plain_on_device


def rows(count, **options):
    return [RowSampling(seed=seed, **options) for seed in range(count)]


def frequencies(logits, count=40_000, **options):
    tokens, _ = sample(logits.expand(count, -1), rows(count, **options), [5] * count)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / count


def assert_same_distribution(got, want, count=40_000):
    """Five standard errors (and five draws, for the rare), and nothing where nothing may be."""
    assert (got[want == 0] == 0).all()
    assert ((got - want).abs() <= 5 * (want * (1 - want) / count).sqrt() + 5 / count).all()


def test_uniforms_look_uniform_and_independent_over_seeds_and_positions():
    grid = np.array([uniforms([seed] * 200, range(200)) for seed in range(200)])
    assert grid.min() >= 0
    assert grid.max() < 1
    assert abs(grid.mean() - 0.5) < 5 * np.sqrt(1 / 12 / grid.size)
    for a, b in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)
    counts = np.histogram(grid, bins=20, range=(0, 1))[0]
    assert ((counts - grid.size / 20) ** 2 / (grid.size / 20)).sum() < 50


def test_uniforms_depend_on_seed_and_position_alone():
    assert uniforms([3, -1, 2**70], [7, 8, 9])[0] == uniforms([3], [7])[0]
    assert uniforms([3], [7])[0] != uniforms([7], [3])[0]


@pytest.mark.parametrize("vocab", [7, 256, 1000])
def test_tokens_are_drawn_from_the_softmax(vocab):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)) * 2
    assert_same_distribution(frequencies(logits), torch.softmax(logits[0], -1))


def test_temperature_sharpens_the_distribution():
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    assert_same_distribution(frequencies(logits, temperature=0.5), torch.softmax(logits[0] / 0.5, -1))


def test_top_k_keeps_the_k_likeliest():
    probs = torch.tensor([0.05, 0.4, 0.2, 0.3, 0.05])
    want = torch.tensor([0.0, 0.4, 0.0, 0.3, 0.0]) / 0.7
    assert_same_distribution(frequencies(probs.log()[None], top_k=2), want)


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, [1]), (0.4, [1]), (0.45, [1, 3]), (0.8, [1, 3, 2]), (1e-9, [1])])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    probs = torch.tensor([0.05, 0.4, 0.2, 0.3, 0.05])
    want = torch.zeros(5)
    want[kept] = probs[kept] / probs[kept].sum()
    assert_same_distribution(frequencies(probs.log()[None], top_p=top_p), want)


def test_top_p_applies_to_what_top_k_left():
    probs = torch.tensor([0.05, 0.4, 0.2, 0.3, 0.05])
    # Of 0.4 and 0.3 renormalized, the first alone is 0.57.
    assert_same_distribution(frequencies(probs.log()[None], top_k=2, top_p=0.5), torch.tensor([0.0, 1, 0, 0, 0]))


def test_top_p_over_a_flat_vocabulary_looks_beyond_its_first_guess():
    logits = torch.zeros(1, 3000)
    tokens, _ = sample(logits.expand(4000, -1), rows(4000, top_p=0.9), [5] * 4000)
    assert 1900 < len(set(tokens)) <= 2701  # 2,085 distinct ones expected of 4,000 draws; the first guess holds 512.


def test_rows_with_different_settings_do_not_disturb_each_other():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(2))
    mixed = [
        RowSampling(seed=1),
        RowSampling(seed=2, top_p=0.5),
        RowSampling(seed=3, temperature=0.0),
        RowSampling(seed=4, top_k=3, temperature=0.8),
    ]
    positions = [0, 3, 9, 2]
    tokens, logprobs = sample(logits, mixed, positions)
    for i, row in enumerate(mixed):
        alone, alone_logprob = sample(logits[i : i + 1], [row], positions[i : i + 1])
        assert tokens[i] == alone[0]
        assert logprobs[i] == pytest.approx(alone_logprob[0], abs=1e-6)


def test_logprobs_are_of_the_whole_softmax_at_the_temperature():
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3)) * 4
    settings = [
        RowSampling(seed=1, temperature=0.6, top_k=5),
        RowSampling(seed=2, temperature=0.0),
        RowSampling(seed=3),
    ]
    tokens, logprobs = sample(logits, settings, [0, 0, 0])
    for i, temperature in enumerate((0.6, 1.0, 1.0)):
        want = torch.log_softmax(logits[i] / temperature, -1)[tokens[i]]
        assert logprobs[i] == pytest.approx(want.item(), abs=1e-6)


def test_forbidden_tokens_are_never_drawn_and_keep_their_share_of_the_logprob():
    probs = torch.tensor([0.7, 0.1, 0.1, 0.1])
    want = torch.tensor([0.0, 1, 1, 1]) / 3
    assert_same_distribution(frequencies(probs.log()[None], forbidden=(0,)), want)
    _, logprobs = sample(probs.log()[None], [RowSampling(seed=0, forbidden=(0,))], [0])
    assert logprobs[0] == pytest.approx(np.log(0.1), abs=1e-6)
    tokens, _ = sample(probs.log()[None], [RowSampling(seed=0, temperature=0.0, forbidden=(0,))], [0])
    assert tokens[0] != 0


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1, 600), float("-inf"))
    logits[0, [3, 299, 599]] = 0.0
    tokens, _ = sample(logits.expand(5000, -1), rows(5000), [5] * 5000)
    assert set(tokens) == {3, 299, 599}


def test_plain_rows_are_drawn_on_the_device_as_anywhere():
    logits = torch.randn(60, 700, generator=torch.Generator().manual_seed(4)) * 3
    end_ids, positions = (3, 650), list(range(60))
    plain = [
        RowSampling(seed=i, temperature=(1.0, 0.7, 0.0)[i % 3], forbidden=end_ids if i % 4 == 0 else ()) for i in range(60)
    ]
    assert all(is_plain(row, end_ids) for row in plain)
    logits[:, 3] += 9  # Often the likeliest.
    drawn = sample_plain_on_device(
        logits,
        temperatures=torch.tensor([row.temperature for row in plain], dtype=torch.float64),
        uniform=torch.from_numpy(uniforms(range(60), positions)),
        may_end=torch.tensor([not row.forbidden for row in plain], dtype=torch.float64),
        end_ids=torch.tensor(end_ids),
    )
    tokens, logprobs = sample(logits, plain, positions)
    assert drawn[0].tolist() == tokens
    assert 3 in tokens
    torch.testing.assert_close(drawn[1].float(), torch.tensor(logprobs), atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 5}, {"forbidden": (1,)}])
def test_what_is_not_plain_is_told(options):
    assert not is_plain(RowSampling(seed=0, **options), (3, 650))
