"""The kernels of training against PyTorch's own operations: on a GPU, or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from reroll_zoo.fused_kernels import GatedSilu, RmsNorm, Rotation, Spread, add_, chosen_logprobs, logits_gradient_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)]


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_same_function(one, other, *inputs, tolerance):
    """Equal values and equal gradients. The other is computed in fp32, and rounded once at the end."""
    mine, theirs = ([tensor.detach().clone().requires_grad_() for tensor in inputs] for _ in range(2))
    got, want = one(*mine), other(*(tensor.float() for tensor in theirs)).to(inputs[0].dtype)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(want)
    got.backward(grad)
    want.backward(grad)
    for tensor, reference in zip(mine, theirs, strict=True):
        torch.testing.assert_close(tensor.grad, reference.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (4, 24), (1, 2)])
def test_rotation_turns_both_halves(heads, dim, dtype, tolerance):
    angles = random(5, dim // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def plain(states):
        low, high = states.chunk(2, -1)
        return states * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]

    states = random(heads, 5, dim, dtype=dtype).transpose(0, 1)
    assert_same_function(lambda states: Rotation.apply(states, cos, sin), plain, states, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 37, 3, 24), (5000, 16), (3, 4100), (1, 1, 8)])
def test_a_norm_divides_by_the_root_mean_square(shape, dtype, tolerance, monkeypatch):
    monkeypatch.setattr("reroll_zoo.fused_kernels._MAX_NORM_PROGRAMS", 3)  # So that each takes more than one tile.

    def plain(states, weight):
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-3) * weight

    states, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    summed = tolerance * max(5, states[..., 0].numel() ** 0.5 / 2)  # The weight's gradient sums over all rows.
    assert_same_function(lambda *inputs: RmsNorm.apply(*inputs, 1e-3), plain, states, weight, tolerance=summed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_another_type_is_added_in_fp32(dtype):
    total, part = random(9, 1001), random(9, 1001, dtype=dtype)
    want = total + part.float()
    add_(total, part)
    assert torch.equal(total, want)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_gated_silu_is_silu_times_up(dtype, tolerance):
    def plain(gate, up):
        return torch.nn.functional.silu(gate) * up

    inputs = random(7, 301, dtype=dtype), random(7, 301, dtype=dtype)
    assert_same_function(GatedSilu.apply, plain, *inputs, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("copies", [1, 3])
def test_spread_sums_the_gradients_of_equal_places_and_of_copied_heads(copies, dtype, tolerance):
    index = torch.tensor([0, 1, 2, 0, 1, 3, 0, 5], device=DEVICE)  # Nobody asks for row 4.
    order = index.argsort(stable=True)
    bounds = torch.cat([index.new_zeros(1), index.bincount(minlength=6).cumsum(0)])
    values = random(6, 2, 600, dtype=dtype)
    assert_same_function(
        lambda values: Spread.apply(values, copies, index, order, bounds),
        lambda values: values[index].repeat_interleave(copies, 1),
        values,
        tolerance=tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, "by row"])
def test_logprobs_of_chosen_tokens_and_their_gradient(temperature, dtype, tolerance):
    logits, targets = random(6, 9001, dtype=dtype) * 5, torch.randint(9001, (6,), device=DEVICE)
    if temperature == "by row":
        temperature = torch.rand(6, device=DEVICE) + 0.5
    column = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    reference = logits.float().clone().requires_grad_()
    want = torch.log_softmax(reference / column, -1).gather(1, targets[:, None]).squeeze(1)
    logp, normaliser = chosen_logprobs(logits, targets, temperature=temperature)
    torch.testing.assert_close(logp, want, rtol=1e-5, atol=1e-5)
    grad = random(6)
    want.backward(grad)
    got = logits_gradient_(logits.clone(), targets, normaliser, grad, temperature=temperature)
    torch.testing.assert_close(got.float(), reference.grad, rtol=tolerance, atol=tolerance)


def test_rows_that_lie_apart_are_read_where_they_lie():
    wide, targets = random(4, 300), torch.tensor([0, 99, 50, 7], device=DEVICE)
    logp, _ = chosen_logprobs(wide[:, :100], targets, temperature=1.0)
    want = torch.log_softmax(wide[:, :100], -1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logp, want, rtol=1e-5, atol=1e-5)
