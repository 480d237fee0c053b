"""The sorting task's reward in two named parts, for algorithms that weigh the parts of a reward."""

from __future__ import annotations

from reroll.types import Prompt, Score, Trajectory


def digits_and_exactness(prompt: Prompt, trajectory: Trajectory) -> Score:
    """The value is one or zero, as in all other rows; the parts are the share of digits in place, and exactness."""
    wanted, given = prompt.answer or "", trajectory.text.strip()
    right = sum(digit == other for digit, other in zip(wanted, given, strict=False))
    exact = float(given == wanted)
    return Score(value=exact, parts={"digits": right / len(wanted), "exact": exact})
