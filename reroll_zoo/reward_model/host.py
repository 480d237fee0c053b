"""A reward model on workers of the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from reroll.config.parts import FixedModelConfig
from reroll.models.load import load_tokenizer
from reroll.pipeline.spawn import spawn_fixed
from reroll.runtime.base import Runtime
from reroll.tokens.batch import pack
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.training.base import Needs, required
from reroll.training.cluster import TrainCluster
from reroll.types import Message
from reroll_zoo.judge.escape import SpecialTokenEscaper
from reroll_zoo.reward_model.config import ModelRewardConfig
from reroll_zoo.reward_model.reward import Ids, ScoreModel


async def host_reward_model(config: ModelRewardConfig, name: str, runtime: Runtime, stack: AsyncExitStack) -> ScoreModel:
    """Bring up the reward model; `stack` closes it."""
    tokenizer = load_tokenizer(config.model)
    renderer, escape = Renderer(tokenizer), SpecialTokenEscaper(tokenizer)
    fixed = FixedModelConfig(model=config.model, strategy=config.strategy, devices=config.devices)
    cluster = await spawn_fixed(runtime, fixed, role=f"reward model {name}", head="score")
    stack.push_async_callback(cluster.close)

    def render(messages: Sequence[Message]) -> Ids:
        messages = escape(messages)
        return renderer.training_row(messages)[0] if config.score_at == "turn" else renderer.whole(messages)

    model = ScoreModel(render, partial(score_rows, cluster), max_batch_tokens=config.strategy.micro_batch_tokens)
    stack.push_async_callback(model.close)
    return model


async def score_rows(cluster: TrainCluster, rows: Sequence[Ids]) -> list[float]:
    """The scalar head at the end of each row."""
    batch = pack([sft_sample(ids, [False] * (len(ids) - 1) + [True]) for ids in rows])
    predictions = await cluster.predict(batch, Needs(logp=False, score=True))
    return [float(score) for score in required(predictions.score)]
