from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from reroll.models.attention import logits
from reroll.models.heads import add_score_head, entropy, map_logprobs, score_head, score_norm, sequence_scores, token_values
from reroll.models.load import load_model, load_tokenizer, save_model
from reroll_zoo.tiny_models import make_tiny

MODELS: dict[str, dict[str, Any]] = {
    "tied": {"family": "llama"},
    "untied": {"family": "llama", "tie_embeddings": False},
    "softcap": {"family": "gemma2", "final_logit_softcapping": 0.3},
}
POSITIONS = torch.tensor([2, 3, 4, 8, 12, 14, 15, 19])
TARGETS = torch.tensor([7, 1, 90, 33, 12, 50, 4, 8])


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    return load_model(str(make_tiny(tmp_path, **MODELS[request.param])), dtype=torch.float32, device="cpu")


@pytest.fixture
def tied(tmp_path: Path) -> PreTrainedModel:
    return load_model(str(make_tiny(tmp_path)), dtype=torch.float32, device="cpu")


def random_hidden(num_tokens: int = 20) -> Tensor:
    return torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(2)).mul_(5).requires_grad_()


def look(logp: Tensor, rows: Tensor) -> Mapping[str, Tensor]:
    """A scalar that depends on which row it is, and a vector."""
    return {"entropy": entropy(logp), "norm": score_norm(logp, TARGETS[rows]), "square": logp[:, :3].square()}


def dense(model: PreTrainedModel, hidden: Tensor, *, temperature: float) -> dict[str, Tensor]:
    """The definition: all logits at once."""
    logp = (logits(model, hidden[POSITIONS - 1]) / temperature).log_softmax(-1)
    found = look(logp, torch.arange(len(POSITIONS)))
    return {name: torch.zeros(20, *value.shape[1:]).index_put((POSITIONS,), value) for name, value in found.items()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_chunks_and_their_gradients_equal_all_logits_at_once(model: PreTrainedModel, chunk: int, temperature: float) -> None:
    results = []
    for chunked in (True, False):
        model.zero_grad()
        hidden = random_hidden()
        if chunked:
            said = map_logprobs(model, hidden, POSITIONS, look, temperature=temperature, chunk=chunk)
        else:
            said = dense(model, hidden, temperature=temperature)
        (said["entropy"].sum() + said["norm"].square().sum() + said["square"].sum()).backward()
        results.append([*said.values(), hidden.grad, model.get_output_embeddings().weight.grad])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)


def test_without_gradients_the_answers_are_the_same(model: PreTrainedModel) -> None:
    with_gradient = map_logprobs(model, random_hidden(), POSITIONS, look, temperature=1.0, chunk=3)
    with torch.no_grad():
        without = map_logprobs(model, random_hidden(), POSITIONS, look, temperature=1.0, chunk=3)
    for name, value in without.items():
        assert not value.requires_grad
        assert torch.equal(value, with_gradient[name])


def test_ids_keep_their_type_and_stand_where_their_token_is(tied: PreTrainedModel) -> None:
    said = map_logprobs(
        tied, random_hidden(), POSITIONS, lambda logp, _: {"ids": logp.topk(2).indices}, temperature=1.0, chunk=3
    )
    assert said["ids"].dtype == torch.int64
    assert said["ids"].any(1).nonzero().squeeze(1).tolist() == POSITIONS.tolist()


def test_ids_beyond_the_vocabulary_have_no_share_and_no_gradient(tied: PreTrainedModel) -> None:
    hidden = random_hidden()
    said = map_logprobs(
        tied, hidden, POSITIONS, lambda logp, _: {"p": logp.exp(), "all": logp}, temperature=1.0, chunk=3, vocabulary=40
    )
    assert said["p"].shape == (20, 40)
    torch.testing.assert_close(said["p"][POSITIONS].sum(-1), torch.ones(8))
    expected = logits(tied, hidden[POSITIONS - 1])[:, :40].softmax(-1)
    torch.testing.assert_close(said["p"][POSITIONS], expected)
    said["all"][:, 3].sum().backward()
    gradient = tied.get_output_embeddings().weight.grad
    assert gradient is not None
    assert gradient[:40].any(1).all()
    assert not gradient[40:].any()


