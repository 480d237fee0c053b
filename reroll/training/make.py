"""The strategy of a worker, from its config node, and the model that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.config.parts import ModelConfig, PolicyConfig
from reroll.config.registry import load_entry
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import ModelError
from reroll.models.heads import keep_padding_apart, score_head
from reroll.models.load import DTYPES, Head, load_model, load_tokenizer, stored_dtype
from reroll.runtime.base import WorkerInfo
from reroll.training.base import Strategy
from reroll.training.torch_strategy import TorchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """A model, and the worker that is to hold it, alone or as one rank of several: what a strategy is made of."""

    info: WorkerInfo
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    head: Head
    total_steps: int
    """Optimizer steps; a strategy for 0 only answers, and holds nothing but weights."""
    rendezvous: str | None
    """The address where the ranks of a strategy of several find each other."""

    def read(self, *, device: str, as_stored: bool = False) -> PreTrainedModel:
        """The model in the strategy's precision, or, where it is to be copied tensor by tensor, as it lies on disk."""
        config, head, is_fixed = self.config, self.head, self.total_steps == 0
        dtype = (stored_dtype(config.model) if as_stored else None) or DTYPES[config.strategy.precision]
        exact = isinstance(config, PolicyConfig) and config.exact
        model = load_model(
            config.model, dtype=dtype, device=device, head=head, lora=config.lora, exact=exact, train_vision=config.train_vision
        )
        if head == "score":
            keep_padding_apart(model, self.tokenizer)
            if is_fixed and not score_head(model).weight.any():
                raise ModelError(f"{config.model} has no scalar head: name a reward model, e.g. one of pipeline reward_model")
        if is_fixed:
            model.requires_grad_(False)  # Then it has no master weights either.
        return model


def make_strategy(
    info: WorkerInfo, config: ModelConfig, *, total_steps: int, head: Head = "language", rendezvous: str | None = None
) -> Strategy:
    """The strategy that the config names, for one worker."""
    tokenizer = load_tokenizer(config.model)
    model = RankModel(info=info, config=config, tokenizer=tokenizer, head=head, total_steps=total_steps, rendezvous=rendezvous)
    made: Strategy = config.strategy.implementation()(model)
    return made


def make_torch(model: RankModel) -> TorchStrategy:
    """What the kind `torch` runs."""
    config, node = model.config, model.config.strategy
    assert isinstance(node, TorchStrategyConfig)
    loaded = model.read(device=model.info.device)
    made = load_entry("reroll.optimizers", node.optimizer)
    return made(loaded, model.tokenizer, node, config.optim, total_steps=model.total_steps, head=model.head)  # type: ignore[no-any-return]
