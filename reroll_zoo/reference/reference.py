"""The config tree as documentation: what may stand at a path, with type, default, bounds and docstring.

Read off the classes alone: no file is needed, and nothing that a config names is looked for.
"""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic.fields import FieldInfo

from reroll.config.base import Node
from reroll.config.explain import did_you_mean, is_node, kinds_of, members_of
from reroll.config.pipeline import pipelines
from reroll.config.presets import presets
from reroll.errors import ConfigError, Violation


class SchemaEntry(NamedTuple):
    """What may stand at a path."""

    annotation: Any
    field: FieldInfo | None = None
    """None for an entry of a list or a mapping, or for one kind of a union."""
    owner: type[Node] | None = None
    """The node that has the field."""

    @property
    def nodes(self) -> list[type[Node]]:
        """The config nodes that it can be, each with its fields: of an entry where it is a list or a mapping of them."""
        return list(dict.fromkeys(_nodes(self.annotation)))


class Found(NamedTuple):
    """A place, and the pipelines that have it."""

    place: SchemaEntry
    pipelines: tuple[str, ...]


def find(path: str) -> list[Found]:
    """What stands at `rollout.take_window`, `loss.clip_low`, `loss.kind=ppo` or `rewards.default.kind=judge`.

    Names of domains and indices stand as in a file, or are left out. Pipelines that mean different things by a path give one
    entry each. Raises ConfigError for a path that leads nowhere, with the nearest that does not.
    """
    found: dict[SchemaEntry, list[str]] = {}
    for name, root in pipelines().items():
        for place in _look_up(SchemaEntry(root), path.split(".")):
            found.setdefault(place, []).append(name)
    if not found:
        raise ConfigError([Violation(path, "is no field of the config", _nearest(path))])
    return [Found(place, tuple(names)) for place, names in found.items()]


def _look_up(place: SchemaEntry, parts: Sequence[str]) -> list[SchemaEntry]:
    """All that the rest of a path can mean from here on; a kind's name is rather a kind than a domain that is called so."""
    if not parts:
        return [place]
    part, rest = parts[0], parts[1:]
    kind = part.removeprefix("kind=")
    members = members_of(place.annotation)
    nodes = [member for member in members if is_node(member)]
    inner = [get_args(member)[-1] for member in members if get_origin(member) in (list, dict)]
    fields = [SchemaEntry(field.annotation, field, node) for node in nodes if (field := node.model_fields.get(part))]
    readings = [
        [next_place for field in fields for next_place in _look_up(field, rest)],
        [next_place for node in nodes if kind in kinds_of(node) for next_place in _look_up(SchemaEntry(node), rest)],
        [next_place for entry in inner for next_place in _look_up(SchemaEntry(entry), parts)],
        [next_place for entry in inner if "=" not in part for next_place in _look_up(SchemaEntry(entry), rest)],
    ]
    return next((list(dict.fromkeys(reading)) for reading in readings if reading), [])


def _nodes(annotation: Any) -> Iterator[type[Node]]:
    for member in members_of(annotation):
        if is_node(member):
            yield member
        elif get_origin(member) in (list, dict):
            yield from _nodes(get_args(member)[-1])


def all_paths() -> dict[str, SchemaEntry]:
    """Every path of every pipeline, without domains, indices and kinds. Nodes inside a node of their own kind end it."""
    found: dict[str, SchemaEntry] = {}

    def walk(place: SchemaEntry, path: str, above: tuple[type[Node], ...]) -> None:
        for node in place.nodes:
            if node in above:
                continue
            for name, field in node.model_fields.items():
                inner = SchemaEntry(field.annotation, field, node)
                found.setdefault(f"{path}{name}", inner)
                walk(inner, f"{path}{name}.", (*above, node))

    for root in dict.fromkeys(pipelines().values()):
        walk(SchemaEntry(root), "", ())
    return found


def _nearest(path: str) -> str:
    """The way to what was probably meant."""
    above, _, last = path.rpartition(".")
    known = sorted(all_paths(), key=len)
    if same_name := [name for name in known if name.rpartition(".")[2] == last]:
        return f"did you mean {' or '.join(same_name[:3])}?"
    there = _names_under(above, kinds="=" in last)
    last_names = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = difflib.get_close_matches(last, last_names, n=1, cutoff=0.8)
    elsewhere = f"did you mean {last_names[close[0]]}?" if close and not above else ""
    guess = elsewhere or did_you_mean(last, there) or did_you_mean(path, known)
    return guess.strip() or f"known there: {', '.join(there or _names_under('', kinds=False))}"


