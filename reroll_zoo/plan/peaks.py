"""What every device holds at its fullest: who is there in which phase, and with what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reroll.config.pipeline import PipelineConfig
from reroll_zoo.plan.memory import CONTEXT_BYTES, Terms
from reroll_zoo.plan.planned import Planned
from reroll_zoo.plan.roles import Role, evicted_ranks


@dataclass(frozen=True, slots=True)
class Term:
    """A part of what a device holds."""

    role: str
    name: str
    num_bytes: int


CERTAIN = {"parameters", "weights", "gradients", "fp32 masters", "optimizer", "CUDA context"}
"""Terms that follow from the model's sizes alone."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """A device at its fullest."""

    device: str
    phase: str
    """When that is."""
    terms: tuple[Term, ...]

    @property
    def num_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)

    @property
    def num_certain_bytes(self) -> int:
        """Without what is an upper bound: kernels that are fused keep less, and caches are seldom full."""
        return sum(term.num_bytes for term in self.terms if term.name in CERTAIN)


def loads_of(config: PipelineConfig, roles: Sequence[Role]) -> tuple[DeviceLoad, ...]:
    """Every device in use at its fullest; GPUs in their order, then the CPU."""
    return tuple(_Peaks(config, roles).loads())


def _num_ranks(role: Role, device: str) -> int:
    """Workers of a role that sit on a device."""
    return len([rank for rank in role.ranks if device in rank])


@dataclass(frozen=True, slots=True)
class _Peaks(Planned):
    def loads(self) -> Iterator[DeviceLoad]:
        devices = dict.fromkeys(device for role in self.roles for device in role.devices)
        for device in sorted(devices, key=lambda name: (name == "cpu", len(name), name)):
            moments = [DeviceLoad(device, phase, tuple(terms)) for phase, terms in self._moments(device)]
            yield max(moments, key=lambda load: load.num_bytes)

    def _moments(self, device: str) -> Iterator[tuple[str, list[Term]]]:
        """What a device holds in each phase."""
        here = [role for role in self.roles if device in role.devices]
        for working in here:
            phase = {"train": "train", "answer": "score", "engine": "generate"}[working.kind]
            absent = self._absent(device, working)
            holding: dict[Role, Terms] = {}
            for role in here:
                if role.name in absent:
                    holding[role] = role.left
                elif role is working or not self.one_process or (self.is_async and role.name in ("policy", "engine")):
                    # A process keeps what it once took for its work, to take it again.
                    holding[role] = role.memory.held | role.memory.working
                else:
                    holding[role] = role.memory.held
            yield phase, self._terms(device, holding)
        yield "start", self._terms(device, {role: role.built for role in here})

    def _terms(self, device: str, holding: Mapping[Role, Terms]) -> list[Term]:
        terms = [
            Term(role.name, name, num_bytes * _num_ranks(role, device))
            for role, held in holding.items()
            for name, num_bytes in held.items()
        ]
        if device != "cpu":
            num_processes = 1 if self.one_process else sum(_num_ranks(role, device) for role in holding)
            terms.append(Term("process", "CUDA context", num_processes * CONTEXT_BYTES))
        return terms

    def _absent(self, device: str, working: Role) -> set[str]:
        """Roles that have left the device while another one works: of policy and engine, where they share it, the other."""
        policy, engine = self.policy, self.engine
        if device == "cpu" or engine is None or not set(policy.devices) & set(engine.devices):
            return set()
        if working is engine:
            return {"policy"}
        left = {device for rank in evicted_ranks(policy, engine) for device in engine.ranks[rank]}
        return {"engine"} if device in left else set()
