"""Pydantic's errors in the user's terms: the path as it stands in the file, what is wrong, and the fix.

And what is left of a config when its faults are taken out, so that the rest is still looked at.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from reroll.config.base import Node, NotKnown
from reroll.config.registry import KindConfig
from reroll.errors import Violation

N = TypeVar("N", bound=Node)
Path = tuple[str | int, ...]


_KEY = "[key]"
"""Where pydantic found fault with a key instead of its value."""


class FieldFault(NamedTuple):
    """One thing that pydantic found."""

    path: Path
    """As the user wrote it: without the union tags that pydantic puts in between."""
    violation: Violation
    meant: Path
    """The field that is not known because of it: that of the path, or the one that a misspelt key was meant for."""


def faults_in(root: type[Node], tree: dict[str, Any], error: ValidationError) -> list[FieldFault]:
    """Every place that is wrong, once."""
    by_path: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors():
        by_path.setdefault(_path_in(tree, detail), []).append(detail)
    # Each form that a union admits complains: the one that was meant is that whose fault lies deepest.
    shallow = {path[:length] for path in by_path for length in range(len(path))}
    return [_explain(root, tree, path, details) for path, details in by_path.items() if path not in shallow]


def known_part(annotation: type[N], tree: Mapping[str, Any], wrong: Collection[Path]) -> N:
    """A config without what is wrong: asking one of its nodes for such a field raises NotKnown."""
    known: N = _known(annotation, tree, wrong)
    return known


def with_new_names(annotation: Any, tree: Any) -> Any:
    """A config that an earlier version wrote, with the names that fields and kinds have now."""
    if isinstance(tree, Mapping) and (now := RENAMED_KINDS.get(str(tree.get("kind")))):
        kinds = {kind for member in members_of(annotation) if is_node(member) for kind in kinds_of(member)}
        tree = {**tree, "kind": now} if now in kinds else tree
    shapes = _shapes(annotation, tree)
    if not shapes:
        return tree
    shape = shapes[0]
    if get_origin(shape) is list:
        return [with_new_names(get_args(shape)[0], item) for item in tree]
    if get_origin(shape) is dict:
        return {key: with_new_names(get_args(shape)[1], item) for key, item in tree.items()}
    fields = shape.model_fields
    kept = {key: value for key, value in tree.items() if key in fields or key not in REMOVED}
    current = dict(renamed(key, value, fields) or (key, value) for key, value in kept.items())
    return {key: with_new_names(fields[key].annotation, value) if key in fields else value for key, value in current.items()}


def flags_for_numbers(given: Any, taken: Any, path: Path = ()) -> Iterator[FieldFault]:
    """Where the file says true or false and pydantic took it for 1 or 0. `taken` is the config, or a value in it."""
    if isinstance(given, bool) and isinstance(taken, int | float) and not isinstance(taken, bool):
        violation = Violation(".".join(map(str, path)), f"is {str(given).lower()}", "it should be a number")
        yield FieldFault(path, violation, path)
    elif isinstance(given, Mapping) and isinstance(taken, Mapping | Node):
        known = dict(taken)
        for name in given.keys() & known.keys():
            yield from flags_for_numbers(given[name], known[name], (*path, name))
    elif isinstance(given, list) and isinstance(taken, list | tuple):
        for index, (item, other) in enumerate(zip(given, taken, strict=False)):
            yield from flags_for_numbers(item, other, (*path, index))


def _path_in(tree: dict[str, Any], detail: ErrorDetails) -> Path:
    node: Any = tree
    path: list[str | int] = []
    for part in detail["loc"]:
        if isinstance(node, list) and isinstance(part, int) and part < len(node):
            path.append(part)
        elif isinstance(node, dict) and (keys := [key for key in node if part in (key, str(key))]):
            path.append(keys[0])  # One that is no text stands in the error as text.
        else:
            continue
        node = node[path[-1]]
    last = detail["loc"][-1]
    if detail["type"] == "missing" and isinstance(last, str):
        path.append(last)
    return tuple(path)


def _explain(root: type[Node], tree: dict[str, Any], path: Path, details: list[ErrorDetails]) -> FieldFault:
    """What a user needs to know about a place. Several details are the forms that it could have."""
    where, detail = ".".join(map(str, path)), details[0]
    parents = _nodes_at(root, tree, path[:-1]) if path else []
    given, context = detail["input"], detail.get("ctx", {})
    match detail["type"]:
        case _ if detail["loc"][-1:] == (_KEY,):
            violation = Violation(where, "is a key that YAML does not read as text", "put it in quotes")
        case "extra_forbidden" | "invalid_key":
            known = list(parents[0].model_fields)
            if now := renamed(str(path[-1]), given, known):
                fix = f"it is called {now[0]} now: write {now[0]}: {json.dumps(now[1], default=str)}"
                return FieldFault(path, Violation(where, "unknown key", fix), (*path[:-1], now[0]))
            close = difflib.get_close_matches(str(path[-1]), known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
            return FieldFault(path, Violation(where, "unknown key", fix), (*path[:-1], close[0]) if close else path)
        case "missing" if isinstance(detail["loc"][-1], int):
            violation = Violation(where, f"is {given!r}", f"give {len(given) + len(details)} entries")
        case "missing":
            violation = Violation(where, "is missing", f"add {path[-1]}: {_example(parents, path[-1]) or '…'}")
        case "union_tag_not_found":
            kinds = [kind for node in _nodes_at(root, tree, path) for kind in kinds_of(node)]
            violation = Violation(where, "has no kind", f"add kind: one of {', '.join(kinds)}")
        case "model_attributes_type":
            members = members_of(_annotation_at(root, tree, path))
            kinds = [kind for member in members if is_node(member) for kind in kinds_of(member)]
            is_kind = isinstance(given, str) and given in kinds
            fix = f"write {{kind: {given}}}" if is_kind else f"it should be a mapping with a kind: one of {', '.join(kinds)}"
            violation = Violation(where, f"is {given!r}", fix)
        case "union_tag_invalid":
            kinds = str(context["expected_tags"]).replace("'", "").split(", ")
            problem, current = f"kind {context['tag']!r} is unknown", RENAMED_KINDS.get(context["tag"])
            hint = f"it is called {current} now; " if current in kinds else did_you_mean(context["tag"], kinds)
            violation = Violation(where, problem, f"{hint}choose one of: {', '.join(kinds)}")
        case "string_pattern_mismatch":
            example = _example(parents, path[-1])
            fix = f"write it like {example}" if example else f"it must match {context['pattern']}"
            violation = Violation(where, f"is {given!r}", fix)
        case "value_error":  # raised by a validator of ours, in words
            violation = Violation(
                where, f"is {given!r}" if path and not isinstance(given, dict) else "is wrong", str(context["error"])
            )
        case "too_short":
            violation = Violation(where, "is empty", f"give at least {context['min_length']}")
        case _:
            *others, last = dict.fromkeys(map(_wish, details))
            wish = f"{', '.join(others)} or {last.removeprefix('be ')}" if others else last
            violation = Violation(where, f"is {given!r}", f"it should {wish.replace(', be ', ', ')}")
    return FieldFault(path, violation, path)


def _example(parents: list[type[Node]], field: str | int) -> str | None:
    """The example that a field gives of itself."""
    examples = [node.model_fields[str(field)].examples for node in parents if str(field) in node.model_fields]
    return str(examples[0][0]) if examples and examples[0] else None


_WISHES = {
    "int": "be an integer",
    "float": "be a number",
    "string": "be text",
    "bool": "be true or false",
    "list": "be a list",
    "tuple": "be a list",
    "dict": "be a mapping, `key: value`",
    "model": "be a mapping, `key: value`",
    "path": "be a path",
}
"""What a value of the wrong type should do instead, by the first word of pydantic's error."""


