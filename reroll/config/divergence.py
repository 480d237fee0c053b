"""How far the policy's distribution is from a teacher's."""

from __future__ import annotations

from typing import ClassVar, Literal

from reroll.config.formula import FormulaConfig


class DivergenceConfig(FormulaConfig):
    """A distance between two distributions. What a kind `runs` is `(student, teacher, **arguments) -> [C]`, as in
    `reroll.algo.divergence`. Kinds are found by their entry points, group `reroll.divergences`."""

    group: ClassVar[str] = "reroll.divergences"


class ReverseKlConfig(DivergenceConfig):
    """KL(student || teacher): the student keeps to what the teacher finds likely (MiniLLM)."""

    runs: ClassVar[str] = "reroll.algo.divergence:reverse_kl"

    kind: Literal["reverse_kl"] = "reverse_kl"
