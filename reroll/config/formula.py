"""Kinds that stand for a pure function: estimators, losses, divergences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reroll.config.imports import import_object
from reroll.config.registry import KindConfig, find_kind


class FormulaConfig(KindConfig):
    """A node whose `runs` names a function of tensors, and whose other fields are the function's keyword arguments."""

    @property
    def function_name(self) -> str:
        """What `find_function` finds it by: the kind, or `module:name`."""
        return self.kind

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the function."""
        return {name: value for name, value in self if name != "kind"}


def find_function(group: str, name: str) -> Callable[..., Any]:
    """The function of a kind of this group, or the one that `module:name` names. Raises ValueError if there is no such kind."""
    if ":" in name:
        found: Callable[..., Any] = import_object(name)
        return found
    node = find_kind(group, name)
    if node is None:
        raise ValueError(f"no package registered {name} in {group}: name one that is there, or write module:function")
    return import_object(node.runs)  # type: ignore[no-any-return]