def _wish(detail: ErrorDetails) -> str:
    kind, _, what = detail["type"].partition("_")
    if kind in _WISHES and what in ("type", "parsing", "from_float"):
        return _WISHES[kind]
    return detail["msg"].removeprefix("Input should ")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The nearest of the words that are known, as the beginning of a fix; empty if none is near."""
    close = difflib.get_close_matches(str(given), known, n=1)
    return f"did you mean {close[0]}? " if close else ""


def _known(annotation: Any, value: Any, wrong: Collection[Path]) -> Any:
    if not wrong:
        return TypeAdapter(annotation).validate_python(value)
    shapes = _shapes(annotation, value)
    if () in wrong or not shapes:
        raise NotKnown
    below = {part: [path[1:] for path in wrong if path[0] == part] for part in {path[0] for path in wrong}}
    shape = shapes[0]
    if get_origin(shape) is list:
        return [_known(get_args(shape)[0], item, below.get(index, ())) for index, item in enumerate(value)]
    if get_origin(shape) is dict:
        return {key: _known(get_args(shape)[1], item, below.get(key, ())) for key, item in value.items()}
    known: dict[str, Any] = {}
    unknown = [name for name in below if name not in value]
    for name in value.keys() & shape.model_fields.keys():
        field = shape.model_fields[name]
        try:
            known[name] = _known(Annotated[field.annotation, field], value[name], below.get(name, ()))
        except NotKnown:
            unknown.append(name)
    node = shape.model_construct(**known)
    for name in unknown:
        node.__dict__.pop(name, None)  # its default
    return node


def _nodes_at(root: type[Node], tree: Any, path: Path) -> list[type[Node]]:
    """The config classes that may stand at this place: one, or a union that no `kind` has narrowed yet."""
    annotation = _annotation_at(root, tree, path)
    for part in path:
        tree = tree[part]
    return [shape for shape in _shapes(annotation, tree) if not get_origin(shape)]


def _annotation_at(root: type[Node], tree: Any, path: Path) -> Any:
    """What the place is declared as; None if that is not known, because what it lies in is no list and no mapping."""
    annotation: Any = root
    for part in path:
        shapes = _shapes(annotation, tree)
        if not shapes:
            return None
        shape, tree = shapes[0], tree[part]
        annotation = get_args(shape)[-1] if get_origin(shape) else shape.model_fields[part].annotation
    return annotation


def _shapes(annotation: Any, value: Any) -> list[Any]:
    """What a list or a mapping in this place can be: `list[…]`; or `dict[…]` and nodes, of its `kind` if it has one."""
    members = members_of(annotation)
    if isinstance(value, list):
        return [member for member in members if get_origin(member) is list]
    if not isinstance(value, Mapping):
        return []
    mappings = [member for member in members if get_origin(member) is dict or is_node(member)]
    return [member for member in mappings if is_node(member) and value.get("kind") in kinds_of(member)] or mappings


def members_of(annotation: Any) -> list[Any]:
    """What an annotation admits: unions and Annotated opened, and what stands for all kinds of a group."""
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for choice in get_args(annotation) for member in members_of(choice)]
    if is_node(annotation) and issubclass(annotation, KindConfig) and annotation.is_open():
        return list(annotation.kinds().values())
    return [annotation]


def is_node(member: Any) -> bool:
    """Whether it is a class of config nodes."""
    return isinstance(member, type) and issubclass(member, Node)


def kinds_of(node: type[Node]) -> tuple[str, ...]:
    """The values of `kind` that name it; none for a node without kinds."""
    return get_args(node.model_fields["kind"].annotation) if "kind" in node.model_fields else ()


RENAMED: Mapping[str, tuple[str, ...]] = {
    "trace": ("gae_lambda",),
    "place": ("apply_to",),
    "solved_outside": ("keep_pass_rate",),
    "newest": ("ema_weight",),
    "window": ("take_window",),
    "redundant": ("extra_samples",),
    "drop_no_signal": ("drop_zero_variance_groups",),
    "ending": ("score_at",),
    "tensor_parallel": ("tp",),
    "offload": ("swap", "cpu_offload", "sleep"),
}
"""By the old name, what it is called now: the one of these that the node has."""

REMOVED = {"log_samples"}
"""What runs of earlier versions have in their configs, and no longer is: all samples are in the journal."""

RENAMED_KINDS = {"earned": "env_reward"}
"""Likewise for kinds."""

_SLEEPS = {"none": False, "all": True}
"""`engine.offload` had words for it."""


def renamed(key: str, value: Any, fields: Collection[str]) -> tuple[str, Any] | None:
    """What a node with these fields calls an unknown key now, and its value. None if it had no such key."""
    new = next((name for name in RENAMED.get(key, ()) if name in fields), None)
    if new is None or key in fields:
        return None
    return new, _SLEEPS.get(value, value) if new == "sleep" and isinstance(value, str) else value
