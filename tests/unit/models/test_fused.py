import pytest
import torch

from reroll.models import fused as fused_module
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.fused import fuse
from reroll.models.load import load_model
from reroll.models.logprobs import token_logprobs
from reroll_zoo import fused_layers
from reroll_zoo.fused_layers import fuse_gates, fuse_norms, fuse_rotations
from reroll_zoo.tiny_models import make_tiny


def scores(model):
    ids = torch.arange(5, 45)
    with torch.no_grad():
        hidden = hidden_states(model, ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
        return logits(model, hidden).float()


@pytest.mark.parametrize(("family", "per_layer"), [("llama", 2), ("qwen2", 2), ("qwen3", 4), ("mistral", 2), ("smollm3", 2)])
def test_fused_norms_compute_what_the_original_ones_do(tmp_path, family, per_layer):
    folder = str(make_tiny(tmp_path, family=family, layers=2, initializer_range=0.2))
    model, fused = (load_model(folder, dtype=torch.float32, device="cpu") for _ in range(2))
    for one, other in zip(model.parameters(), fused.parameters(), strict=True):
        if one.ndim == 1:  # Norms start at one: another scale shows whether it is used.
            one.data.uniform_(0.5, 1.5)
            other.data.copy_(one)
    assert fuse_norms(fused) == 2 * per_layer + 1
    torch.testing.assert_close(scores(fused), scores(model), atol=2e-5, rtol=1e-5)


def test_norms_of_another_kind_are_left_alone(tmp_path):
    folder = str(make_tiny(tmp_path, family="gemma2"))
    assert fuse_norms(load_model(folder, dtype=torch.float32, device="cpu")) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "smollm3"])
def test_a_fused_model_learns_what_the_original_one_does(tmp_path, family, monkeypatch):
    pytest.importorskip("triton")
    folder = str(make_tiny(tmp_path, family=family, layers=2, initializer_range=0.2))
    model, fused = (load_model(folder, dtype=torch.float32, device="cpu") for _ in range(2))
    want = gradients(model)
    for module in (fused_module, fused_layers):
        monkeypatch.setattr(module, "runs_kernels", lambda tensor: True)  # In Triton's interpreter.
    assert fuse_gates(fused) == 2
    assert fuse_rotations(fused) == 1
    fuse(fused)  # A second time changes nothing.
    for got, other in zip(gradients(fused), want, strict=True):
        # Of the largest gradient: how far sums in another order drift apart differs from one CPU to the next.
        torch.testing.assert_close(got, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


def gradients(model):
    ids = torch.arange(5, 45)
    hidden = hidden_states(model, ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
    token_logprobs(model, hidden, ids, torch.arange(1, len(ids)), temperature=0.8, chunk=16).sum().backward()
    return [parameter.grad for parameter in model.parameters()]
