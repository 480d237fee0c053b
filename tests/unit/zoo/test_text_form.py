from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reroll.errors import RewardError
from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn
from reroll_zoo.text.json_schema import JsonSchema, JsonSchemaConfig
from reroll_zoo.text.match import Regex, RegexRewardConfig

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADA = '{"name": "Ada", "age": 36}'
THINK = r"(?s)<think>.*</think>\s*<answer>.*</answer>"


def asked(**extra: object) -> Prompt:
    return Prompt(id="form/5", messages=(), domain="form", extra=extra)


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


@pytest.mark.parametrize(
    ("pattern", "whole", "text", "is_correct"),
    [
        (THINK, True, "<think>a\nb</think>\n<answer>3</answer>", True),
        (THINK, True, "\n<think></think><answer></answer> ", True),
        (THINK, True, "well: <think>a</think><answer>3</answer>", False),
        (THINK, True, "<think>a</think><answer>3</answer>!", False),
        (THINK, False, "well: <think>a</think><answer>3</answer>!", True),
        (THINK, False, "<answer>3</answer><think>a</think>", False),
        (r"\d+", False, "it is 42", True),
        (r"\d+", True, "it is 42", False),
        (r"\d+", True, "42", True),
        (r"\d+", True, " 42\n", True),
        (r"\d+", False, "none", False),
        (r"(?i)yes|no", True, "YES", True),
        (r"yes|no", True, "YES", False),
        (r"^\S+$", True, "one", True),
        (r"^\S+$", True, "one two", False),
        (r"a.b", False, "a\nb", False),
        (r"(?s)a.b", False, "a\nb", True),
        (r".+", True, "", False),
        (r"^$", True, "   ", True),
    ],
)
def test_a_regex_is_found_in_the_text_or_is_all_of_it(pattern: str, whole: bool, text: str, is_correct: bool) -> None:
    reward = Regex(RegexRewardConfig(kind="regex", pattern=pattern, whole=whole, correct=0.5, wrong=-0.5))
    assert reward(asked(), said(text)).value == (0.5 if is_correct else -0.5)


def test_a_pattern_that_is_no_regular_expression_is_refused_and_one_is_needed() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        RegexRewardConfig(kind="regex", pattern="(")
    with pytest.raises(ValidationError, match="Field required"):
        RegexRewardConfig.model_validate({"kind": "regex"})


def test_what_may_take_for_ever_runs_in_a_process() -> None:
    assert RegexRewardConfig.in_process
    assert JsonSchemaConfig.in_process


@pytest.mark.parametrize(
    ("text", "is_loose", "is_strict"),
    [
        (ADA, True, True),
        (f"  {ADA}\n", True, True),
        ('{"age": 0, "name": "B"}', True, True),
        (f"```json\n{ADA}\n```", True, False),
        (f"```\n{ADA}\n```", True, False),
        (f"Here it is:\n```json\n{ADA}\n```\nDone.", True, False),
        (f"```json\n{{}}\n```\nor rather\n```json\n{ADA}\n```", True, False),
        (f"```json\n{ADA}\n```\nor rather\n```json\n{{}}\n```", False, False),
        (f"Here it is: {ADA}", False, False),
        (f"{ADA} {ADA}", False, False),
        ('{"name": "ada", "age": 36}', False, False),
        ('{"name": "Ada", "age": -1}', False, False),
        ('{"name": "Ada", "age": 1.5}', False, False),
        ('{"name": "Ada"}', False, False),
        ('{"name": "Ada", "age": 36, "x": 1}', False, False),
        ('{"name": "Ada", "age": NaN}', False, False),
        ("{'name': 'Ada', 'age': 36}", False, False),
        ('{"name": "Ada", "age": 36', False, False),
        (f"[{ADA}]", False, False),
        ("null", False, False),
        ("", False, False),
        ("[" * 100_000, False, False),
        ('{"name": "Ada", "age": ' + "9" * 10_000 + "}", False, False),
    ],
)
def test_an_answer_fits_the_schema_or_not(text: str, is_loose: bool, is_strict: bool) -> None:
    loose = JsonSchema(JsonSchemaConfig(kind="json_schema", json_schema=PERSON))
    strict = JsonSchema(JsonSchemaConfig(kind="json_schema", json_schema=PERSON, strict=True))
    assert loose(asked(), said(text)).value == float(is_loose)
    assert strict(asked(), said(text)).value == float(is_strict)


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)])
def test_a_row_may_bring_its_own_schema(schema: object) -> None:
    reward = JsonSchema(JsonSchemaConfig(kind="json_schema"))
    assert reward(asked(schema=schema), said(ADA)).value == 1.0
    assert reward(asked(schema=schema), said("{}")).value == 0.0
    assert JsonSchema(JsonSchemaConfig(kind="json_schema", schema_key="form"))(asked(form=schema), said(ADA)).value == 1.0


