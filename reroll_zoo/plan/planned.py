"""What the memory and the clock of a plan both go by: the config, and the roles that came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reroll.config.parts import LocalRuntimeConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.tree import RlvrConfig
from reroll_zoo.plan.roles import Role, engine_of


@dataclass(frozen=True, slots=True)
class Planned:
    """A run as it is planned."""

    config: PipelineConfig
    roles: Sequence[Role]

    @property
    def policy(self) -> Role:
        return self.roles[0]

    @property
    def engine(self) -> Role | None:
        return engine_of(self.roles)

    @property
    def one_process(self) -> bool:
        return isinstance(self.config.runtime, LocalRuntimeConfig)

    @property
    def is_async(self) -> bool:
        """Whether the engine writes while the policy is trained."""
        return isinstance(self.config, RlvrConfig) and self.config.rollout.max_staleness > 0