def test_no_positions_give_zeros_that_can_be_differentiated(tied: PreTrainedModel) -> None:
    hidden, nowhere = random_hidden(6), torch.empty(0, dtype=torch.int64)
    said = map_logprobs(tied, hidden, nowhere, lambda logp, _: {"e": entropy(logp)}, temperature=1.0, chunk=4)
    said["e"].sum().backward()
    assert said["e"].tolist() == [0.0] * 6
    assert hidden.grad is not None
    assert not hidden.grad.any()


class LiveTensors(TorchDispatchMode):
    """Counts the tensors of a given shape whose memory is still held, and remembers the most there were at once."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self._shape, self._seen, self.peak = shape, dict[int, StorageWeakRef](), 0

    @property
    def count(self) -> int:
        self._seen = {key: storage for key, storage in self._seen.items() if not storage.expired()}
        return len(self._seen)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor) and tensor.shape == self._shape:
                storage = StorageWeakRef(tensor.untyped_storage())
                self._seen[storage.cdata] = storage
        self.peak = max(self.peak, self.count)
        return output


def test_the_forward_pass_keeps_no_logits_and_the_backward_pass_those_of_one_chunk(tied: PreTrainedModel) -> None:
    chunk, vocab, peaks = 100, tied.get_output_embeddings().weight.shape[0], []
    for num_chunks in (1, 8):
        hidden, positions = random_hidden(num_chunks * chunk + 1), torch.arange(num_chunks * chunk) + 1
        with LiveTensors(chunk, vocab) as live:
            said = map_logprobs(tied, hidden, positions, lambda logp, _: {"e": entropy(logp)}, temperature=1.0, chunk=chunk)
            assert live.count == 0
            said["e"].sum().backward()
        peaks.append(live.peak)
    assert peaks[0] == peaks[1] > 0
    with LiveTensors(chunk, vocab) as live:
        plain = entropy(logits(tied, random_hidden(chunk)).log_softmax(-1))
        assert live.count > 0, "the plain way does keep them"
        plain.sum().backward()


def test_entropy_and_score_norm_are_what_numpy_says() -> None:
    scores = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    targets = torch.tensor([0, 3, 3, 8, 1])
    logp = scores.log_softmax(-1)
    p = np.exp(scores.detach().numpy())
    p /= p.sum(1, keepdims=True)
    assert entropy(logp).tolist() == pytest.approx((-p * np.log(p)).sum(1).tolist())
    onehot = np.eye(9)[targets.numpy()]
    assert score_norm(logp, targets).tolist() == pytest.approx(((onehot - p) ** 2).sum(1).tolist())
    (gradient,) = torch.autograd.grad(logp.gather(1, targets[:, None]).sum(), scores)
    torch.testing.assert_close(score_norm(logp, targets), gradient.square().sum(1))


def test_the_scalar_head_speaks_of_the_state_before_a_token_and_of_a_sequence_end(tied: PreTrainedModel) -> None:
    add_score_head(tied, "nowhere")
    hidden = random_hidden()
    assert not token_values(tied, hidden, POSITIONS).any(), "a new head says zero"
    torch.nn.init.normal_(score_head(tied).weight)
    expected = (hidden @ score_head(tied).weight.T).squeeze(1)
    values = token_values(tied, hidden, POSITIONS)
    torch.testing.assert_close(values[POSITIONS], expected[POSITIONS - 1])
    assert (values != 0).sum() == len(POSITIONS)
    torch.testing.assert_close(sequence_scores(tied, hidden, torch.tensor([12, 19])), expected[[12, 19]])


def test_a_saved_scalar_head_is_found_again(tied: PreTrainedModel, tmp_path: Path) -> None:
    add_score_head(tied, "nowhere")
    torch.nn.init.normal_(score_head(tied).weight)
    save_model(tied, load_tokenizer(str(tmp_path)), tmp_path / "saved")
    loaded = load_model(str(tmp_path / "saved"), dtype=torch.float32, device="cpu", head="language+score")
    assert torch.equal(score_head(loaded).weight, score_head(tied).weight)
