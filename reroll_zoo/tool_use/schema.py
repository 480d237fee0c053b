"""JSON schemas of tools: made from a Python function, and held against the arguments of a call."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

Schema = Mapping[str, Any]

_MAX_SHOWN_CHARS = 60
"""How much of a wrong value the policy is shown again."""
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ARRAYS = (list, tuple, Sequence)
_OBJECTS = (dict, Mapping)
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def describe_function(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """What a function does, and the schema of what it takes.

    The docstring up to `Args:` is the description; the lines under it, `name: what it is`, describe the parameters, as does
    `Annotated[str, "what it is"]`. Raises ValueError for a parameter that JSON cannot fill.
    """
    description, about = _read_docstring(inspect.getdoc(function) or "")
    hints = get_type_hints(function, include_extras=True)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{function.__name__} takes {name} otherwise than by name: give a tool named parameters only")
        try:
            properties[name] = _schema_of(hints.get(name, Any))
        except TypeError as error:
            raise ValueError(
                f"parameter {name} of {function.__name__} is {error}, which is no JSON type: "
                "use str, int, float, bool, list, dict, Literal or a union of them"
            ) from error
        if name in about:
            properties[name]["description"] = about[name]
        if parameter.default is parameter.empty:
            required.append(name)
    return description, {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def find_problem(arguments: Mapping[str, Any], schema: Schema) -> str | None:
    """What is wrong with the arguments, in words for the policy; None if nothing is.

    Knows the parts of JSON Schema that describe the shape of a value. What it does not know, the tool has to check.
    """
    return next(_problems(dict(arguments), schema, where="", root=schema), None)


def _schema_of(annotation: Any) -> dict[str, Any]:
    if annotation is Any:
        return {}
    if annotation is None or annotation in _PLAIN:
        return {"type": _PLAIN[annotation or type(None)]}
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin is Annotated:
        notes = [note for note in arguments[1:] if isinstance(note, str)]
        return _schema_of(arguments[0]) | ({"description": notes[0]} if notes else {})
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(argument) for argument in arguments]}
    if origin in _ARRAYS:
        items = {_as_json(_schema_of(argument)) for argument in arguments if argument is not Ellipsis}
        return {"type": "array"} | ({"items": json.loads(items.pop())} if len(items) == 1 else {})
    if origin in _OBJECTS:
        return {"type": "object"} | ({"additionalProperties": _schema_of(arguments[1])} if arguments else {})
    raise TypeError(annotation)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description and, by name, what the `Args:` say of a parameter."""
    description, _, rest = text.partition("\nArgs:\n")
    about: dict[str, str] = {}
    name = ""
    indent = None
    for line in rest.splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if not depth:  # The next section.
            break
        indent = depth if indent is None else indent
        entry = re.match(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line) if depth == indent else None
        if entry:
            name, about[entry[1]] = entry[1], entry[2]
        elif name:
            about[name] = f"{about[name]} {line.strip()}".strip()
    return " ".join(description.split()), about


def _problems(value: Any, schema: Schema | bool, *, where: str, root: Schema) -> Iterator[str]:
    if isinstance(schema, bool):
        if not schema:
            yield f"{where or 'the argument'} is not allowed"
        return
    if "$ref" in schema:
        yield from _problems(value, _resolve(schema["$ref"], root), where=where, root=root)
    for name in ("anyOf", "oneOf"):
        options = schema.get(name, ())
        if options and all(any(_problems(value, option, where=where, root=root)) for option in options):
            yield f"{where} is {_shown(value)}, but must be {' or '.join(map(_in_words, options))}"
    for option in schema.get("allOf", ()):
        yield from _problems(value, option, where=where, root=root)
    if not _has_type(value, schema):
        yield f"{where or 'this'} is {_shown(value)}, but must be {_in_words(schema)}"
        return
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and _as_json(value) not in map(_as_json, allowed):
        yield f"{where} is {_shown(value)}, but must be {_in_words(schema)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield f"{where} is {value}, but must be at least {schema['minimum']}"
        if value > schema.get("maximum", value):
            yield f"{where} is {value}, but must be at most {schema['maximum']}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, schema.get("items", True), where=f"{where}[{number}]", root=root)
    if isinstance(value, dict):
        yield from _object_problems(value, schema, where=where, root=root)


def _object_problems(value: Mapping[str, Any], schema: Schema, *, where: str, root: Schema) -> Iterator[str]:
    known = schema.get("properties", {})
    prefix = f"{where}." if where else ""
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{prefix}{name} is missing"
    for name, item in value.items():
        if name in known:
            yield from _problems(item, known[name], where=f"{prefix}{name}", root=root)
        elif schema.get("additionalProperties", True) is False:
            yield f"{prefix}{name} is unknown; there is {', '.join(known) or 'nothing to give'}"
        else:
            yield from _problems(item, schema.get("additionalProperties", True), where=f"{prefix}{name}", root=root)


def _has_type(value: Any, schema: Schema) -> bool:
    names = schema.get("type", ())
    names = (names,) if isinstance(names, str) else names
    return not names or any(_is(value, name) for name in names)


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES.get(name, object))


def _in_words(schema: Schema | bool) -> str:
    if isinstance(schema, bool) or not schema:
        return "something else"
    if "enum" in schema or "const" in schema:
        return "one of " + ", ".join(map(_as_json, schema.get("enum", [schema.get("const")])))
    names = schema.get("type", "something else")
    return names if isinstance(names, str) else " or ".join(names)


def _resolve(reference: str, root: Schema) -> Schema | bool:
    """The schema that a reference within the same document names; anything if it names none."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~"), True) if isinstance(found, Mapping) else True
    return found if isinstance(found, (Mapping, bool)) else True


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _shown(value: Any) -> str:
    text = _as_json(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
