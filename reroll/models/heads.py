"""What a model's heads say about packed hidden states, beyond the log-prob of the written token.

Whole distributions are looked at in chunks of rows: [tokens x vocabulary] is never held. With gradients, the backward
pass makes the logits of a chunk again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.models.attention import logits

SCORE = "score"
"""The scalar head of critics and reward models: the name transformers gives it in sequence classifiers."""

OnLogprobs = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""(log-probs over the vocabulary [C, V], which [C] of the positions they belong to) -> [C, …] each"""


def score_head(model: PreTrainedModel) -> nn.Linear:
    """The model's scalar head: [hidden] -> 1."""
    head = model.get_submodule(SCORE)
    assert isinstance(head, nn.Linear)
    return head


def add_score_head(model: PreTrainedModel, folder: str) -> None:
    """Give a language model a scalar head beside its LM head: the one saved in `folder`, else one that is zero."""
    size: int = model.config.get_text_config().hidden_size
    head = nn.Linear(size, 1, bias=False, dtype=model.dtype, device=model.device)
    saved = _saved_tensor(Path(folder), f"{SCORE}.weight")
    with torch.no_grad():
        head.weight.copy_(torch.zeros_like(head.weight) if saved is None else saved)
    model.add_module(SCORE, head)


def keep_padding_apart(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """See to it that no row can end in the padding token, which many tokenizers share with the end of a turn.

    Transformers reads the score of a sequence at its last token that is not padding: a saved model would score another
    token than it was trained on. Without a token to spare there is none: transformers then takes one row at a time.
    """
    if tokenizer.pad_token_id not in (None, tokenizer.eos_token_id):
        return
    spare = [token for token in (tokenizer.unk_token, tokenizer.bos_token) if token not in (None, tokenizer.eos_token)]
    tokenizer.pad_token = spare[0] if spare else None
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _saved_tensor(folder: Path, name: str) -> Tensor | None:
    """One tensor of the safetensors files in a folder, if it is there."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - not a dict
                return tensors.get_tensor(name)  # type: ignore[no-any-return]
    return None


def token_values(model: PreTrainedModel, hidden: Tensor, positions: Tensor) -> Tensor:
    """fp32 [T]: what the scalar head expects before the token at each of `positions` is written; 0 elsewhere."""
    return _scatter(sequence_scores(model, hidden, positions - 1), positions, len(hidden))


def sequence_scores(model: PreTrainedModel, hidden: Tensor, ends: Tensor) -> Tensor:
    """fp32 [N]: the scalar head on the hidden states at `ends` [N]."""
    weight = score_head(model).weight.float()
    return nn.functional.linear(hidden[ends].float(), weight).squeeze(1)


def map_logprobs(
    model: PreTrainedModel,
    hidden: Tensor,
    positions: Tensor,
    function: OnLogprobs,
    *,
    temperature: float | Tensor,
    chunk: int,
    vocabulary: int | None = None,
) -> dict[str, Tensor]:
    """What `function` makes of the distribution that each token at `positions` was drawn from: [T, …] each, 0 elsewhere.

    The distribution is softmax(logits / temperature), over the first `vocabulary` ids if that is given. The temperature is
    one for all, or [T]. Differentiable in `hidden` and the head.
    """

    def run(rows: Tensor, index: Tensor) -> Mapping[str, Tensor]:
        shaped = logits(model, rows)[:, :vocabulary].float()
        scale = temperature[positions[index], None] if isinstance(temperature, Tensor) else temperature
        return function(torch.log_softmax(shaped / scale, -1), index)

    before, parts = hidden[positions - 1], []
    for index in torch.split(torch.arange(len(positions), device=hidden.device), chunk):
        if torch.is_grad_enabled():
            parts.append(checkpoint(run, before[index], index, use_reentrant=False))
        else:
            parts.append(run(before[index], index))
    return {name: _scatter(torch.cat([part[name] for part in parts]), positions, len(hidden)) for name in parts[0]}


def _scatter(values: Tensor, positions: Tensor, length: int) -> Tensor:
    """[P, …] -> [T, …]: 0 outside `positions`."""
    return values.new_zeros(length, *values.shape[1:]).index_put((positions,), values)


def entropy(logp: Tensor) -> Tensor:
    """[C, V] -> [C]"""
    return -(logp.exp() * logp).sum(-1)


def score_norm(logp: Tensor, targets: Tensor) -> Tensor:
    """[C, V] -> [C]: squared norm of the gradient of log p(target) in the logits: 1 - 2 p(target) + sum of p squared."""
    p = logp.exp()
    return 1 - 2 * p.gather(1, targets[:, None]).squeeze(1) + p.square().sum(-1)
