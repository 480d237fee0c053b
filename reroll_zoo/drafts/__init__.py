"""Drafts of the embedded engine: what siblings, earlier answers and the context itself say comes next."""

from __future__ import annotations

from reroll_zoo.drafts.pace import MeasuredPace, SteadyPace
from reroll_zoo.drafts.siblings import SiblingDrafter


def open_drafter(*, always: bool) -> tuple[SiblingDrafter, MeasuredPace]:
    """Drafts where they are measured to pay, or at every step."""
    return SiblingDrafter(), SteadyPace() if always else MeasuredPace()
