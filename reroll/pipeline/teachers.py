"""On-policy distillation: teachers score the samples that the policy has just drawn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reroll.algo.episodes import Episodes
from reroll.config.algorithm import DistillTermConfig, TeacherConfig
from reroll.config.tree import RlvrConfig
from reroll.models.load import shared_vocabulary
from reroll.pipeline.spawn import spawn_fixed
from reroll.runtime.base import Runtime
from reroll.tokens.batch import Batch
from reroll.training.base import Needs, Predictions, required
from reroll.training.cluster import TrainCluster
from reroll.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers:
    """The teachers, each for its domains. `vocabulary` is how many ids all of them share with the policy; 0 without any."""

    configs: Mapping[str, TeacherConfig]
    models: Mapping[str, TrainCluster]
    vocabulary: int

    async def advantage(self, batch: Batch, episodes: Episodes, groups: Sequence[Group]) -> Tensor:
        """[T]: how much likelier each teacher finds a token than the policy that drew it did."""
        bonus = torch.zeros_like(batch.advantage)
        async for teacher, tokens, predictions in self._predictions(batch, episodes, groups, Needs()):
            bonus[tokens] += teacher.coef * (required(predictions.logp) - batch.logp[tokens])
        return bonus

    async def with_distributions(
        self, batch: Batch, episodes: Episodes, groups: Sequence[Group], config: DistillTermConfig
    ) -> Batch:
        """The batch with the distribution of its teacher before every token in the loss. A sequence has one teacher at most."""
        needs = Needs(logp=False, top_k=config.top_k or self.vocabulary, vocabulary=self.vocabulary)
        weight, ids, logp = torch.zeros_like(batch.advantage), None, None
        async for teacher, tokens, predictions in self._predictions(batch, episodes, groups, needs):
            weight[tokens] = teacher.coef
            logp = _filled(logp, tokens, required(predictions.top_logp))
            ids = None if predictions.top_ids is None else _filled(ids, tokens, predictions.top_ids)
        if logp is None:  # Nobody teaches a domain of this step: any distribution will do, as it weighs nothing.
            logp = torch.zeros(batch.num_tokens, self.vocabulary)
        return batch.replace(target_ids=ids, target_logp=logp, target_weight=torch.where(batch.loss_mask, weight, 0.0))

    async def _predictions(
        self, batch: Batch, episodes: Episodes, groups: Sequence[Group], needs: Needs
    ) -> AsyncIterator[tuple[TeacherConfig, Tensor, Predictions]]:
        """Each teacher with rows in this batch, the tokens bool [T] of its sequences, and its predictions about them."""
        for name, teacher in self.configs.items():
            learns = torch.tensor([teacher.domains is None or group.prompt.domain in teacher.domains for group in groups])
            is_taught = episodes.spread(learns[episodes.group].float()) > 0
            sequences = batch.sequence_index[is_taught].unique().tolist()  # type: ignore[no-untyped-call]
            if sequences:
                predictions = await self.models[name].predict(batch.select(sequences), needs)
                yield teacher, torch.isin(batch.sequence_index, torch.tensor(sequences)), predictions


async def open_teachers(config: RlvrConfig, runtime: Runtime) -> Teachers:
    """The models, wherever their configs put them."""
    models = {name: await spawn_fixed(runtime, node, role=f"teacher {name}") for name, node in config.teachers.items()}
    return Teachers(configs=config.teachers, models=models, vocabulary=vocabulary_of(config))


def vocabulary_of(config: RlvrConfig) -> int:
    """How many ids the policy shares with all of its teachers. Raises ModelError unless they mean the same by them."""
    return min((shared_vocabulary(config.policy.model, node.model) for node in config.teachers.values()), default=0)


def _filled(whole: Tensor | None, tokens: Tensor, values: Tensor) -> Tensor:
    """[T, k] with these values on these tokens, and what was there, or zeros, elsewhere."""
    if whole is None:
        whole = values.new_zeros(len(tokens), *values.shape[1:])
    whole[tokens] = values
    return whole
