"""One step on the clock: who works when, on which devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reroll.config.pipeline import PipelineConfig
from reroll.config.tree import RlvrConfig
from reroll_zoo.external_engine.config import ExternalEngineConfig
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.fsdp2.layout import RankLayout
from reroll_zoo.offline.config import OfflineConfig
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.planned import Planned
from reroll_zoo.plan.push import Push, gather_seconds, push_way, ring_seconds, sent_bytes, store_seconds, taken_seconds
from reroll_zoo.plan.roles import Role, evicted_ranks
from reroll_zoo.plan.timing import Rows, answer_seconds, generate_seconds, optimizer_seconds, train_seconds


@dataclass(frozen=True, slots=True)
class Bar:
    """A role at work on some devices, for a part of a step."""

    role: str
    phase: str
    devices: tuple[str, ...]
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def bars_of(config: PipelineConfig, cluster: ClusterConfig, roles: Sequence[Role]) -> tuple[Bar, ...]:
    """The phases of one step, from second 0."""
    return tuple(_Clock(config, roles, cluster).bars())


@dataclass(frozen=True, slots=True)
class _Clock(Planned):
    cluster: ClusterConfig

    def rows(self) -> Rows:
        share = self.cluster.efficiency.length
        if not isinstance(self.config, RlvrConfig):
            tokens = self.policy.how.longest
            rows = self.config.rows_per_step if isinstance(self.config, OfflineConfig) else 1
            return Rows(num_rows=rows, prompt_tokens=0, written_tokens=share * tokens, longest_written=tokens, num_prompts=rows)
        rollout = self.config.rollout
        longest = self.policy.how.longest
        written = max(1, longest - rollout.max_prompt_tokens)
        return Rows(
            num_rows=rollout.prompts_per_step * rollout.group_size,
            prompt_tokens=share * rollout.max_prompt_tokens,
            written_tokens=share * written,
            longest_written=written,
            num_prompts=rollout.prompts_per_step,
        )

    def bars(self) -> list[Bar]:
        """The phases of one step. With a staleness budget, engine workers that keep their devices write during training."""
        update = self._update_bars()
        busy_s = update[-1].end_s
        if self.engine is None:
            return update
        everyone, generate_s, push_s = self.engine.devices, self._generate_seconds(), self._push_seconds()
        evicted = evicted_ranks(self.policy, self.engine)
        staying = tuple(rank for rank in range(len(self.engine.ranks)) if rank not in evicted)
        free = tuple(dict.fromkeys(device for rank in staying for device in self.engine.ranks[rank]))
        if everyone == self.policy.devices == ("cpu",):
            staying = ()  # They share the cores: side by side they would be no faster.
        if not self.is_async or not staying:
            update = [Bar(b.role, b.phase, b.devices, b.start_s + generate_s, b.end_s + generate_s) for b in update]
            end_s = generate_s + busy_s
            generating = [Bar("engine", "generate", everyone, 0.0, generate_s)]
        elif free == everyone:
            end_s = max(busy_s, generate_s)
            generating = [Bar("engine", "generate", everyone, 0.0, generate_s)]
        else:
            share = len(staying) / len(self.engine.ranks)
            end_s = max(busy_s, busy_s + generate_s - busy_s * share)
            generating = [Bar("engine", "generate", free, 0.0, min(busy_s, generate_s / share))]
            if end_s > busy_s:
                generating.append(Bar("engine", "generate", everyone, busy_s, end_s))
        both = tuple(dict.fromkeys((*self.policy.devices, *everyone)))
        return [*generating, *update, Bar("push", "push", both, end_s, end_s + push_s)]

    def _update_bars(self) -> list[Bar]:
        """All that happens under the policy's lease, one after the other."""
        bars: list[Bar] = []
        start_s = 0.0
        for role in (*self.roles[1:], self.policy):
            if role.kind == "engine" or role.name.startswith("reward "):
                continue  # Engines write on their own time, and so do those who judge what they wrote.
            phase = "train" if role.kind == "train" else "score"
            end_s = start_s + self._update_seconds(role)
            bars.append(Bar(role.name, phase, role.devices, start_s, end_s))
            start_s = end_s
        return bars

    def _update_seconds(self, role: Role) -> float:
        rows, num_devices = self.rows(), len(role.ranks)
        if role.devices == ("cpu",):
            num_devices = role.tp  # However many ranks there are, they share the one CPU.
        cluster = self.cluster.part(role.devices)
        score_s = answer_seconds(role.shape, role.how, rows, cluster, num_devices=num_devices)
        if role.kind == "answer":
            return score_s
        train_s = train_seconds(role.shape, role.how, rows, cluster, num_devices=num_devices)
        optimizer_s = optimizer_seconds(role.shape, role.how, cluster)
        if not isinstance(self.config, RlvrConfig):
            return train_s + optimizer_s
        # With several optimizer steps the old log-probs are asked for first; a critic is always asked first.
        passes = self.config.train.epochs
        asks = role.name == "critic" or (passes * self.config.train.mini_batches > 1 and not self.is_async)
        return passes * (train_s + self.config.train.mini_batches * optimizer_s) + (score_s if asks else 0.0)

    def _generate_seconds(self) -> float:
        engine = self.engine
        assert engine is not None
        num_workers = 1 if engine.devices == ("cpu",) else len(engine.devices) // engine.tp
        return generate_seconds(
            engine.shape,
            self.rows(),
            self.cluster.part(engine.devices),
            value_bytes=engine.how.value_bytes,
            num_workers=num_workers,
            tp=engine.tp,
            max_running=engine.max_running * max(1, len(engine.ranks) // num_workers),
            in_fp8=engine.in_fp8,
        )

    def _push_seconds(self) -> float:
        engine, policy = self.engine, self.policy
        assert engine is not None
        if self.one_process:
            return 0.0
        cluster, sent = self.cluster.part(self._gpus_of(policy, engine)), self._sent_bytes()
        push = Push(sent=sent, senders=policy.devices, engines=tuple(rank[0] for rank in engine.ranks))
        way = push_way(push, self.config.weights.kind if isinstance(self.config, RlvrConfig) else "auto")
        is_gathered = way == "beside" or not isinstance(self.config.policy.strategy, Fsdp2StrategyConfig)
        travel_s = gather_seconds(push.num_bytes, policy.devices, self.cluster) if is_gathered and policy.how.cut > 1 else 0.0
        if way == "store":
            return travel_s + store_seconds(push, cluster, self.cluster)
        if way == "ring":
            travel_s = max(travel_s, ring_seconds(push, self.cluster))
        return taken_seconds(travel_s, push.num_bytes, cluster, tp=engine.tp, waits_on_host=self._waits_on_host(engine))

    def _sent_bytes(self) -> tuple[int, ...]:
        """Of each rank of the policy: its part, or all from the first where they gather."""
        policy, how = self.policy, self.policy.how
        num_ranks, strategy = len(policy.ranks), self.config.policy.strategy
        if not isinstance(strategy, Fsdp2StrategyConfig):
            trained = how.lora_parameters or policy.shape.num_parameters
            return (trained * how.value_bytes, *[0] * (num_ranks - 1))
        if how.lora_parameters:
            return (-(-how.lora_parameters * how.value_bytes // num_ranks),) * num_ranks
        layout = RankLayout(num_ranks=num_ranks, tp=strategy.tp, ep=strategy.ep, replicas=strategy.replicas)
        return sent_bytes(policy.shape, layout, value_bytes=how.value_bytes)

    def _waits_on_host(self, engine: Role) -> bool:
        """Whether the engine loads its weights in one call, when the last has come."""
        if not isinstance(self.config, RlvrConfig) or not isinstance(self.config.engine, ExternalEngineConfig):
            return False
        return engine.tp > 1 or bool(engine.shape.num_experts) or bool(self.policy.how.lora_parameters)

    @staticmethod
    def _gpus_of(*roles: Role) -> tuple[str, ...]:
        """All of their devices; the CPU only where there is nothing else."""
        return tuple(dict.fromkeys(device for role in roles for device in role.devices if device != "cpu")) or ("cpu",)
