"""Answers that must be JSON of a given shape."""

from __future__ import annotations

import json
import re
from typing import Any

from reroll.config.reward_match import JsonSchemaReward
from reroll.errors import RewardError
from reroll.rewards.match import extract
from reroll.types import Prompt, Score, Trajectory

_FENCED = re.compile(r"^[ \t]*```[\w-]*[ \t]*\n(?P<body>.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


class JsonSchema:
    """The answer is JSON that fits a schema. A schema may hold patterns that take for ever: runs where it can be killed."""

    def __init__(self, config: JsonSchemaReward) -> None:
        import jsonschema
        from jsonschema.validators import validator_for
        from jsonschema_specifications import REGISTRY

        self._config = config
        self._jsonschema = jsonschema
        self._validator_for = validator_for
        self._known = REGISTRY
        self._validator = None if config.json_schema is None else self._checked(config.json_schema)

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        validator = self._validator or self._of_row(prompt)
        text = extract(trajectory.text, config.pattern)
        is_correct = text is not None and self._fits(validator, text, prompt)
        return Score(value=config.correct if is_correct else config.wrong)

    def _fits(self, validator: Any, text: str, prompt: Prompt) -> bool:
        try:
            answer = json.loads(text if self._config.strict else json_part(text), parse_constant=_refuse)
            return bool(validator.is_valid(answer))
        except (ValueError, RecursionError):
            return False
        except Exception as error:  # What is left is a schema that refers to another which is not here.
            raise RewardError(f"the schema of prompt {prompt.id} cannot be used: {error}") from None

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
        """A validator for the schema. It fetches nothing: a reference to another schema must be to one in it."""
        kind = self._validator_for(schema, default=self._jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except self._jsonschema.SchemaError as error:
            raise ValueError(f"not a JSON Schema: {error.message}") from None
        return kind(schema, registry=self._known)


def json_part(text: str) -> str:
    """The part of an answer that is meant as JSON: the body of its last fenced block, or all of it."""
    bodies = [match["body"] for match in _FENCED.finditer(text)]
    return bodies[-1] if bodies else text


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")
