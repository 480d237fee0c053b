"""Runs episodes: the engine, the chat format, environments, agents and rewards together. All that evaluation needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from reroll.config.agents import AgentConfig
from reroll.config.envs import EnvDomainConfig, InlineEnvsConfig
from reroll.config.imports import import_object
from reroll.config.parts import EmbeddedEngineConfig, EngineConfig, EvalConfig, PolicyConfig, RolloutConfig
from reroll.config.tree import RlvrConfig
from reroll.envs.actions import ParsedEnv
from reroll.envs.cluster import EnvCluster
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.worker import InferWorker
from reroll.models.load import context_length, load_tokenizer
from reroll.pipeline.evaluate import EvalResult, evaluate
from reroll.pipeline.judges import open_hosts
from reroll.rewards.cluster import RewardCluster
from reroll.rollout.play import AgentEpisode, Generate, SingleTurn, play
from reroll.runtime.base import Placement, Runtime
from reroll.tokens.pictures import FOLDER as PICTURES_FOLDER
from reroll.tokens.renderer import Renderer
from reroll.types import Prompt, SamplingParams, Score, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs the episode of a prompt, in its domain's environment or agent if it has one, and scores it."""

    config: RlvrConfig
    engine: InferCluster
    rewards: RewardCluster
    renderer: Renderer
    envs: EnvCluster
    agents: Mapping[str, AgentEpisode]
    """How the agent of a domain plays."""
    context_length: int | None
    """Tokens that the model takes; None if it does not say."""
    generate: Generate
    """The engine's, or one that stands before it."""

    async def episode(self, prompt: Prompt, id: str, seed: int, *, temperature: float | None = None) -> Trajectory:
        """One episode with the policy, sampled as the config says (or at another temperature)."""
        rollout = self.config.rollout.of(prompt.domain)
        sampling = sampling_of(rollout, seed=seed, temperature=temperature)
        max_total_tokens = self._max_total_tokens(prompt.domain)
        if agent := self.agents.get(prompt.domain):
            return await agent(prompt, self.generate, self.renderer, sampling, id=id, max_total_tokens=max_total_tokens)
        entry = self.config.envs.get(prompt.domain)
        return await play(
            self._parsed_env(prompt, entry) if entry else SingleTurn(prompt),
            self.generate,
            self.renderer,
            sampling,
            id=id,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_turns=entry.max_turns if entry else 1,
            max_total_tokens=max_total_tokens,
            history=entry.history if entry else None,
        )

    def _parsed_env(self, prompt: Prompt, entry: EnvDomainConfig) -> ParsedEnv:
        env = self.envs.live(prompt.domain, prompt.extra["seed"])
        return ParsedEnv(env, entry.actions, format_penalty=entry.format_penalty)

    def _max_total_tokens(self, domain: str) -> int:
        """What all turns of an episode may hold: as the config says, and never more than the model takes."""
        limit = self.config.rollout.of(domain).max_total_tokens or self.config.max_total_tokens
        return min(limit, self.context_length or limit)

    async def greedy_episode(self, prompt: Prompt, id: str, seed: int) -> Trajectory:
        """As `episode`, always taking the likeliest token."""
        return await self.episode(prompt, id, seed, temperature=0.0)

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """The score of the domain's reward; where it has none, the reward that its environment or agent gave.

        Where an environment reports success, that is added to `info`: evaluation goes by it.
        """
        has_own_reward = prompt.domain in self.config.envs or (prompt.domain in self.agents and trajectory.reward_parts)
        if has_own_reward and prompt.domain not in self.config.rewards:
            score = trajectory.score
        else:
            score = await self.rewards.score(prompt, trajectory)
        if not any("success" in turn.info for turn in trajectory.turns):
            return score
        return replace(score, info={**score.info, "success": trajectory.turns[-1].info.get("success", 0.0)})

    async def evaluate(
        self, prompts: Sequence[Prompt], settings: EvalConfig, *, seed: int, on_done: Callable[[], None] = lambda: None
    ) -> EvalResult:
        """Every prompt played and judged as `settings` say. `on_done` ticks a progress bar."""

        async def episode(prompt: Prompt, id: str, seed: int) -> Trajectory:
            return await self.episode(prompt, id, seed, temperature=settings.of(prompt.domain).temperature)

        return await evaluate(prompts, episode, self.score, settings=settings, seed=seed, on_done=on_done)


def sampling_of(rollout: RolloutConfig, *, seed: int, temperature: float | None = None) -> SamplingParams:
    """How a domain's samples are drawn, or at another temperature."""
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        min_tokens=rollout.min_tokens,
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        seed=seed,
    )


@asynccontextmanager
async def open_episode_runner(
    config: RlvrConfig, runtime: Runtime, code_folder: Path, *, run_folder: Path | None = None
) -> AsyncIterator[EpisodeRunner]:
    """Bring up tokenizer, rewards, environments and agents, whose faults show at once, then the engine.

    Judges cache their answers in `run_folder`.
    """
    async with AsyncExitStack() as stack:
        renderer = Renderer(load_tokenizer(config.policy.model), folder=run_folder and run_folder / PICTURES_FOLDER)
        agents = await _open_agents(config, stack)
        rewards = await RewardCluster.start(
            runtime,
            config.rewards,
            workers=config.reward_workers,
            hosts=await open_hosts(config.rewards, runtime, stack),
            config_folder=code_folder,
            run_folder=run_folder,
        )
        stack.push_async_callback(rewards.close)
        nodes = {domain: entry.env for domain, entry in config.envs.items()}
        envs = await EnvCluster.start(runtime, config.env_workers if nodes else InlineEnvsConfig(kind="inline"), nodes)
        stack.push_async_callback(envs.close)
        engine = await spawn_engine(runtime, config.engine, config.policy)
        stack.push_async_callback(engine.close)
        yield EpisodeRunner(
            config=config,
            engine=engine,
            rewards=rewards,
            renderer=renderer,
            envs=envs,
            agents=agents,
            context_length=context_length(config.policy.model),
            generate=engine.generate,
        )


async def _open_agents(config: RlvrConfig, stack: AsyncExitStack) -> dict[str, AgentEpisode]:
    """The agents of all domains; those that play in the same way are opened together."""
    together: dict[str, dict[str, AgentConfig]] = {}
    for domain, node in config.agents.items():
        together.setdefault(node.plays, {})[domain] = node
    agents: dict[str, AgentEpisode] = {}
    for path, nodes in together.items():
        agents |= await stack.enter_async_context(import_object(path)(nodes, config.endpoint))
    return agents


async def spawn_engine(runtime: Runtime, engine: EngineConfig, policy: PolicyConfig) -> InferCluster:
    """The engines that generate for a policy, spread over their devices."""
    devices = engine.ranks(runtime.devices(engine.devices))
    precision = policy.strategy.precision if engine.precision == "same" else engine.precision
    placement = Placement("engine", devices, concurrency=CONCURRENCY)
    workers = await runtime.spawn(
        InferWorker,
        placement,
        model=policy.model,
        precision=precision,
        max_running=engine.max_running,
        report_every=engine.report_every,
        lora=policy.lora,
        cache_gib=engine.cache_gib if isinstance(engine, EmbeddedEngineConfig) else None,
        draft=engine.draft if isinstance(engine, EmbeddedEngineConfig) else "off",
        external=None if isinstance(engine, EmbeddedEngineConfig) else engine,
        reads_again=engine.reads_again,
        exact=policy.exact,
        train_vision=policy.train_vision,
        notes_routes=policy.replay_routes,
    )
    return InferCluster(workers, max_workers=engine.max_workers or 0)
