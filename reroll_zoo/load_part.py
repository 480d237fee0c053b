"""One part of a config alone: an environment by its name; a reward by its name, or by a run's YAML and a domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reroll.config.base import Node
from reroll.config.check import module_exists
from reroll.config.check_rewards import nodes_violations
from reroll.config.data import DataConfig, SourceConfig
from reroll.config.envs import EnvConfig
from reroll.config.explain import faults_in
from reroll.config.load import apply_overrides, read_yaml
from reroll.config.reward_base import RewardConfig
from reroll.errors import ConfigError, Violation


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


class _RewardsAloneConfig(Node):
    """The part of a file that says what is judged and how."""

    rewards: dict[str, RewardConfig]
    data: DataConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedReward:
    """A reward to try."""

    name: str
    node: RewardConfig
    sources: tuple[SourceConfig, ...] = ()
    """Where the rows of its domain come from, as far as the file says."""
    folder: Path = Path()
    """Where its code may lie beside the working directory."""


def load_reward(target: str, words: Sequence[str] = ()) -> AskedReward:
    """The reward that a command names: `FILE.yaml [DOMAIN]`, a kind, or a `module:function` of the user's; then `key=value`s.

    Of a file only `rewards` and `data` are looked at. Raises ConfigError with every violation.
    """
    options = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    if target.endswith((".yaml", ".yml")):
        asked, file = _from_file(Path(target), options), Path(target)
        asked_for = _chosen(asked, names, file)
        node = asked.rewards[asked_for]
        every = [*asked.data.train, *asked.data.eval] if asked.data else []
        loaded = AskedReward(
            name=asked_for,
            node=node,
            sources=tuple(source for source in every if source.domain == asked_for or asked_for == "default"),
            folder=file.parent,
        )
    else:
        loaded = AskedReward(name=target.partition(":")[2] or target, node=_from_name(target, [*names, *options]))
    is_there = partial(module_exists, folder=loaded.folder)
    found = nodes_violations({loaded.name: loaded.node}, folder=loaded.folder, module_exists=is_there)
    if violations := list(found):
        raise ConfigError(violations)
    return loaded


def _from_file(file: Path, overrides: Sequence[str]) -> _RewardsAloneConfig:
    tree = read_yaml(file)
    problems = apply_overrides(tree, overrides)
    if problems:
        raise ConfigError(problems)
    return _validated({key: tree[key] for key in ("rewards", "data") if key in tree})


def _from_name(name: str, options: Sequence[str]) -> RewardConfig:
    given: dict[str, Any] = {}
    if problems := apply_overrides(given, options):
        raise ConfigError(problems)
    own = {"kind": "import", "path": name, "options": given} if ":" in name else {"kind": name, **given}
    return _validated({"rewards": {name: own}}).rewards[name]


def _validated(tree: dict[str, Any]) -> _RewardsAloneConfig:
    try:
        return _RewardsAloneConfig.model_validate(tree)
    except ValidationError as error:
        found = [fault.violation for fault in faults_in(_RewardsAloneConfig, tree, error)]
        raise ConfigError(found) from error


def _chosen(asked: _RewardsAloneConfig, names: Sequence[str], file: Path) -> str:
    known = ", ".join(asked.rewards) or "none"
    name = names[0] if names else next(iter(asked.rewards), "")
    if len(names) > 1 or (not names and len(asked.rewards) != 1):
        raise ConfigError([Violation(str(file), f"which of its rewards? It has: {known}", "name one domain behind the file")])
    if name not in asked.rewards:
        raise ConfigError([Violation(f"rewards.{name}", f"is not in {file}, which has: {known}", "name one of these domains")])
    return name
