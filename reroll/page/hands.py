"""What a page may ask of the run that it stands beside."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping


class Hands:
    """Deeds by name, for holders of a token. May be called from any thread."""

    def __init__(self, deeds: Mapping[str, Callable[[], object]], *, is_paused: Callable[[], bool]) -> None:
        self._deeds = deeds
        self.is_paused = is_paused
        self.token = secrets.token_urlsafe(24)

    def is_held_by(self, token: str) -> bool:
        """Whether whoever shows this token may ask for anything."""
        return secrets.compare_digest(token.encode(), self.token.encode())

    def ask(self, deed: str) -> bool:
        """Have it done. Returns whether there is such a deed."""
        if deed not in self._deeds:
            return False
        self._deeds[deed]()
        return True
