"""Answers that must be JSON of a given shape."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from reroll.config.reward_base import AnswerRewardConfig
from reroll.errors import RewardError
from reroll.rewards.base import extract
from reroll.types import Prompt, Score, Trajectory

_FENCED = re.compile(r"^[ \t]*```[\w-]*[ \t]*\n(?P<body>.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


class JsonSchemaConfig(AnswerRewardConfig):
    """The answer, or its last fenced block, is JSON that fits a JSON Schema."""

    runs: ClassVar[str] = "reroll_zoo.text.json_schema:JsonSchema"
    packages: ClassVar[Mapping[str, str]] = {"jsonschema": "reroll[math]"}
    in_process: ClassVar[bool] = True

    kind: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any] | None = None
    """The schema of every answer; null: each row brings its own."""
    schema_key: str = "schema"
    """The row's column with its schema, as a mapping or as JSON text; read where json_schema is null."""
    strict: bool = False
    """The answer must be the JSON and nothing else: no fence, no words around it."""


class JsonSchema:
    """The answer is JSON that fits a schema. A schema may hold patterns that take for ever: runs where it can be killed."""

    def __init__(self, config: JsonSchemaConfig) -> None:
        import jsonschema
        import referencing.exceptions
        import referencing.jsonschema
        from jsonschema.validators import validator_for
        from jsonschema_specifications import REGISTRY

        self._config = config
        self._jsonschema = jsonschema
        self._referencing = referencing
        self._validator_for = validator_for
        self._known = REGISTRY
        self._validator = None if config.json_schema is None else self._checked(config.json_schema)

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        validator = self._validator or self._of_row(prompt)
        text = extract(trajectory.text, config.pattern)
        is_correct = text is not None and self._fits(validator, text)
        return Score(value=config.correct if is_correct else config.wrong)

    def _fits(self, validator: Any, text: str) -> bool:
        try:
            answer = json.loads(text if self._config.strict else json_part(text), parse_constant=_refuse)
            return bool(validator.is_valid(answer))
        except Exception:  # The schema was found good, so it is the answer: no JSON, too deep, 1e400, which nothing divides.
            return False

    def _of_row(self, prompt: Prompt) -> Any:
        schema = prompt.extra.get(self._config.schema_key)
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(schema, dict):
                raise ValueError("no mapping")
            return self._checked(schema)
        except ValueError as error:
            key = self._config.schema_key
            raise RewardError(
                f"prompt {prompt.id} has no JSON Schema in its column {key!r} ({error}): set json_schema"
            ) from None

    def _checked(self, schema: dict[str, Any]) -> Any:
        """A validator for the schema; ValueError if it is none. It fetches nothing: a reference to another schema must be to
        one in it. All are looked up here, or an answer could choose to meet one that leads nowhere."""
        kind = self._validator_for(schema, default=self._jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except self._jsonschema.SchemaError as error:
            raise ValueError(f"not a JSON Schema: {error.message}") from None
        dialect = self._referencing.jsonschema.specification_with(kind.META_SCHEMA["$schema"])
        root = dialect.create_resource(schema)
        try:
            _look_up(root, self._known.resolver_with_root(root), dialect, set())
        except self._referencing.exceptions.Unresolvable as error:
            raise ValueError(f"it refers to {error.ref}, which is not in it") from None
        return kind(schema, registry=self._known)


def _look_up(schema: Any, resolver: Any, dialect: Any, seen: set[int]) -> None:
    """Follow every reference in a schema and in what they lead to. Raises Unresolvable at one that leads nowhere."""
    if id(schema.contents) in seen:
        return
    seen.add(id(schema.contents))
    for key in ("$ref", "$dynamicRef"):
        if isinstance(schema.contents, dict) and isinstance(reference := schema.contents.get(key), str):
            found = resolver.lookup(reference)
            _look_up(dialect.create_resource(found.contents), found.resolver, dialect, seen)
    for part in schema.subresources():
        _look_up(part, resolver.in_subresource(part), dialect, seen)


def json_part(text: str) -> str:
    """The part of an answer that is meant as JSON: the body of its last fenced block, or all of it."""
    bodies = [match["body"] for match in _FENCED.finditer(text)]
    return bodies[-1] if bodies else text


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")
