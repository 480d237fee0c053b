"""From a YAML file and `key=value` overrides to a checked config, or to the list of everything wrong with it."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from reroll.config.check import violations_of
from reroll.config.distill import DistillConfig
from reroll.config.explain import explain, yaml_path
from reroll.config.offline import SftConfig
from reroll.config.preference import DpoConfig, RewardModelConfig
from reroll.config.presets import PRESETS
from reroll.config.tree import AnyConfig, Config, RlvrConfig
from reroll.errors import ConfigError, Violation

PIPELINES: dict[str, type[AnyConfig]] = {
    "rlvr": RlvrConfig,
    "agentic": RlvrConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
    "reward_model": RewardModelConfig,
    "distill": DistillConfig,
}
_ADAPTER: TypeAdapter[AnyConfig] = TypeAdapter(Config)

# Stand-ins for required fields that are missing, so that the rest of the file is still checked in the same pass.
_STAND_INS: dict[str, Any] = {
    "policy": {"model": "some/model"},
    "teacher": {"model": "some/model"},
    "model": "some/model",
    "data": {"train": [{"kind": "reasoning_gym", "name": "chain_sum"}]},
    "train": [{"kind": "reasoning_gym", "name": "chain_sum"}],
    "rewards": {"default": {"kind": "exact"}},
    "path": "/",
    "name": "chain_sum",
}


def load_config(path: Path, overrides: Sequence[str] = (), *, runs_here: bool = True) -> AnyConfig:
    """The config in this file with `key=value` overrides applied. Raises ConfigError with every violation.

    One that does not run here is only planned: its files, packages and devices are another machine's, and not looked for.
    """
    tree = read_yaml(path)
    problems = apply_overrides(tree, overrides)
    return parse_config(tree, problems=problems, folder=path.parent, runs_here=runs_here)


def parse_config(
    tree: dict[str, Any], *, problems: Sequence[Violation] = (), folder: Path | None = None, runs_here: bool = True
) -> AnyConfig:
    """As `load_config`, from a plain dict. `folder` is where user code may lie beside the working directory."""
    problems = list(problems)
    if tree.get("pipeline") not in PIPELINES:
        problems.append(
            Violation("pipeline", f"is {tree.get('pipeline')!r}", f"set pipeline to one of: {', '.join(PIPELINES)}")
        )
        raise ConfigError(problems)
    if PIPELINES[tree["pipeline"]] is RlvrConfig:
        problems += _expand_preset(tree)
    config, field_problems, unchecked = _validate(tree)
    problems += field_problems
    if config is not None and runs_here:
        found = violations_of(config, folder=folder or Path())
        problems += [violation for violation in found if not violation.path.startswith(tuple(unchecked))]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def dump_config(config: AnyConfig) -> str:
    """The whole tree as YAML, presets and defaults written out; loads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """The tree in a file. Raises ConfigError."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            [Violation(str(path), f"cannot be read: {error.strerror}", "give the path of a YAML file")]
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError([Violation(str(path), f"is not YAML: {error}", "mend the line it names")]) from error
    if not isinstance(tree, dict):
        raise ConfigError([Violation(str(path), "holds no mapping", "start with `pipeline: rlvr`")])
    return tree


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> list[Violation]:
    """Write `key=value` pairs into a tree. Those that cannot be, and why."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
            problems.append(Violation(override, "is not key=value", "write e.g. rollout.group_size=8"))
            continue
        try:
            _set(tree, key.split("."), yaml.safe_load(text))
        except (yaml.YAMLError, KeyError, IndexError, ValueError, TypeError):
            problems.append(Violation(key, f"cannot be set to {text!r}", "check the path and the value's YAML"))
    return problems


def _set(node: Any, keys: list[str], value: Any) -> None:
    """Set a dotted path in nested dicts and lists, making dicts on the way."""
    head, *rest = keys
    index: Any = int(head) if isinstance(node, list) else head
    if not rest:
        node[index] = value
    elif isinstance(node, dict):
        if node.get(head) is None or isinstance(node[head], str | int | float):
            node[head] = {}
        _set(node[head], rest, value)
    else:
        _set(node[index], rest, value)


def _expand_preset(tree: dict[str, Any]) -> list[Violation]:
    """Fill in the fields that the preset stands for; what the user wrote wins."""
    name = tree.get("algorithm", "grpo")
    if name not in PRESETS:
        hint = difflib.get_close_matches(str(name), PRESETS, n=1)
        fix = f"did you mean {hint[0]}? " if hint else ""
        return [Violation("algorithm", f"{name!r} is no preset", f"{fix}choose one of: {', '.join(PRESETS)}")]
    _fill(tree, PRESETS[name])
    return []


def _fill(mine: dict[str, Any], preset: Mapping[str, Any]) -> None:
    """Write the preset's values where the user wrote none. Of a node that the user made another `kind`, none is right."""
    for field, value in preset.items():
        if not isinstance(value, dict):
            mine.setdefault(field, copy.deepcopy(value))
        elif mine.get(field) is None:
            mine[field] = copy.deepcopy(value)
        elif isinstance(mine[field], dict) and mine[field].get("kind", value.get("kind")) == value.get("kind"):
            _fill(mine[field], value)


def _validate(tree: dict[str, Any]) -> tuple[AnyConfig | None, list[Violation], list[str]]:
    """Field by field. Bad fields are reported, then set aside so that checks across fields still see the rest.

    Returns the config (None if nothing could be saved), the violations, and the paths that hold stand-ins.
    """
    problems: list[Violation] = []
    unchecked: list[str] = []
    for _ in range(20):  # setting a field aside can uncover others below it, never endlessly
        try:
            return _ADAPTER.validate_python(tree), problems, unchecked
        except ValidationError as error:
            found = [(yaml_path(tree, detail), detail) for detail in error.errors()]
            problems += [explain(PIPELINES[tree["pipeline"]], tree, path, detail) for path, detail in found]
            unchecked += [".".join(map(str, path)) for path, _ in found]
            for path, detail in found:
                _set_aside(tree, path, detail)
    return None, problems, unchecked


def _set_aside(tree: Any, path: list[str | int], detail: ErrorDetails) -> None:
    if path[0] == "rewards" and len(path) > 1:  # Each kind asks for fields of its own: a whole one takes the place.
        tree["rewards"][path[1]] = _STAND_INS["rewards"]["default"]
        return
    node = tree
    for part in path[:-1]:
        node = node[part]
    last: Any = path[-1]
    if detail["type"] == "missing":
        node[last] = _STAND_INS.get(str(last), "")
    elif isinstance(node, list):
        node[last] = {"kind": "reasoning_gym", "name": "chain_sum"}
    elif last in _STAND_INS and detail["type"] != "extra_forbidden":
        node[last] = _STAND_INS[last]
    else:
        node.pop(last, None)
