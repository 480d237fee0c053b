"""Pydantic's errors in the user's terms: the path as it stands in the file, what is wrong, and the fix."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic_core import ErrorDetails

from reroll.config.base import Node
from reroll.errors import Violation

Path = Sequence[str | int]


def yaml_path(tree: dict[str, Any], detail: ErrorDetails) -> list[str | int]:
    """The error's place as the user wrote it: without the union tags that pydantic puts in between."""
    node: Any = tree
    path: list[str | int] = []
    *parents, last = detail["loc"]
    for part in parents:
        if isinstance(node, dict | list) and (part in node if isinstance(node, dict) else isinstance(part, int)):
            node = node[part]  # type: ignore[index]
            path.append(part)
    if detail["type"] in ("missing", "extra_forbidden") or (isinstance(node, dict) and last in node) or isinstance(node, list):
        path.append(last)
    return path


def explain(root: type[Node], tree: dict[str, Any], path: Path, detail: ErrorDetails) -> Violation:
    """What a user needs to know about one pydantic error."""
    where = ".".join(map(str, path))
    kind, context = detail["type"], detail.get("ctx", {})
    match kind:
        case "extra_forbidden":
            known = [name for node in _nodes_at(root, tree, path[:-1])[:1] for name in node.model_fields]
            close = difflib.get_close_matches(str(path[-1]), known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
            return Violation(where, "unknown key", fix)
        case "missing":
            return Violation(where, "is missing", f"add {path[-1]}: …")
        case "union_tag_not_found":
            kinds = [kind for node in _nodes_at(root, tree, path) for kind in _kinds(node)]
            return Violation(where, "has no kind", f"add kind: one of {', '.join(kinds)}")
        case "union_tag_invalid":
            return Violation(where, f"kind {context['tag']!r} is unknown", f"choose one of: {context['expected_tags']}")
        case "string_pattern_mismatch":
            return Violation(where, f"is {detail['input']!r}", f"it must match {context['pattern']}")
    fix = detail["msg"][0].lower() + detail["msg"][1:]
    return Violation(where, f"is {detail['input']!r}", fix.replace("input should", "it should"))


def _kinds(node: type[Node]) -> tuple[str, ...]:
    return get_args(node.model_fields["kind"].annotation) if "kind" in node.model_fields else ()


def _nodes_at(root: type[Node], tree: Any, path: Path) -> list[type[Node]]:
    """The config classes that may stand at this place: one, or a union that no `kind` has narrowed yet."""
    nodes = [root]
    for part in path:
        tree = tree[part]
        if isinstance(part, str) and part in nodes[0].model_fields:  # else a list index or a dict key: the same choices
            nodes = _nodes_in(nodes[0].model_fields[part].annotation)
        if not nodes:
            return []
        kind = tree.get("kind") if isinstance(tree, Mapping) else None
        nodes = [node for node in nodes if kind in _kinds(node)] or nodes
    return nodes


def _nodes_in(annotation: Any) -> list[type[Node]]:
    """The Node classes that an annotation admits, through unions, lists, dicts and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, Node):
        return [annotation]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _nodes_in(get_args(annotation)[0])
    if origin in (Union, types.UnionType, list, dict):
        return [node for arg in get_args(annotation) for node in _nodes_in(arg)]
    return []
