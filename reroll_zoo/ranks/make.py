"""The strategy of one rank of several."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedModel

from reroll.config.imports import import_object
from reroll.training.base import Strategy
from reroll.training.make import RankModel
from reroll_zoo.ranks.config import GroupStrategyConfig
from reroll_zoo.ranks.empty_model import skeleton
from reroll_zoo.ranks.group import join_process_group, leaving_on_error, only_first


def make_in_group(model: RankModel) -> Strategy:
    """Meet the other ranks, and make what the node `makes`."""
    info, config, node = model.info, model.config, model.config.strategy
    assert isinstance(node, GroupStrategyConfig)
    join_process_group(model.rendezvous, rank=info.rank, world_size=info.world_size, device=info.device)
    with leaving_on_error():
        make_empty = partial(skeleton, config, model.tokenizer, head=model.head)

        def read_first(*, as_stored: bool = False) -> PreTrainedModel | None:
            return only_first(partial(model.read, device="cpu", as_stored=as_stored))

        made: Strategy = import_object(node.makes)(
            make_empty, read_first, model.tokenizer, node, config.optim, device=info.device, total_steps=model.total_steps
        )
        return made
