"""With full rank, one plain gradient step on an adapter is one step on the weight itself.

An adapted layer is W + s B A with B = 0. Its loss has the gradient s G Aᵀ in B, where G is the gradient in W. After one
step of size lr the merged weight is W - lr s² G Aᵀ A. So with s = alpha / rank = 1 and an orthogonal A of full rank,
Aᵀ A is the identity and the step is W - lr G: the full one. A thin A gives its projection on the rows of A.
"""

import peft
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

INPUTS, OUTPUTS, LR = 12, 7, 0.3


def adapted_layer(weight, a, *, alpha):
    """peft's own layer with these W and A, and B = 0."""
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float64))
    settings = peft.LoraConfig(r=len(a), lora_alpha=alpha, target_modules=["0"])
    layer = peft.inject_adapter_in_model(settings, model)[0]
    with torch.no_grad():
        layer.base_layer.weight.copy_(weight)
        layer.lora_A["default"].weight.copy_(a)
    return layer


def step(layer, parameter, data):
    """One step of plain gradient descent on one parameter."""
    inputs, targets = data
    (gradient,) = torch.autograd.grad(cross_entropy(layer(inputs), targets), parameter)
    with torch.no_grad():
        parameter -= LR * gradient
    return gradient


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator, dtype=torch.float64)
    data = torch.randn(32, INPUTS, generator=generator, dtype=torch.float64), torch.randint(OUTPUTS, (32,), generator=generator)
    rotation = torch.linalg.qr(torch.randn(INPUTS, INPUTS, generator=generator, dtype=torch.float64)).Q
    full = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float64)
    with torch.no_grad():
        full.weight.copy_(weight)
    gradient = step(full, full.weight, data)
    return weight, data, rotation, full.weight.detach(), gradient


def merged_after_a_step(weight, a, data, *, alpha):
    layer = adapted_layer(weight, a, alpha=alpha)
    step(layer, layer.lora_B["default"].weight, data)
    assert torch.equal(layer.base_layer.weight, weight)
    layer.merge()
    return layer.base_layer.weight.detach()


@pytest.mark.parametrize("kind", ["identity", "orthogonal"])
def test_a_full_rank_adapter_takes_the_full_step(problem, kind):
    weight, data, rotation, full, _ = problem
    a = torch.eye(INPUTS, dtype=torch.float64) if kind == "identity" else rotation
    torch.testing.assert_close(merged_after_a_step(weight, a, data, alpha=INPUTS), full, atol=1e-12, rtol=1e-12)
    assert (full - weight).abs().max() > 1e-2


def test_a_thin_adapter_takes_the_steps_projection_on_the_rows_of_a(problem):
    weight, data, rotation, _, gradient = problem
    a = rotation[:3]
    expected = weight - LR * gradient @ a.T @ a
    torch.testing.assert_close(merged_after_a_step(weight, a, data, alpha=3), expected, atol=1e-12, rtol=1e-12)


def test_the_step_grows_with_the_square_of_alpha_over_rank(problem):
    weight, data, rotation, full, _ = problem
    doubled = merged_after_a_step(weight, rotation, data, alpha=2 * INPUTS)
    torch.testing.assert_close(doubled - weight, 4 * (full - weight), atol=1e-12, rtol=1e-12)
