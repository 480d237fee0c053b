"""The JSON schema of a config file (draft 2020-12), for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from reroll.config.base import PipelinePath
from reroll.config.explain import kinds_of
from reroll.config.pipeline import pipelines
from reroll.config.presets import presets
from reroll.config.registry import KindConfig
from reroll.config.tree import RlvrConfig
from reroll_zoo.reference.reference import PRESET_FIELDS, all_paths

_REF = "#/$defs/{model}"


def json_schema() -> dict[str, Any]:
    """What a file may hold, by its `pipeline`. A user's own pipeline may have fields of its own: of it nothing is known."""
    roots = {root: [name for name, other in pipelines().items() if other is root] for root in pipelines().values()}
    nodes = dict.fromkeys(node for place in all_paths().values() for node in place.nodes if issubclass(node, KindConfig))
    adapters: list[Any] = [(node, "validation", TypeAdapter(node)) for node in (*roots, *nodes)]
    references, definitions = TypeAdapter.json_schemas(adapters, ref_template=_REF, schema_generator=_WithoutTitles)
    kinds = {(node.group, kind): references[node, "validation"] for node in nodes for kind in kinds_of(node)}
    defs = _with_kinds(definitions["$defs"], kinds)
    rlvr = defs[RlvrConfig.__name__]
    rlvr["properties"]["algorithm"] |= {"enum": list(presets())}
    for name in PRESET_FIELDS:
        rlvr["properties"][name] = _open_to_presets(rlvr["properties"][name], defs)
    own = TypeAdapter(PipelinePath).json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of reroll",
        "type": "object",
        "required": ["pipeline"],
        "properties": {"pipeline": {"anyOf": [{"enum": list(pipelines())}, own], "description": "What is done."}},
        "allOf": [
            {
                "if": {"properties": {"pipeline": {"enum": names}}, "required": ["pipeline"]},
                "then": references[root, "validation"],
            }
            for root, names in roots.items()
        ],
        "$defs": defs,
    }


def schema_text() -> str:
    """The schema as a file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _with_kinds(schema: Any, kinds: Mapping[tuple[str, str], Any]) -> Any:
    """A schema with what each `kind` of a group may hold, where pydantic can only say that it is one of them."""
    if isinstance(schema, list):
        return [_with_kinds(item, kinds) for item in schema]
    if not isinstance(schema, dict):
        return schema
    filled = {key: _with_kinds(value, kinds) for key, value in schema.items()}
    if group := filled.pop("x-kinds", None):
        kind = filled["properties"]["kind"]
        filled["allOf"] = [
            {
                "if": {"properties": {"kind": {"const": name}}, "required": [] if name == kind.get("default") else ["kind"]},
                "then": kinds[group, name],
            }
            for name in kind["enum"]
        ]
    return filled


class _WithoutTitles(GenerateJsonSchema):
    """Titles that pydantic makes of names say nothing new, and are a third of the file."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> dict[str, Any]:
        made = super().model_schema(schema)
        made.pop("title", None)
        return made


def _open_to_presets(field: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """A field whose `kind` the preset of `algorithm` may give: without one it has the fields of any kind."""
    kinds = [defs[name] for name in _names_in(field) if "kind" in defs[name].get("properties", {})]
    if not kinds:
        return field
    known = {name: True for kind in kinds for name in kind["properties"] if name != "kind"}
    without_kind = {"type": "object", "properties": known, "additionalProperties": False}
    told: dict[str, Any] = {key: field.pop(key) for key in ("description", "default") if key in field}
    return {**told, "anyOf": [field, without_kind]}


def _names_in(schema: Any) -> Iterator[str]:
    """The definitions that a field's schema refers to directly."""
    if isinstance(schema, dict):
        if isinstance(ref := schema.get("$ref"), str):
            yield ref.rpartition("/")[2]
        for key, value in schema.items():
            if key != "discriminator":
                yield from _names_in(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _names_in(value)
