"""What workers do when they are sent off their devices and called back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from reroll.config.parts import OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.worker import InferWorker
from reroll.models.load import load_model, load_tokenizer
from reroll.runtime.base import Placement
from reroll.runtime.local import LocalRuntime
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Request, SamplingParams


def request(name: str, *, first_token: int) -> Request:
    return Request(id=name, prompt_ids=(first_token, 9, 7), sampling=SamplingParams(max_tokens=4, min_tokens=4))


async def test_requests_go_to_the_engines_that_are_left_and_those_that_left_finish_theirs_when_they_are_back(
    tiny_model: Path,
) -> None:
    async with LocalRuntime() as runtime:
        placement = Placement("engine", ("cpu", "cpu"), concurrency=CONCURRENCY)
        workers = await runtime.spawn(InferWorker, placement, model=str(tiny_model), precision="fp32", max_running=4)
        engine = InferCluster(workers)
        await engine.sleep()
        waiting = [asyncio.create_task(engine.generate(request(f"early{n}", first_token=10 + n))) for n in range(4)]
        await engine.wake((1,))
        written = await asyncio.gather(*(engine.generate(request(f"late{n}", first_token=20 + n)) for n in range(4)))
        assert [len(completion.token_ids) for completion in written] == [4] * 4, "they all went to the engine that is there"
        assert not all(task.done() for task in waiting), "some were given to the engine that is away"
        await engine.wake((0,))
        assert [len((await task).token_ids) for task in waiting] == [4] * 4
        await engine.close()


def test_the_optimizer_can_leave_without_the_weights_and_all_can_leave(tiny_model: Path) -> None:
    network = load_model(str(tiny_model), dtype=torch.float32, device="cpu")
    strategy = TorchStrategy(network, load_tokenizer(str(tiny_model)), TorchStrategyConfig(), OptimConfig(), total_steps=1)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    strategy.optim_step()

    strategy.to("meta", weights=False)  # A device whose tensors hold nothing: who was moved there shows it.
    moments = [value for state in strategy._optimizer.state.values() for key, value in state.items() if key != "step"]
    assert {moment.device.type for moment in moments} == {"meta"}
    assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}
    strategy.to("meta")
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
