"""A judge model that the run hosts itself, on engines of its own."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count

from transformers import PreTrainedTokenizerBase

from reroll.config.reward_hosted import HostedJudgeConfig
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.worker import InferWorker
from reroll.models.load import load_tokenizer
from reroll.runtime.base import Placement, Runtime
from reroll.tokens.renderer import Renderer
from reroll.types import FinishReason, Message, Request, SamplingParams
from reroll_zoo.judge.answer import Answer, Unreadable
from reroll_zoo.judge.config import JudgeConfig
from reroll_zoo.judge.escape import SpecialTokenEscaper


async def host_judge(node: JudgeConfig, name: str, runtime: Runtime, stack: AsyncExitStack) -> HostedModel:
    """Bring up the engines of the model that a judge names; `stack` closes them."""
    config = node.model
    assert isinstance(config, HostedJudgeConfig)
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
