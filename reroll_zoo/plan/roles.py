"""The roles of a run as the planner sees them: who is on which devices, and with what load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from reroll.config.algorithm import OwnCriticConfig
from reroll.config.host import parse_devices
from reroll.config.parts import (
    Devices,
    DeviceSelectionConfig,
    EmbeddedEngineConfig,
    EngineConfig,
    FixedModelConfig,
    LocalRuntimeConfig,
    ModelConfig,
)
from reroll.config.pipeline import PipelineConfig
from reroll.config.reward_hosted import HostedJudgeConfig
from reroll.config.rewards import walk
from reroll.config.strategy import RanksStrategyConfig, StrategyConfig, TorchStrategyConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError, Violation
from reroll.runtime.devices import DeviceMap, Ranks
from reroll_zoo.external_engine.config import ExternalEngineConfig
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.judge.config import JudgeConfig
from reroll_zoo.offline.config import DistillConfig, OfflineConfig
from reroll_zoo.offline.preference_config import DpoConfig, RewardModelConfig
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.memory import (
    GIB,
    RoleMemory,
    Terms,
    Training,
    answer_memory,
    engine_memory,
    host_memory,
    pooled_engine_memory,
    train_memory,
)
from reroll_zoo.plan.shape import ModelShape, shape_of
from reroll_zoo.reward_model.config import ModelRewardConfig

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
"""Of what is computed; an engine's weights in fp8 are counted apart."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Role:
    """One model of the run and the workers that hold it."""

    name: str
    path: str
    """Where the config speaks of it."""
    kind: Literal["train", "answer", "engine"]
    shape: ModelShape
    ranks: tuple[tuple[str, ...], ...]
    """The devices of each worker."""
    memory: RoleMemory
    """On each of its devices."""
    built: Terms
    """When its workers have just been made."""
    left: Terms = field(default_factory=dict)
    """What stays there when another role takes over."""
    how: Training
    host: Terms = field(default_factory=dict)
    """What it keeps in its host's memory while it is on a GPU."""
    tp: int = 1
    max_running: int = 0
    shares_weights: bool = False
    in_fp8: bool = False
    """Whether its linear layers hold 8-bit codes."""

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device for rank in self.ranks for device in rank))


def roles_of(config: PipelineConfig, cluster: ClusterConfig) -> list[Role]:
    """Every role that holds a model, the policy first.

    Raises ModelError if a model's sizes are not known, ConfigError if a role names devices that the cluster does not have.
    """
    return list(_Reader(config, cluster).roles())


def engine_of(roles: Sequence[Role]) -> Role | None:
    """The engine that generates for the policy, if the run has one."""
    return next((role for role in roles if role.name == "engine"), None)


def evicted_ranks(policy: Role, engine: Role) -> Ranks:
    """Engine workers that leave their devices while the policy is trained."""
    devices = DeviceMap({"policy": policy.ranks, "engine": engine.ranks}, independent=["engine"])
    return devices.evicted("engine", by="policy")


