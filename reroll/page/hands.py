"""What a page may ask of the run that it stands beside."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where a run's page is served, and what whoever may act on the run must show."""

    port: int
    """0 takes a free one."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))


@dataclass(frozen=True, slots=True)
class Hands:
    """Deeds by name. May be called from any thread."""

    deeds: Mapping[str, Callable[[], object]]
    is_paused: Callable[[], bool]
