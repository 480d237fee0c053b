"""The schema that editors complete and check configs by."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from reroll.config.presets import presets
from reroll_zoo.reference.schema import json_schema

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "reroll.schema.json"
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "launch" not in path.parts]
SMALLEST = {"pipeline": "rlvr", "policy": {"model": "m"}, "data": {"train": [{"kind": "jsonl", "path": "rows.jsonl"}]}}


@cache
def validator() -> Draft202012Validator:
    return Draft202012Validator(json_schema())


def problems(tree: dict[str, Any]) -> list[str]:
    return [error.message for error in validator().iter_errors(tree)]


def test_it_is_a_schema_of_the_draft_that_it_names() -> None:
    Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.relative_to(ROOT / "examples")))
def test_every_example_is_valid_and_names_the_schema(file: Path) -> None:
    text = file.read_text()
    assert problems(yaml.safe_load(text)) == []
    first = text.splitlines()[0]
    assert first == f"# yaml-language-server: $schema={os.path.relpath(COMMITTED, file.parent)}"


@pytest.mark.parametrize(
    ("changes", "is_valid"),
    [
        ({}, True),
        ({"algorithm": "dapo"}, True),
        ({"algorithm": "dapoo"}, False),
        ({"loss": {"clip_high": 0.3}}, True),  # the preset gives the kind
        ({"loss": {"kind": "ppo", "clip_high": 0.3}}, True),
        ({"loss": {"kind": "gspo", "dual_clip": 3}}, False),
        ({"loss": {"clip_hihg": 0.3}}, False),
        ({"rollout": {"windw": 1}}, False),
        ({"rollout": {"window": 0}}, False),
        ({"engine": {"devices": "cpu"}}, True),  # embedded is meant
        ({"engine": {"kind": "vlm"}}, False),
        ({"rewards": {"default": {"kind": "stack", "parts": {"a": {"kind": "exact"}}}}}, True),
        ({"rewards": {"default": {"kind": "stack", "parts": {"a": {"kind": "exct"}}}}}, False),
        ({"pipeline": "sft", "rows_per_step": 4}, True),
        ({"pipeline": "sft", "rollout": {}}, False),
        ({"pipeline": "nope"}, False),
        ({"pipeline": "my_module:MyPipeline", "of_its_own": 1}, True),
    ],
)
def test_what_a_config_may_hold(changes: dict[str, Any], is_valid: bool) -> None:
    assert (problems(SMALLEST | changes) == []) == is_valid


@pytest.mark.parametrize("preset", presets())
def test_what_a_preset_writes_may_be_written_by_hand(preset: str) -> None:
    assert problems(SMALLEST | presets()[preset]) == []


def test_a_file_without_a_pipeline_is_told_that_alone() -> None:
    assert problems({"policy": {"model": "m"}}) == ["'pipeline' is a required property"]