def _names_under(path: str, *, kinds: bool) -> list[str]:
    """What the last part of a path may be behind this one."""
    places = [place for root in pipelines().values() for place in _look_up(SchemaEntry(root), path.split(".") if path else [])]
    nodes = [node for place in places for node in place.nodes]
    named = [[f"kind={kind}" for kind in kinds_of(node)] if kinds else node.model_fields for node in nodes]
    return list(dict.fromkeys(name for names in named for name in names))


_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", types.NoneType: "null"}


def type_in_words(annotation: Any) -> str:
    """What a field takes."""
    members = members_of(annotation)
    nodes = [member for member in members if is_node(member)]
    words = []
    for member in members:
        if is_node(member):
            words.append(_nodes_in_words(nodes))
        elif get_origin(member) is Literal:
            words.extend(f"`{value}`" for value in get_args(member))
        elif get_origin(member) is list:
            words.append(f"list of {type_in_words(get_args(member)[0])}")
        elif get_origin(member) is dict:
            words.append(f"by name: {type_in_words(get_args(member)[1])}")
        elif get_origin(member) is tuple and get_args(member)[-1] is ...:
            words.append(f"list of {type_in_words(get_args(member)[0])}")
        elif get_origin(member) is tuple:
            words.append(f"[{', '.join(map(type_in_words, get_args(member)))}]")
        else:
            words.append(_PLAIN.get(member, "any value"))
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last


def _nodes_in_words(nodes: Sequence[type[Node]]) -> str:
    kinds = [kind for node in nodes for kind in kinds_of(node)]
    return f"a mapping by `kind`: {', '.join(f'`{kind}`' for kind in kinds)}" if kinds else "a mapping"


def default_in_words(field: FieldInfo) -> str:
    """What a field is where a file leaves it out."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Node):
        kinds = kinds_of(type(value))
        return f"`{{kind: {kinds[0]}}}`" if kinds else "its defaults"
    return f"`{written(value)}`"


def written(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f".{value}" if value in (float("inf"), float("-inf")) else f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {written(item)}' for key, item in value.items())}}}"
    return str(value) or '""'


def bounds_in_words(field: FieldInfo) -> str:
    """What else a value must keep to; empty if nothing."""
    words = []
    for bound in field.metadata:
        match bound:
            case Ge(ge=limit):
                words.append(f"at least {written(limit)}")
            case Gt(gt=limit):
                words.append(f"more than {written(limit)}")
            case Le(le=limit):
                words.append(f"at most {written(limit)}")
            case Lt(lt=limit):
                words.append(f"less than {written(limit)}")
            case MinLen(min_length=limit):
                words.append(f"{limit} or more of them")
            case MaxLen(max_length=limit):
                words.append(f"{limit} of them at most")
    return ", ".join(words)


def about(thing: type[Node] | FieldInfo) -> str:
    """Its docstring, as running text. A field without one that can only be one kind of node has the node's."""
    if isinstance(thing, FieldInfo) and not thing.description:
        members = [member for member in members_of(thing.annotation) if member is not types.NoneType]
        return about(members[0]) if len(members) == 1 and is_node(members[0]) else ""
    text = thing.description if isinstance(thing, FieldInfo) else inspect.getdoc(thing)
    return " ".join((text or "").split())


def set_by_presets(path: str, owner: type[Node] | None) -> dict[str, list[str]]:
    """{value as written: presets of `algorithm` that give it} of a path to a plain value in a node of class `owner`."""
    found: dict[str, list[str]] = {}
    for name, preset in presets().items():
        node: Any = preset
        *above, last = path.split(".")
        for part in above:
            node = node.get(part) if isinstance(node, dict) else None
        is_owner = isinstance(node, dict) and ("kind" not in node or (owner is not None and node["kind"] in kinds_of(owner)))
        if is_owner and last in node and not isinstance(node[last], dict):
            found.setdefault(written(node[last]), []).append(name)
    return found


PRESET_FIELDS = frozenset(name for preset in presets().values() for name in preset)
"""Top-level fields of RL pipelines that `algorithm` may fill in."""
