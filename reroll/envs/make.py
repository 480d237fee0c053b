"""From a config node to an environment. What an environment needs is imported when the first of its kind is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from reroll.config.env_grid import FrozenLakeEnv, SokobanEnv
from reroll.config.env_tools import PythonMathEnv, RetrievalQaEnv, ToolEnv
from reroll.config.env_webshop import WebShopEnv
from reroll.config.envs import EnvConfig, ImportEnv
from reroll.config.imports import import_object
from reroll.envs.adapters import ADAPTERS, build_adapter
from reroll.envs.base import Env
from reroll.errors import RerollError
from reroll.runtime.children import last_lines

BUNDLED: dict[str, tuple[str, str]] = {
    "frozen_lake": ("reroll.envs.frozen_lake", "FrozenLake"),
    "sokoban": ("reroll.envs.sokoban", "Sokoban"),
    "webshop": ("reroll.envs.webshop", "WebShop"),
    "python_math": ("reroll.envs.python_math", "PythonMath"),
    "retrieval_qa": ("reroll.envs.retrieval_qa", "RetrievalQa"),
    "tools": ("reroll.envs.tools.tasks", "ToolTasks"),
}
"""Module and class, by kind. The fields of the config node are the keyword arguments of the class."""


def make_env(node: EnvConfig) -> Env:
    """A new environment. Raises what its module or its class raises."""
    if isinstance(node, ImportEnv):
        made: Env = _imported(node)(**node.options)
        return made
    if isinstance(node, FrozenLakeEnv | SokobanEnv | WebShopEnv | PythonMathEnv | RetrievalQaEnv | ToolEnv):
        module, name = BUNDLED[node.kind]
        options = {field: value for field, value in node if field != "kind"}
        bundled: Env = getattr(import_module(module), name)(**options)
        return bundled
    return build_adapter(node)


def env_name(node: EnvConfig) -> str:
    """How messages call it: a user's class by its path, all others by their kind."""
    return node.path if isinstance(node, ImportEnv) else node.kind


def import_problems(nodes: Mapping[str, EnvConfig]) -> dict[str, str]:
    """Import what the environments of all domains need, ahead of the first episode. Domains that cannot, and why."""
    problems: dict[str, str] = {}
    for domain, node in nodes.items():
        try:
            _import(node)
        except RerollError as error:
            problems[domain] = str(error)
        except (Exception, SystemExit) as error:
            problems[domain] = last_lines(error)
    return problems


def _import(node: EnvConfig) -> None:
    if isinstance(node, ImportEnv):
        _check_options(_imported(node), node)
    elif node.kind in BUNDLED:
        import_module(BUNDLED[node.kind][0])
    else:
        import_module(f"reroll.envs.adapters.{ADAPTERS[node.kind][0]}")


def _imported(node: ImportEnv) -> Callable[..., Any]:
    found = import_object(node.path)
    if not callable(found):
        raise TypeError(f"{node.path} is a {type(found).__name__}: name a class with reset, step and close")
    return found  # type: ignore[no-any-return]


def _check_options(make: Callable[..., Any], node: ImportEnv) -> None:
    try:
        signature = inspect.signature(make)
    except ValueError:  # Some classes written in C do not tell.
        return
    try:
        signature.bind(**node.options)
    except TypeError as error:
        raise TypeError(f"{node.path} does not take these options: {error}") from None
