"""Models that a run hosts to judge: language models on engines of their own, and reward models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import count

from transformers import PreTrainedTokenizerBase

from reroll.config.parts import FixedModelConfig
from reroll.config.reward_base import RewardConfig
from reroll.config.reward_hosted import HostedJudgeConfig, ModelRewardConfig, OpenedRewardConfig
from reroll.config.rewards import walk
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.worker import InferWorker
from reroll.models.load import load_tokenizer
from reroll.pipeline.spawn import spawn_fixed
from reroll.rewards.hosted import Answer, Complete, Unreadable
from reroll.rewards.reward_model import Ids, ScoreModel
from reroll.runtime.base import Placement, Runtime
from reroll.tokens.batch import pack
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.training.base import Needs, required
from reroll.training.cluster import TrainCluster
from reroll.types import FinishReason, Message, Request, SamplingParams


async def open_hosts(
    configs: Mapping[str, RewardConfig], runtime: Runtime, stack: AsyncExitStack
) -> dict[str, Complete | ScoreModel]:
    """Every model that these rewards want hosted, by the reward's path; `stack` closes them. Equal ones are one model."""
    hosts: dict[str, Complete | ScoreModel] = {}
    shared: dict[str, Complete | ScoreModel] = {}
    for name, node in walk(configs):
        if isinstance(node, ModelRewardConfig):
            key = node.model_dump_json(include={"model", "strategy", "devices", "score_at"})
            if key not in shared:
                shared[key] = await _host_reward_model(node, name, runtime, stack)
        elif isinstance(node, OpenedRewardConfig) and node.hosted is not None:
            key = node.hosted.model_dump_json()
            if key not in shared:
                shared[key] = await _host_judge(node.hosted, name, runtime, stack)
        else:
            continue
        hosts[name] = shared[key]
    return hosts


async def _host_judge(config: HostedJudgeConfig, name: str, runtime: Runtime, stack: AsyncExitStack) -> HostedModel:
    tokenizer = load_tokenizer(config.model)
    renderer = Renderer(tokenizer)
    devices = runtime.devices(config.devices)
    placed = tuple(devices[rank % len(devices)] for rank in range(config.num_workers))
    placement = Placement(f"judge {name}", placed, concurrency=CONCURRENCY)
    workers = await runtime.spawn(
        InferWorker, placement, model=config.model, precision=config.precision, max_running=config.max_running
    )
    engine = InferCluster(workers)
    stack.push_async_callback(engine.close)
    return HostedModel(engine, renderer, tokenizer)


class HostedModel:
    """A judge model that the run hosts itself, with the interface of one behind an endpoint."""

    def __init__(self, engine: InferCluster, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> None:
        self._engine = engine
        self._renderer = renderer
        self._escape = SpecialTokenEscaper(tokenizer)
        self._numbers = count()

    async def __call__(self, messages: list[Message], sampling: SamplingParams) -> Answer:
        prompt_ids = self._renderer.start(self._escape(messages))
        sampling = replace(sampling, stop_token_ids=self._renderer.stop_token_ids)
        request = Request(id=f"judge-{next(self._numbers)}", prompt_ids=prompt_ids, sampling=sampling)
        try:
            completion = await self._engine.generate(request)
        except ValueError as error:  # It can never run: the judge's context is too short for it.
            raise Unreadable(f"the judge cannot read the answer: {error}") from error
        return Answer(
            text=self._renderer.decode(completion.token_ids),
            is_whole=completion.finish_reason is FinishReason.STOP,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(completion.token_ids),
        )

    async def close(self) -> None:
        """The engine is closed by whoever started it: other rewards may share it."""


async def _host_reward_model(config: ModelRewardConfig, name: str, runtime: Runtime, stack: AsyncExitStack) -> ScoreModel:
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


class SpecialTokenEscaper:
    """Escapes the special tokens of a chat template in messages, so that an answer cannot end its own turn in a judge's prompt.

    The text of such a token is escaped by a space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        marks = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)))  # There is one: every tokenizer here has an end of sequence.

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        return [self._escaped(message) for message in messages]

    def _escaped(self, message: Message) -> Message:
        escaped = message.copy()
        escaped["content"] = self._marks.sub(lambda match: f"{match[0][0]} {match[0][1:]}", message["content"])
        return escaped
