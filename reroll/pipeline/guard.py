"""The guard: notices that the engine does not write what is trained.

Trainer and engine each compute the log-prob of every token that the engine drew. By the weights that drew it they must say the
same, up to what their precision rounds. If they do not, a push did not arrive, an adapter is missing, a context was mixed up,
and the run would go on learning from what its policy never said. The entry point `sampler` of the group `reroll.diagnosis` says
where to look.
"""

from __future__ import annotations

from dataclasses import dataclass

from reroll.config.parts import EmbeddedEngineConfig
from reroll.config.tree import RlvrConfig
from reroll.observe.metrics import Mean, Stats

MAX_GAP = {"fp32": 1e-3, "bf16": 0.15, "fp8": 0.6}
"""Mean distance in nats. Measured: below 1e-5 in fp32; 0.007 to 0.03 in bf16 (of single tokens over 1); to 0.34 in fp8."""
FOR_OTHER_ENGINES = 2.0
"""So many times as far an engine may be whose kernels are not the trainer's."""
MIN_TOKENS = 32
"""A mean over fewer tells nothing."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A gap that precision does not explain."""

    gap: float
    limit: float
    num_tokens: int
    is_stale: bool
    """Whether it was found on tokens of older weights."""

    def text(self, found: str, *, version: int) -> str:
        """What the user is told, with what was `found` when the batch was looked at again."""
        written_by = f"weights older than version {version}" if self.is_stale else f"version {version} of the weights"
        lines = [
            f"the engine does not write what is trained: its log-probs of {self.num_tokens:,} tokens by {written_by} are "
            f"{self.gap:.3g} nats from the trainer's on average, where {self.limit:g} is the most that is explained by "
            f"precision{' and age' if self.is_stale else ''}. The update of this step is not kept; the last "
            "checkpoint is intact.",
            found,
            "If this is how far the two are meant to be apart, set guard.max_gap (guard.max_stale_gap for older weights), or "
            "guard.enabled=false.",
        ]
        return "\n".join(filter(None, lines))


def max_gap(config: RlvrConfig) -> float:
    """What trainer and engine may be apart by: the coarser precision of the two decides."""
    if config.guard.max_gap is not None:
        return config.guard.max_gap
    limit = max(MAX_GAP[config.policy.strategy.precision], MAX_GAP.get(config.engine.precision, 0.0))
    return limit if isinstance(config.engine, EmbeddedEngineConfig) else FOR_OTHER_ENGINES * limit


def alarm_of(stats: Stats, config: RlvrConfig) -> Alarm | None:
    """Whether an update reports a gap that cannot be: on tokens of the weights of the moment, or on those of older ones."""
    limits = {"current": max_gap(config), "stale": max(config.guard.max_stale_gap, max_gap(config))}
    for age, limit in limits.items():
        found = stats.get(f"train/sampler_gap_{age}")
        # Not a number is beyond any limit too.
        if config.guard.enabled and isinstance(found, Mean) and found.weight >= MIN_TOKENS and not found.value <= limit:
            return Alarm(found.value, limit, int(found.weight), age == "stale")
    return None
