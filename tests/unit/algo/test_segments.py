import pytest
import torch
from episode_cases import floats, ints
from hypothesis import given
from hypothesis import strategies as st

from reroll.algo.segments import discounted_sum, normalise, segment_mean, segment_position, segment_std, segment_sum

VALUES, INDEX = floats([1.0, 2.0, 4.0, 8.0]), ints([0, 2, 0, 2])


def test_empty_segments_have_sum_mean_and_deviation_zero() -> None:
    assert segment_sum(VALUES, INDEX, 4).tolist() == [5, 0, 10, 0]
    assert segment_mean(VALUES, INDEX, 4).tolist() == [2.5, 0, 5, 0]
    assert segment_std(VALUES, INDEX, 4).tolist() == pytest.approx([4.5**0.5, 0, 18**0.5, 0])


def test_weights_move_the_mean_and_no_weight_gives_zero() -> None:
    assert segment_mean(VALUES, INDEX, 3, weight=floats([3.0, 0.0, 1.0, 0.0])).tolist() == [1.75, 0, 0]


def test_the_mean_passes_its_gradient_on_to_every_value() -> None:
    values = VALUES.clone().requires_grad_()
    segment_mean(values, INDEX, 3)[0].backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0, 0.5, 0]


@given(
    value=st.floats(-1e6, 1e6, width=32),
    size=st.integers(1, 40),
    weights=st.lists(st.floats(0.015625, 1024, width=32), min_size=40, max_size=40),
)
def test_equal_values_have_exactly_their_mean_and_no_deviation(value: float, size: int, weights: list[float]) -> None:
    values, index = torch.full((size,), value), torch.zeros(size, dtype=torch.int64)
    assert segment_mean(values, index, 1).item() == values[0].item()
    assert segment_mean(values, index, 1, weight=torch.tensor(weights[:size])).item() == values[0].item()
    assert segment_std(values, index, 1).item() == 0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e19, 2e19, 1e30, 1e38])
def test_values_of_every_scale_are_normalised_alike(scale: float) -> None:
    group = ints([0, 0, 0, 1, 1])
    values = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0])
    expected = [-1.0, 0.0, 1.0, 0.0, 0.0]
    for std in ("group", "batch", "batch_centred"):
        small = normalise(values, group, mean="group", std=std, epsilon=1e-45)
        large = normalise(values * scale, group, mean="group", std=std, epsilon=1e-45)
        torch.testing.assert_close(large, small)
        assert std != "group" or large.tolist() == pytest.approx(expected, abs=1e-6)


def test_positions_count_from_zero_in_every_segment() -> None:
    assert segment_position(ints([0, 0, 2, 2, 2, 3]), 4).tolist() == [0, 1, 0, 1, 2, 0]


def test_discounted_sums_stop_at_the_end_of_their_segment() -> None:
    sums = discounted_sum(floats([1.0, 2.0, 4.0, 8.0, 16.0]), ints([0, 0, 0, 2, 2]), 3, discount=0.5)
    assert sums.tolist() == [3, 4, 4, 16, 16]
