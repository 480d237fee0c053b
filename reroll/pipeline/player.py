"""The policy as prompts meet it: an engine, the chat format, and the judges. All that evaluation needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from reroll.config.parts import EngineConfig, EvalConfig, PolicyConfig, RolloutConfig
from reroll.config.tree import RlvrConfig
from reroll.envs.base import SingleTurn
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.worker import InferWorker
from reroll.models.load import load_tokenizer
from reroll.pipeline.evaluate import EvalResult, evaluate
from reroll.rewards.worker import RewardCluster
from reroll.rollout.play import play
from reroll.runtime.base import Placement, Runtime
from reroll.tokens.renderer import Renderer
from reroll.types import Prompt, SamplingParams, Score, Trajectory


@dataclass(frozen=True, slots=True)
class Player:
    """Plays prompts and has the outcome judged."""

    engine: InferCluster
    rewards: RewardCluster
    renderer: Renderer
    rollout: RolloutConfig

    async def episode(self, prompt: Prompt, id: str, seed: int, *, temperature: float | None = None) -> Trajectory:
        """One sample's exchange with the policy, drawn as the config says (or at another temperature)."""
        rollout = self.rollout
        sampling = SamplingParams(
            max_tokens=rollout.max_tokens,
            min_tokens=rollout.min_tokens,
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
            seed=seed,
        )
        limit = rollout.max_prompt_tokens
        env = SingleTurn(prompt)
        return await play(env, self.engine.generate, self.renderer, sampling, id=id, max_prompt_tokens=limit, max_turns=1)

    async def greedy_episode(self, prompt: Prompt, id: str, seed: int) -> Trajectory:
        """As `episode`, always taking the likeliest token."""
        return await self.episode(prompt, id, seed, temperature=0.0)

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """The verdict of the domain's reward."""
        return await self.rewards.score(prompt, trajectory)

    async def evaluate(
        self, prompts: Sequence[Prompt], settings: EvalConfig, *, seed: int, on_done: Callable[[], None] = lambda: None
    ) -> EvalResult:
        """Every prompt played and judged as `settings` say. `on_done` ticks a progress bar."""

        async def episode(prompt: Prompt, id: str, seed: int) -> Trajectory:
            return await self.episode(prompt, id, seed, temperature=settings.temperature)

        return await evaluate(
            prompts, episode, self.score, samples=settings.samples, threshold=settings.threshold, seed=seed, on_done=on_done
        )


@asynccontextmanager
async def open_player(config: RlvrConfig, runtime: Runtime, code_folder: Path) -> AsyncIterator[Player]:
    """Bring up tokenizer and rewards, whose faults show at once, then the engine."""
    renderer = Renderer(load_tokenizer(config.policy.model))
    rewards = await RewardCluster.start(runtime, config.rewards, config_folder=code_folder)
    engine = await spawn_engine(runtime, config.engine, config.policy)
    try:
        yield Player(engine, rewards, renderer, config.rollout)
    finally:
        await engine.close()


async def spawn_engine(runtime: Runtime, engine: EngineConfig, policy: PolicyConfig) -> InferCluster:
    """The engines that generate for a policy, dealt out over their devices."""
    devices = runtime.devices(engine.devices)
    seats = tuple(devices[rank % len(devices)] for rank in range(engine.num_workers))
    precision = policy.strategy.precision if engine.precision == "same" else engine.precision
    placement = Placement("engine", seats, concurrency=CONCURRENCY)
    workers = await runtime.spawn(
        InferWorker, placement, model=policy.model, precision=precision, max_running=engine.max_running, lora=policy.lora
    )
    return InferCluster(workers)
