"""What the ranks of one model begin with: the model without its weights, and what they call once it has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from reroll.config.parts import ModelConfig
from reroll.errors import ModelError
from reroll.models.attention import IMPLEMENTATION, check_supported
from reroll.models.heads import add_score_head, keep_padding_apart
from reroll.models.load import DTYPES, Head, resolve_base
from reroll.models.quantized import plain_config
from reroll.models.recurrent import mix_packed
from reroll.models.sight import auto_class, open_eye
from reroll.tokens.batch import Batch
from reroll.training.base import Needs
from reroll.training.predict import TokenStates, apply_heads, token_states
from reroll_zoo.ranks.config import GroupStrategyConfig
from reroll_zoo.vision.kinds import SEEING


def skeleton(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, head: Head) -> PreTrainedModel:
    """The model that `load_model` gives, without its weights: it lives on no device."""
    source = resolve_base(config.model)
    auto = AutoModelForSequenceClassification if head == "score" else auto_class(source)
    options = {"num_labels": 1} if head == "score" else {}
    shape = plain_config(source, **options)
    if shape.model_type in SEEING:  # One of the hub's, or it had been told before anything started.
        assert isinstance(config.strategy, GroupStrategyConfig)
        for found in config.strategy.sight_violations("policy", config, family=shape.model_type):
            raise ModelError(str(found))
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(
            shape, dtype=DTYPES[config.strategy.precision], attn_implementation=IMPLEMENTATION
        )
        if head == "language+score":
            add_score_head(model, source)
        if config.lora is not None:
            from reroll.models.lora import add_lora

            add_lora(model, config.lora, base=config.model)
    if head == "score":
        keep_padding_apart(model, tokenizer)
    check_supported(model)
    open_eye(model, config.model, trains=False)
    mix_packed(model)
    return model.eval()  # type: ignore[no-any-return, no-untyped-call]


class PredictingModel(nn.Module):
    """A model with what it is asked inside its forward pass, so that the heads are gathered when they are used."""

    def __init__(self, model: PreTrainedModel, *, chunk: int) -> None:
        super().__init__()
        self.model, self._chunk = model, chunk

    def forward(self, batch: Batch, needs: Needs) -> dict[str, Tensor]:
        """The fields of Predictions: a plain dict, in which FSDP finds the tensors whose gradients it waits for."""
        return self.apply_heads(token_states(self.model, batch), batch, needs)

    def apply_heads(self, states: TokenStates, batch: Batch, needs: Needs) -> dict[str, Tensor]:
        """What the heads say of these states."""
        answers = apply_heads(self.model, states, batch, needs, chunk=self._chunk)
        if needs.logp and torch.is_grad_enabled() and not batch.loss_mask.any():
            # No row reached the head, but the other ranks wait for this one's part of the head's gradient: zero.
            head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
            answers["logp"] = answers["logp"] + 0.0 * head.weight.sum()
        return answers
