"""Environments of other libraries behind the Env seam. A library is imported when the first of its environments is built."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from reroll.config.env_adapters import AdapterConfig
from reroll.envs.base import Env
from reroll.errors import ConfigError, Violation

ADAPTERS: dict[str, tuple[str, str, str]] = {
    "gymnasium": ("gymnasium", "Gymnasium", "gymnasium"),
    "textarena": ("textarena", "TextArena", "textarena"),
    "reasoning_gym_env": ("reasoning_gym", "ReasoningGym", "data"),
    "gem": ("gem", "Gem", "gem"),
    "openenv": ("openenv", "OpenEnv", "openenv"),
    "verifiers": ("verifiers", "Verifiers", "verifiers"),
}
"""By kind: the library's package, which is also the name of its adapter's module here; the class; reroll's extra for it."""


def build_adapter(config: AdapterConfig) -> Env:
    """The environment that a config node describes: the fields of the node are the keyword arguments of the class.

    Raises ConfigError if its package is missing, and what the class raises.
    """
    package, name, extra = ADAPTERS[config.kind]
    try:
        module = import_module(f"{__name__}.{package}")
    except ModuleNotFoundError as error:
        fix = f"pip install 'reroll[{extra}]'"
        raise ConfigError([Violation("kind", f"{config.kind} needs a package that is not installed: {error}", fix)]) from error
    options = {field: value for field, value in config if field != "kind"}
    return cast(Env, getattr(module, name)(**options))
