"""Bounds that belong together."""

from __future__ import annotations


def check_ordered(low: float, high: float, *, names: str) -> None:
    """Raise ValueError if two bounds leave nothing between them."""
    if low > high:
        raise ValueError(f"nothing lies between {low:g} and {high:g}: swap {names}")
