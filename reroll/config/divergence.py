"""How far the policy's distribution is from a teacher's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from reroll.config.base import Node


class _DistanceConfig(Node):
    @property
    def options(self) -> dict[str, Any]:
        """What the function of this kind in `reroll.algo.divergence` takes."""
        return {name: value for name, value in self if name != "kind"}


class ForwardKlConfig(_DistanceConfig):
    """KL(teacher || student): the student covers all that the teacher finds likely."""

    kind: Literal["forward_kl"] = "forward_kl"


class ReverseKlConfig(_DistanceConfig):
    """KL(student || teacher): the student keeps to what the teacher finds likely (MiniLLM)."""

    kind: Literal["reverse_kl"]


class SkewedForwardKlConfig(_DistanceConfig):
    """Forward KL from a mixture of both, which bounds it (DistiLLM)."""

    kind: Literal["skewed_forward_kl"]
    skew: float = Field(default=0.1, gt=0, lt=1)
    """Share of the teacher in the student's place."""


class SkewedReverseKlConfig(_DistanceConfig):
    """Reverse KL from a mixture of both, which bounds it (DistiLLM)."""

    kind: Literal["skewed_reverse_kl"]
    skew: float = Field(default=0.1, gt=0, lt=1)
    """Share of the student in the teacher's place."""


class HeadAndTailKlConfig(_DistanceConfig):
    """Forward KL where the two differ on the teacher's likeliest tokens, reverse KL where they differ on the others (AKL)."""

    kind: Literal["adaptive_kl"]
    head: float = Field(default=0.5, gt=0, lt=1)
    """Probability that the teacher's likeliest tokens reach together."""


class JensenShannonConfig(_DistanceConfig):
    """The generalised Jensen-Shannon divergence (GKD): like the forward KL for a small beta, the reverse for a large one."""

    kind: Literal["js"]
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture that both are compared with."""


DivergenceConfig = Annotated[
    ForwardKlConfig
    | ReverseKlConfig
    | SkewedForwardKlConfig
    | SkewedReverseKlConfig
    | HeadAndTailKlConfig
    | JensenShannonConfig,
    Field(discriminator="kind"),
]
