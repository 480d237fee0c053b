"""From a YAML file and `key=value` overrides to a checked config, or to the list of everything wrong with it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from reroll.config.base import Node
from reroll.config.check import violations_of
from reroll.config.explain import FieldFault, did_you_mean, faults_in, flags_for_numbers, known_part, with_new_names
from reroll.config.imports import ObjectPath, import_object, search_in
from reroll.config.pipeline import PipelineConfig, find_pipeline, pipeline_names, pipelines
from reroll.config.presets import presets
from reroll.config.registry import load_entry
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError, Violation


def load_config(
    path: Path, overrides: Sequence[str] = (), *, runs_here: bool = True, is_of_run: bool = False
) -> PipelineConfig:
    """The config in this file with `key=value` overrides applied. Raises ConfigError with every violation.

    One that does not run here is only planned: its files, packages and devices are another machine's, and not looked for.
    That of a run may have been written by an earlier version, under the names of then.
    """
    tree = read_yaml(path)
    if is_of_run:
        tree = with_new_names(config_class_of(tree, folder=path.parent), tree)
    problems = apply_overrides(tree, overrides)
    return parse_config(tree, problems=problems, folder=path.parent, runs_here=runs_here)


def parse_config(
    tree: dict[str, Any], *, problems: Sequence[Violation] = (), folder: Path | None = None, runs_here: bool = True
) -> PipelineConfig:
    """As `load_config`, from a plain dict. `folder` is where user code may lie beside the working directory."""
    problems, tree = list(problems), with_imports(tree)
    try:
        root = config_class_of(tree, folder=folder or Path())
    except ConfigError as error:
        problems += error.violations
        # The rest is looked at as what it looks like.
        name, root = max(pipelines().items(), key=lambda known: len(tree.keys() & known[1].model_fields.keys()))
        tree = tree | {"pipeline": name}
    if issubclass(root, RlvrConfig):
        problems += _expand_preset(tree)
    config, faults = _validate(root, tree)
    problems += faults
    if runs_here:
        problems += violations_of(config, folder=folder or Path())
    if problems:
        raise ConfigError(problems)
    return config


def config_class_of(tree: Mapping[str, Any], *, folder: Path) -> type[PipelineConfig]:
    """The class that the tree is read as, by its `pipeline`. Raises ConfigError."""
    name = tree.get("pipeline")
    name = ObjectPath(name, travels=False) if isinstance(name, type) else name
    problem, fix = "is missing", f"set pipeline to one of: {', '.join(pipeline_names())}; or to your own, as module:Class"
    if name is not None:
        problem = f"{name!r} is unknown"
    if isinstance(name, str) and ":" in name:
        search_in([folder, Path()])
        try:
            root = import_object(name).config_class
        except (ImportError, AttributeError) as error:
            problem, fix = f"{name} cannot be used: {error}", "name a subclass of reroll.Pipeline as module:Class"
        else:
            if issubclass(root, PipelineConfig):
                return root  # type: ignore[no-any-return]
            problem, fix = f"{name}.config_class is {root.__name__}", "derive it from reroll.RlvrConfig or another pipeline's"
    elif isinstance(name, str):
        try:
            if found := find_pipeline(name):
                return found
        except ValueError as error:
            problem, fix = str(error), "mend or uninstall that package"
    raise ConfigError([Violation("pipeline", problem, fix)])


def with_imports(tree: Any, *, kind: str = "import") -> Any:
    """The tree with Python objects written as nodes: a function or class in the place of `{kind: import, path: …}`, and
    config nodes as the fields that were given to them.
    """
    if isinstance(tree, Node):
        tree = tree.given()
    if isinstance(tree, Mapping):
        return {
            key: value if key in ("path", "pipeline") else with_imports(value, kind="function" if key == "agents" else kind)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [with_imports(item, kind=kind) for item in tree]
    return {"kind": kind, "path": tree} if callable(tree) else tree


def dump_config(config: PipelineConfig) -> str:
    """The whole tree as YAML, presets and defaults written out; loads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """The tree in a file. Raises ConfigError."""
    try:
        loader = _Loader(path.read_bytes().decode("utf-8-sig"))
        tree = loader.get_single_data()
        json.dumps(tree, default=str, skipkeys=True)  # An alias inside of what it stands for has no end: ValueError.
    except OSError as error:
        problem, fix = f"cannot be read: {error.strerror}", "give the path of a YAML file"
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem, fix = f"is not UTF-8 in line {line}", "save the file as UTF-8"
    except (yaml.YAMLError, ValueError) as error:  # The second also for dates such as 2026-02-30.
        problem, fix = f"is not YAML: {error}", "mend the line it names"
    else:
        if loader.repeated:
            raise ConfigError(loader.repeated)
        if isinstance(tree, dict):
            return tree
        problem, fix = "holds no mapping", "start with `pipeline: rlvr`"
    raise ConfigError([Violation(str(path), problem, fix)])


class _Loader(yaml.SafeLoader):
    """Remembers keys that stand twice in one mapping, of which YAML would silently keep the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[Violation] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    problem = f"stands twice, in line {lines[key.value]} and in line {line}"
                    self.repeated.append(Violation(key.value, problem, "keep one of them"))
                lines[key.value] = line
        return super().construct_mapping(node, deep=deep)


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
    if not isinstance(name, str):
        return []  # Which is a fault of the field's own.
    known = presets()
    if name not in known:
        fix = f"{did_you_mean(name, known)}choose one of: {', '.join(known)}"
        return [Violation("algorithm", f"{name!r} is no preset", fix)]
    _fill(tree, known[name])
    if implied := load_entry("reroll.precisions", "preset"):
        _fill(tree, implied(tree))
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


def _validate(root: type[PipelineConfig], tree: dict[str, Any]) -> tuple[PipelineConfig, list[Violation]]:
    """The config, and what is wrong with it field by field. Fields that are wrong are not known to it."""
    faults: list[FieldFault] = []
    try:
        config = root.model_validate(tree)
    except ValidationError as error:
        faults = faults_in(root, tree, error)
        config = known_part(root, tree, [fault.meant for fault in faults])
    if flags := list(flags_for_numbers(tree, config)):
        faults += flags
        config = known_part(root, tree, [fault.meant for fault in faults])
    return config, [fault.violation for fault in faults]
