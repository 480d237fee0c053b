"""From an environment's name and `key=value` options to its config node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from reroll.config.base import Node
from reroll.config.envs import EnvConfig
from reroll.config.explain import faults_in
from reroll.config.load import apply_overrides
from reroll.errors import ConfigError


class _EnvAloneConfig(Node):
    """An environment as it would stand in a file."""

    env: EnvConfig


def load_env(name: str, options: Sequence[str] = ()) -> EnvConfig:
    """The node of a bundled kind with its fields set, or of a `module:Class` with its keyword arguments.

    Raises ConfigError with every violation.
    """
    given: dict[str, Any] = {}
    problems = apply_overrides(given, options)
    is_imported = ":" in name
    tree = {"env": {"kind": "import", "path": name, "options": given} if is_imported else {"kind": name, **given}}
    try:
        node = _EnvAloneConfig.model_validate(tree).env
    except ValidationError as error:
        problems += [fault.violation for fault in faults_in(_EnvAloneConfig, tree, error)]
    if problems:
        raise ConfigError(problems)
    return node
