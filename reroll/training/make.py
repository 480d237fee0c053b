"""The strategy of a worker, from its config node, and the model that it holds."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.config.parts import ModelConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import ModelError
from reroll.models.heads import keep_padding_apart, score_head
from reroll.models.load import DTYPES, Head, load_model, load_tokenizer, stored_dtype
from reroll.runtime.base import WorkerInfo
from reroll.training.base import Strategy
from reroll.training.empty_model import skeleton
from reroll.training.ranks import join_process_group, leaving_on_error, only_first
from reroll.training.torch_strategy import TorchStrategy


def make_strategy(
    info: WorkerInfo, config: ModelConfig, *, total_steps: int, head: Head = "language", rendezvous: str | None = None
) -> Strategy:
    """A strategy for `total_steps` optimizer steps; one for 0 only answers, and holds nothing but weights.

    `rendezvous` is the address where the ranks of a strategy of several find each other.
    """
    strategy, tokenizer = config.strategy, load_tokenizer(config.model)
    read = partial(_read, config, tokenizer, is_fixed=total_steps == 0, head=head)
    if isinstance(strategy, TorchStrategyConfig):
        model = read(device=info.device)
        return TorchStrategy(model, tokenizer, strategy, config.optim, total_steps=total_steps, head=head)
    join_process_group(rendezvous, rank=info.rank, world_size=info.world_size, device=info.device)
    with leaving_on_error():
        make_empty = partial(skeleton, config, tokenizer, head=head)

        def read_first(*, as_stored: bool = False) -> PreTrainedModel | None:
            return only_first(partial(read, device="cpu", as_stored=as_stored))

        made: Strategy = strategy.implementation()(
            make_empty, read_first, tokenizer, strategy, config.optim, device=info.device, total_steps=total_steps
        )
        return made


def _read(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: str,
    is_fixed: bool,
    head: Head,
    as_stored: bool = False,
) -> PreTrainedModel:
    """The model in the strategy's precision, or, where it is to be copied tensor by tensor, as it lies on disk."""
    dtype = (stored_dtype(config.model) if as_stored else None) or DTYPES[config.strategy.precision]
    model = load_model(config.model, dtype=dtype, device=device, head=head, lora=config.lora)
    if head == "score":
        keep_padding_apart(model, tokenizer)
        if is_fixed and not score_head(model).weight.any():
            raise ModelError(f"{config.model} has no scalar head: name a reward model, e.g. one of pipeline reward_model")
    if is_fixed:
        model.requires_grad_(False)  # Then it has no master weights either.
    return model
