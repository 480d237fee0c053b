"""What of a config is not as it would be by default, or not as in another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import NoneType
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from reroll.config.explain import with_new_names
from reroll.config.pipeline import find_pipeline


class Difference(NamedTuple):
    """A field that differs; None where there is none."""

    path: str
    here: Any
    there: Any


def from_defaults(tree: Mapping[str, Any]) -> list[Difference]:
    """What a run's whole config says that its fields would not say by themselves.

    A pipeline of the user's own is not imported: nothing in a run's folder is executed.
    """
    try:
        root = find_pipeline(str(tree.get("pipeline")))
        if root is None:
            return between(tree, {})
        config = root.model_validate(with_new_names(root, dict(tree)))
    except ValueError:  # Also pydantic's, and of a package that cannot be imported.
        return between(tree, {})
    return list(_of_node(config, config.model_dump(mode="json"), "", default=None))


def _of_node(node: BaseModel, plain: Mapping[str, Any], path: str, *, default: BaseModel | None) -> Iterator[Difference]:
    """The fields that are not as in `default`, a node of the same class; without one, not as that class has them."""
    for name, field in type(node).model_fields.items():
        if name in plain:
            usual = (
                getattr(default, name)
                if default is not None
                else field.get_default(call_default_factory=True, validated_data={})
            )
            yield from _of_value(getattr(node, name), plain[name], f"{path}{name}", default=usual)


def _of_value(value: Any, plain: Any, place: str, *, default: Any) -> Iterator[Difference]:
    if value == default and type(value) is type(default):
        return
    if isinstance(value, BaseModel):
        is_same = type(value) is type(default)
        found = list(_of_node(value, plain, f"{place}.", default=default if is_same else None))
        if "kind" in plain and not is_same:
            yield Difference(f"{place}.kind", plain["kind"], _plain(getattr(default, "kind", None)))
        elif not found:
            yield Difference(place, plain, _plain(default))
        yield from (difference for difference in found if difference.path != f"{place}.kind")
    elif isinstance(value, Mapping) and any(isinstance(item, BaseModel) for item in value.values()):
        for key, item in value.items():
            usual = default.get(key) if isinstance(default, Mapping) else None
            yield from _of_value(item, plain[key], f"{place}.{key}", default=usual)
    elif isinstance(value, list | tuple) and any(isinstance(item, BaseModel) for item in value):
        for number, (item, words) in enumerate(zip(value, plain, strict=True)):
            yield from _of_value(item, words, f"{place}[{number}]", default=None)
    else:
        yield Difference(place, plain, _plain(default))


def _plain(default: Any) -> Any:
    return None if default is PydanticUndefined else to_jsonable_python(default)


def between(here: Any, there: Any, path: str = "") -> list[Difference]:
    """Every leaf that is not the same in two trees of plain data."""
    if isinstance(here, Mapping) and isinstance(there, Mapping | NoneType):
        pairs = [(f"{path}.{key}".lstrip("."), here.get(key), (there or {}).get(key)) for key in {**here, **(there or {})}]
    elif _are_nodes(here) and (_are_nodes(there) or not there):
        pairs = [(f"{path}[{number}]", a, b) for number, (a, b) in enumerate(zip_longest(here, there or ()))]
    else:
        return [] if here == there else [Difference(path, here, there)]
    return [difference for place, a, b in pairs for difference in between(a, b, place)]


def _are_nodes(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(item, Mapping) for item in value)
