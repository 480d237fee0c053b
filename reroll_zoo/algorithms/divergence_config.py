"""Divergences: one node a kind, its fields the arguments of the function of that name in `divergences`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.divergence import DivergenceConfig


class ForwardKlConfig(DivergenceConfig):
    """KL(teacher || student): the student covers all that the teacher finds likely."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.divergences:forward_kl"

    kind: Literal["forward_kl"] = "forward_kl"


class SkewedForwardKlConfig(DivergenceConfig):
    """Forward KL from a mixture of both, which bounds it (DistiLLM)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.divergences:skewed_forward_kl"

    kind: Literal["skewed_forward_kl"]
    skew: float = Field(default=0.1, gt=0, lt=1)
    """Share of the teacher in the student's place."""


class SkewedReverseKlConfig(DivergenceConfig):
    """Reverse KL from a mixture of both, which bounds it (DistiLLM)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.divergences:skewed_reverse_kl"

    kind: Literal["skewed_reverse_kl"]
    skew: float = Field(default=0.1, gt=0, lt=1)
    """Share of the student in the teacher's place."""


class HeadAndTailKlConfig(DivergenceConfig):
    """Forward KL where the two differ on the teacher's likeliest tokens, reverse KL where they differ on the others (AKL)."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.divergences:adaptive_kl"

    kind: Literal["adaptive_kl"]
    head: float = Field(default=0.5, gt=0, lt=1)
    """Probability that the teacher's likeliest tokens reach together."""


class JensenShannonConfig(DivergenceConfig):
    """The generalised Jensen-Shannon divergence (GKD): like the forward KL for a small beta, the reverse for a large one."""

    runs: ClassVar[str] = "reroll_zoo.algorithms.divergences:js"

    kind: Literal["js"]
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture that both are compared with."""