@dataclass(frozen=True, slots=True)
class _Reader:
    config: PipelineConfig
    cluster: ClusterConfig

    @property
    def one_process(self) -> bool:
        return isinstance(self.config.runtime, LocalRuntimeConfig)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        config = self.config
        if isinstance(config, OfflineConfig):
            return config.max_tokens
        if not isinstance(config, RlvrConfig):
            return config.policy.strategy.micro_batch_tokens
        if config.envs or config.agents:
            return config.max_total_tokens
        drawn = [config.rollout.of(domain) for domain in ("", *config.rollout.domains)]
        return max(rollout.max_prompt_tokens + rollout.max_tokens for rollout in drawn)

    def roles(self) -> Iterator[Role]:
        config = self.config
        policy = config.policy
        head = not isinstance(config, RewardModelConfig)
        yield self._trained("policy", "policy", policy, policy.model, has_language_head=head)
        if isinstance(config, RlvrConfig):
            yield self._engine(config)
            if config.has_own_reference:
                yield self._fixed("reference", "policy", policy, config.reference.model or policy.model)
            if isinstance(config.critic, OwnCriticConfig):
                model = config.critic.model or policy.model
                yield self._trained("critic", "critic", config.critic, model, has_language_head=False)
            for name, teacher in config.teachers.items():
                yield self._fixed(f"teacher {name}", f"teachers.{name}", teacher, teacher.model)
            yield from self._judges(config)
        if isinstance(config, DpoConfig) and config.loss.uses_reference and not policy.lora:
            yield self._fixed("reference", "policy", policy, policy.model)
        if isinstance(config, DistillConfig):
            yield self._fixed("teacher", "teacher", config.teacher, config.teacher.model)

    def _judges(self, config: RlvrConfig) -> Iterator[Role]:
        for name, node in walk(config.rewards):
            if isinstance(node, ModelRewardConfig):
                yield self._fixed(f"reward {name}", f"rewards.{name}", node, node.model, has_language_head=False)
            elif isinstance(node, JudgeConfig) and isinstance(node.model, HostedJudgeConfig):
                judge = node.model
                shape, size = shape_of(judge.model), VALUE_BYTES[judge.precision]
                devices = self._devices(f"rewards.{name}.model", judge.devices)
                ranks = tuple((devices[rank % len(devices)],) for rank in range(judge.num_workers))
                memory = engine_memory(
                    shape,
                    value_bytes=size,
                    max_running=judge.max_running,
                    longest=self._context(shape, self.longest + node.max_tokens),
                    num_requests=self._num_rows(config),
                    on_cpu=devices == ("cpu",),
                )
                yield Role(
                    name=f"judge {name}",
                    path=f"rewards.{name}.model",
                    kind="engine",
                    shape=shape,
                    ranks=ranks,
                    memory=memory,
                    built=memory.held,
                    how=Training(value_bytes=size, micro_batch_tokens=1),
                    max_running=judge.max_running,
                )

    def _trained(self, name: str, path: str, config: ModelConfig, model: str, *, has_language_head: bool) -> Role:
        shape = shape_of(model)
        ranks = train_ranks(config.strategy, self._devices(path, config.devices))
        lora = shape.lora_parameters(config.lora.rank, config.lora.targets) if config.lora else 0
        how = self._training(config.strategy, ranks, has_language_head=has_language_head, lora_parameters=lora)
        memory = train_memory(shape, how)
        left = {
            "none": memory.held if self.one_process else memory.held | memory.working,
            "optimizer": {term: count for term, count in memory.held.items() if term == "parameters"},
            "all": {},
        }[config.swap]
        return Role(
            name=name,
            path=path,
            kind="train",
            shape=shape,
            ranks=ranks,
            memory=memory,
            built={term: count for term, count in memory.held.items() if term != "optimizer"},
            left=left,
            how=how,
            host=host_memory(shape, how),
            tp=how.tp,
        )

    def _fixed(self, name: str, path: str, config: FixedModelConfig, model: str, *, has_language_head: bool = True) -> Role:
        shape = shape_of(model)
        ranks = train_ranks(config.strategy, self._devices(path, config.devices))
        how = self._training(config.strategy, ranks, has_language_head=has_language_head)
        memory = answer_memory(shape, how)
        return Role(
            name=name,
            path=path,
            kind="answer",
            shape=shape,
            ranks=ranks,
            memory=memory,
            built=memory.held,
            how=how,
            tp=how.tp,
        )

    def _engine(self, config: RlvrConfig) -> Role:
        engine, policy = config.engine, config.policy
        shape = shape_of(policy.model)
        size = VALUE_BYTES[policy.strategy.precision if engine.precision == "same" else engine.precision]
        in_fp8 = engine.precision == "fp8"
        ranks, tp = self._seats(engine), engine.gpus_per_worker
        policy_devices = train_ranks(policy.strategy, self._devices("policy", policy.devices))
        shares = (
            self.one_process
            and config.rollout.max_staleness == 0
            and size == VALUE_BYTES[policy.strategy.precision]
            and {device for rank in ranks for device in rank} <= {device for rank in policy_devices for device in rank}
        )
        if isinstance(engine, ExternalEngineConfig):
            memory = self._pooled(engine, shape, size)
        else:
            memory = engine_memory(
                shape,
                value_bytes=size,
                max_running=engine.max_running,
                longest=self._context(shape, self.longest),
                num_requests=-(-self._num_rows(config) // len(ranks)),
                shares_weights=shares,
                in_fp8=in_fp8,
                on_cpu=ranks[0] == ("cpu",),
                cache_bytes=self._cache_bytes(engine),
            )
        # The embedded engine loads weights before it is given the trainer's; the others take their pool at once.
        weights = {"weights": shape.num_parameters * size // tp}
        built = memory.held | memory.working if isinstance(engine, ExternalEngineConfig) else weights
        if not engine.sleep:
            left = memory.held | memory.working
        else:  # Asleep, the embedded engine keeps its weights; the others put them into the host's memory.
            left = {} if isinstance(engine, ExternalEngineConfig) else memory.held
        room = memory.working["KV cache"] * tp // (self._context(shape, self.longest) * shape.kv_bytes_per_token(size))
        return Role(
            name="engine",
            path="engine",
            kind="engine",
            shape=shape,
            ranks=ranks,
            memory=memory,
            built=built,
            left=left,
            how=Training(value_bytes=size, micro_batch_tokens=1),
            tp=tp,
            max_running=min(engine.max_running, max(1, room)),
            shares_weights=shares,
            in_fp8=in_fp8,
        )

    def _seats(self, engine: EngineConfig) -> tuple[tuple[str, ...], ...]:
        ranks = engine.ranks(self._devices("engine", engine.devices))
        if torn := torn_seat(ranks, self.cluster):
            problem = f"a worker would span GPUs {', '.join(torn)}, which are on several nodes"
            fix = "lower engine.tp, or name GPUs that fill whole nodes"
            raise ConfigError([Violation("engine.devices", problem, fix)])
        return ranks

    @staticmethod
    def _cache_bytes(engine: EngineConfig) -> int | None:
        budget = engine.cache_gib if isinstance(engine, EmbeddedEngineConfig) else None
        return None if budget is None else int(budget * GIB)

    def _pooled(self, engine: ExternalEngineConfig, shape: ModelShape, value_bytes: int) -> RoleMemory:
        longest = min(engine.max_model_len or self.longest, self.longest, shape.max_positions)
        if self._devices("engine", engine.devices) == ("cpu",):
            pool = shape.num_parameters * value_bytes + int(engine.cpu_pool_gib * GIB)
        else:
            spec = self.cluster.part(self._devices("engine", engine.devices)).spec
            pool = int(spec.memory_gib * GIB * engine.gpu_memory_utilization)
        return pooled_engine_memory(shape, value_bytes=value_bytes, tp=engine.tp, pool_bytes=pool, longest=longest)

    def _training(
        self,
        strategy: StrategyConfig,
        ranks: tuple[tuple[str, ...], ...],
        *,
        has_language_head: bool,
        lora_parameters: int = 0,
    ) -> Training:
        sharded = strategy if isinstance(strategy, Fsdp2StrategyConfig) else None
        zero = strategy.zero_stage if isinstance(strategy, RanksStrategyConfig) else None
        shards = max(1, len(ranks) // (sharded.tp * sharded.replicas)) if sharded else None
        sp = sharded.sp if sharded else 1
        return Training(
            value_bytes=VALUE_BYTES[strategy.precision],
            # A row that is longer than the budget goes through by itself.
            micro_batch_tokens=max(strategy.micro_batch_tokens, -(-self.longest // sp)),
            logprob_chunk=strategy.logprob_chunk,
            checkpointing=strategy.gradient_checkpointing,
            longest=self.longest,
            lora_parameters=lora_parameters,
            has_language_head=has_language_head,
            shards=len(ranks) if zero == 3 else shards,
            zero_stage=zero,
            zero_ranks=len(ranks) if zero else 1,
            reshard=sharded is None or sharded.reshard_after_forward,
            tp=sharded.tp if sharded else 1,
            sp=sp,
            ep=sharded.ep if sharded else 1,
            offload=isinstance(strategy, RanksStrategyConfig) and strategy.cpu_offload,
            on_cpu=ranks[0] == ("cpu",),
            host_optimizer=isinstance(strategy, TorchStrategyConfig) and strategy.optimizer == "host" and ranks[0] != ("cpu",),
        )

    def _devices(self, path: str, value: Devices) -> tuple[str, ...]:
        num_gpus = 0 if self.cluster.has_only_cpus else self.cluster.num_devices
        if value == "auto" and self.cluster.is_mixed:
            problem = "is auto, and the cluster has nodes of several kinds"
            raise ConfigError([Violation(f"{path}.devices", problem, "say which, e.g. {gpus: 8, label: {pool: train}}")])
        try:
            devices = parse_devices(value, num_gpus=num_gpus, nodes=self.cluster.gpu_nodes)
        except ValueError as error:
            fix = "write auto, cpu, a number, a range such as 0-3, a list, or {gpus: 4, label: {…}}"
            if isinstance(value, DeviceSelectionConfig):
                fix = "ask for fewer or others, or list the nodes that carry it under cluster.nodes"
            raise ConfigError([Violation(f"{path}.devices", str(error), fix)]) from error
        missing = [device for device in devices if device != "cpu" and int(device) >= num_gpus]
        if missing:
            problem = (
                f"names GPU {', '.join(missing)}, and the plan is for {num_gpus or 'no'} GPU{'s' if num_gpus != 1 else ''}"
            )
            fix = "plan for more of them, e.g. --device h100 --num 8 --nodes 2, or name others"
            raise ConfigError([Violation(f"{path}.devices", problem, fix)])
        return devices

    def _context(self, shape: ModelShape, longest: int) -> int:
        """Tokens that a running sequence is planned to hold in an engine's cache."""
        return max(1, int(min(longest, shape.max_positions) * self.cluster.efficiency.context))

    def _num_rows(self, config: RlvrConfig) -> int:
        """Requests that are in flight at the same time."""
        rollout = config.rollout
        prompts = round(rollout.prompts_per_step * rollout.oversample) * (rollout.max_staleness + 1)
        return prompts * (rollout.group_size + rollout.extra_samples)


def train_ranks(strategy: StrategyConfig, devices: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The device of each training rank: one for `torch`, every one for the others."""
    if not isinstance(strategy, RanksStrategyConfig):
        return ((devices[0],),)
    return tuple((devices[rank % len(devices)],) for rank in range(strategy.num_ranks or len(devices)))


def torn_seat(ranks: tuple[tuple[str, ...], ...], cluster: ClusterConfig) -> tuple[str, ...] | None:
    """A worker's devices that are not all on one node, if there is such a worker: it cannot run."""
    return next((rank for rank in ranks if len({cluster.node_of(device) for device in rank}) > 1), None)
