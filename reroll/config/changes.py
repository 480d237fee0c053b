"""What differs between two configs, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Change(NamedTuple):
    """One value that is another. None stands for null, and for what is not there."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path} {_shown(self.old)} → {_shown(self.new)}"


def changes_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every leaf that differs, in the order of `new`. Lists are leaves, unless they are as long and hold sections."""
    return list(_changes("", old, new))


def _changes(path: str, old: Any, new: Any) -> list[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = dict.fromkeys([*new, *old])
        return [found for name in names for found in _changes(f"{path}.{name}".lstrip("."), old.get(name), new.get(name))]
    if _holds_sections(old) and _holds_sections(new) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [found for index, (before, after) in pairs for found in _changes(f"{path}.{index}", before, after)]
    return [] if old == new else [Change(path, old, new)]


def _holds_sections(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