@pytest.mark.parametrize("extra", [{}, {"schema": None}, {"schema": "{"}, {"schema": "[]"}, {"schema": {"type": "nonsense"}}])
def test_a_row_without_a_usable_schema_is_named_with_the_fix(extra: dict[str, object]) -> None:
    with pytest.raises(RewardError, match=r"form/5 has no JSON Schema in its column 'schema'.*set json_schema"):
        JsonSchema(JsonSchemaConfig(kind="json_schema"))(asked(**extra), said(ADA))


def test_a_schema_that_is_none_is_refused_at_once_and_nothing_is_fetched() -> None:
    with pytest.raises(ValueError, match="not a JSON Schema"):
        JsonSchema(JsonSchemaConfig(kind="json_schema", json_schema={"type": "nonsense"}))
    with pytest.raises(ValueError, match=r"it refers to http://localhost:9/schema.json, which is not in it"):
        JsonSchema(JsonSchemaConfig(kind="json_schema", json_schema={"$ref": "http://localhost:9/schema.json"}))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"age": {"$ref": "#/$defs/missing"}}},
        {"properties": {"age": {"$ref": "#/odd/place"}}, "odd": {"place": {"$ref": "other.json"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": {"$ref": "#/definitions/missing"}},
        {"properties": {"name": {"pattern": "("}}},
    ],
)
def test_a_row_whose_schema_leads_nowhere_fails_whatever_the_answer_says(schema: dict[str, object]) -> None:
    for text in (ADA, "{}", "[]", "no JSON"):
        with pytest.raises(RewardError, match=r"form/5 has no JSON Schema in its column 'schema'"):
            JsonSchema(JsonSchemaConfig(kind="json_schema"))(asked(schema=schema), said(text))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, "[[], [[]]]", "[1]"),
        ({"$id": "http://here/a", "$ref": "b", "$defs": {"b": {"$id": "b", "type": "null"}}}, "null", "1"),
        ({"$ref": "#mark", "$defs": {"a": {"$anchor": "mark", "const": {"$ref": "#/nowhere"}}}}, '{"$ref": "#/nowhere"}', "1"),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "$ref": "#/definitions/a",
                "definitions": {"a": {"type": "null"}},
            },
            "null",
            "1",
        ),
    ],
)
def test_references_inside_a_schema_are_followed(schema: dict[str, object], right: str, wrong: str) -> None:
    reward = JsonSchema(JsonSchemaConfig(kind="json_schema", json_schema=schema))
    assert reward(asked(), said(right)).value == 1.0
    assert reward(asked(), said(wrong)).value == 0.0


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" * 400, "1" * 5000])
@pytest.mark.parametrize("rule", [{"multipleOf": 0.1}, {"multipleOf": 3}, {"maximum": 10.5}, {"enum": [1.5]}, {"const": 2}])
def test_no_number_is_anything_but_right_or_wrong(rule: dict[str, object], number: str) -> None:
    reward = JsonSchema(JsonSchemaConfig(kind="json_schema", json_schema={"type": "number", **rule}))
    assert reward(asked(), said(number)).value in (0.0, 1.0)


def test_a_number_that_no_float_can_hold_is_a_wrong_answer() -> None:
    reward = JsonSchema(JsonSchemaConfig(kind="json_schema", json_schema={"type": "number", "multipleOf": 0.01}))
    assert reward(asked(), said("1e400")).value == 0.0
    assert reward(asked(), said("0.05")).value == 1.0


def test_a_pattern_chooses_the_part_that_is_read() -> None:
    reward = JsonSchema(
        JsonSchemaConfig(kind="json_schema", json_schema=PERSON, strict=True, pattern="(?s)<answer>(.*?)</answer>")
    )
    assert reward(asked(), said(f"so <answer>{ADA}</answer>")).value == 1.0
    assert reward(asked(), said(ADA)).value == 0.0


@given(st.text())
def test_any_text_is_judged_and_no_words_fit_the_schema(text: str) -> None:
    assert JsonSchema(JsonSchemaConfig(kind="json_schema", json_schema=PERSON))(asked(), said(text)).value == 0.0
