from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model
from reroll.models.logprobs import token_logprobs
from reroll_zoo.tiny_models import make_tiny

MODELS: dict[str, dict[str, Any]] = {
    "tied": {"family": "llama"},
    "untied": {"family": "llama", "tie_embeddings": False},
    "softcap": {"family": "gemma2", "final_logit_softcapping": 0.3},
}


def tiny(folder: Path, name: str) -> PreTrainedModel:
    return load_model(str(make_tiny(folder, **MODELS[name])), dtype=torch.float32, device="cpu")


def dense(model: PreTrainedModel, hidden: Tensor, targets: Tensor, positions: Tensor, *, temperature: float) -> Tensor:
    """The definition: all logits at once."""
    logp = (logits(model, hidden[positions - 1]) / temperature).log_softmax(-1)
    return torch.zeros(len(targets)).index_put((positions,), logp.gather(1, targets[positions, None]).squeeze(1))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_chunked_logprobs_and_their_gradients_equal_the_dense_ones(
    tmp_path: Path, name: str, chunk: int, temperature: float
) -> None:
    model = tiny(tmp_path, name)
    cu_seqlens = torch.tensor([0, 13, 20])
    ids = torch.randint(4, 90, (20,), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([2, 3, 4, 8, 12, 14, 15, 19])
    upstream = torch.randn(20, generator=torch.Generator().manual_seed(2))
    results = []
    for chunked in (True, False):
        model.zero_grad()
        place = torch.cat([torch.arange(13), torch.arange(7)])
        hidden = hidden_states(model, ids, place, PackedAttention(cu_seqlens))
        if chunked:
            logp = token_logprobs(model, hidden, ids, positions, temperature=temperature, chunk=chunk)
        else:
            logp = dense(model, hidden, ids, positions, temperature=temperature)
        (logp * upstream).sum().backward()
        results.append([logp.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
    assert len(results[0]) == len(results[1]) == 1 + len(list(model.parameters()))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_head_with_a_bias_gets_its_gradient(tmp_path: Path) -> None:
    model = tiny(tmp_path, "untied")
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.randn(head.weight.shape[0], generator=torch.Generator().manual_seed(0)))
    hidden = torch.randn(30, 64, generator=torch.Generator().manual_seed(3))
    targets, positions = torch.arange(30), torch.arange(1, 30)
    gradients = []
    for function, options in ((token_logprobs, {"chunk": 8}), (dense, {})):
        logp = function(model, hidden, targets, positions, temperature=1.0, **options)
        gradients.append(torch.autograd.grad(logp.square().sum(), head.bias)[0])
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_tokens_outside_the_positions_have_logprob_zero(tmp_path: Path) -> None:
    model = tiny(tmp_path, "tied")
    logp = token_logprobs(model, torch.randn(6, 64), torch.arange(6), torch.tensor([2, 5]), temperature=1.0, chunk=4)
    assert (logp != 0).tolist() == [False, False, True, False, False, True]
    assert logp.dtype == torch.float32


def test_no_positions_give_zeros_that_can_be_differentiated(tmp_path: Path) -> None:
    hidden = torch.randn(6, 64, requires_grad=True)
    no_positions = torch.empty(0, dtype=torch.int64)
    logp = token_logprobs(tiny(tmp_path, "tied"), hidden, torch.arange(6), no_positions, temperature=1.0, chunk=4)
    logp.sum().backward()
    assert logp.tolist() == [0.0] * 6
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_bf16_logits_are_normalised_in_fp32(tmp_path: Path) -> None:
    model = tiny(tmp_path, "tied").to(torch.bfloat16)  # type: ignore[arg-type]
    hidden = torch.randn(50, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    targets, positions = torch.arange(50), torch.arange(1, 50)
    expected = logits(model, hidden[:-1]).float().log_softmax(-1).gather(1, targets[1:, None]).squeeze(1)
    logp = token_logprobs(model, hidden, targets, positions, temperature=1.0, chunk=16)
    torch.testing.assert_close(logp[1:], expected, atol=1e-5, rtol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation put out."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


def test_no_tensor_is_larger_than_one_chunk_of_logits_or_the_head_itself(tmp_path: Path) -> None:
    model = tiny(tmp_path, "tied")
    vocab, hidden_size = model.get_output_embeddings().weight.shape
    num_tokens, chunk = 2000, 32
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    targets, positions = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(1, num_tokens)
    with LargestTensor() as largest:
        token_logprobs(model, hidden, targets, positions, temperature=1.0, chunk=chunk).sum().backward()
    assert largest.numel == max(hidden.numel(), vocab * hidden_size, chunk * vocab)
    assert largest.numel < num_tokens * vocab
