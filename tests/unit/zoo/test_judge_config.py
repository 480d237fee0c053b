"""Judges in a config: what is refused, and with which fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from reroll_zoo.judge.config import JudgeConfig
from reroll_zoo.reward_model.config import ModelRewardConfig

HOSTED = {"kind": "hosted", "model": "some/model"}


def judge(**options: Any) -> JudgeConfig:
    return JudgeConfig.model_validate({"kind": "judge", "model": HOSTED} | options)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"template": "{answer} by {author}"}, r"unknown placeholder \{author\}.*or \{\{author\}\}"),
        ({"template": "Is it {reference}?"}, r"put \{answer\} into it"),
        ({"template": "{{answer}}"}, r"put \{answer\} into it"),
        ({"pattern": "score"}, "exactly one group"),
        ({"pattern": "(a)(b)"}, "exactly one group"),
        ({"pattern": "(a"}, "not a regular expression"),
        ({"scale": [10, 0]}, "from low to high"),
        ({"scale": [3, 3]}, "from low to high"),
        ({"votes": 0}, "greater than or equal to 1"),
        ({"on_unparseable": "ignore"}, "fail"),
        ({"model": {"kind": "endpoint", "url": "localhost:8000", "model": "m"}}, "https"),
        ({"model": {"kind": "endpoint", "url": "http://x", "model": "m", "api_key": "sk-1"}}, "api_key"),
        ({"model": {"kind": "endpoint", "url": "http://x", "model": "m", "api_key_env": "sk-1"}}, "api_key_env"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(options: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValidationError, match=fix):
        judge(**options)


def test_words_that_yaml_takes_for_truth_values_mean_what_was_written() -> None:
    words = judge(words=yaml.safe_load("{yes: 1, Partly: 0.5, no: 0}")).words
    assert (words["yes"], words["partly"], words["no"]) == (1, 0.5, 0)
    assert judge(words=yaml.safe_load("{true: 1, false: 0}")).words["true"] == 1


def test_a_judge_survives_a_round_trip_through_yaml() -> None:
    written = judge(words={"yes": 1, "no": 0}, template_file="t.txt", on_unparseable=0.5, cache="a.sqlite")
    assert JudgeConfig.model_validate(yaml.safe_load(yaml.safe_dump(written.model_dump(mode="json")))) == written


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"votes": 3}, "votes"),
        ({"votes": 3, "temperature": 0.5}, None),
        ({"template_file": "missing.txt"}, "template_file"),
        ({"template_file": "bad.txt"}, "template_file"),
        ({"template_file": "good.txt"}, None),
        ({"template_file": "good.txt", "template": "{answer}"}, "template_file"),
        (
            {"model": {"kind": "endpoint", "url": "http://x", "model": "m", "api_key_env": "NO_SUCH_KEY_HERE"}},
            "model.api_key_env",
        ),
    ],
)
def test_what_would_stop_a_judge_later_is_found_before(tmp_path: Path, options: dict[str, Any], where: str | None) -> None:
    (tmp_path / "bad.txt").write_text("{author}")
    (tmp_path / "good.txt").write_text("{answer}")
    found = list(judge(**options).violations(folder=tmp_path))
    assert [violation.path for violation in found] == ([where] if where else [])


def test_a_reward_models_clip_goes_from_low_to_high() -> None:
    with pytest.raises(ValidationError, match="from low to high"):
        ModelRewardConfig.model_validate({"kind": "reward_model", "model": "m", "clip": [1, -1]})
