import pytest
import torch

from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.fused import fuse_norms
from reroll.models.load import load_model
from reroll.models.tiny import make_tiny


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
