"""The config tree explains itself: fields by their path, without a file."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from reroll.cli import app
from reroll.config.pipeline import pipelines
from reroll.errors import ConfigError
from reroll_zoo.reference.reference import (
    about,
    all_paths,
    bounds_in_words,
    default_in_words,
    find,
    set_by_presets,
    type_in_words,
)


def explained(path: str) -> str:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["check", "--explain", path], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_field_is_told_with_type_bounds_default_docstring_and_pipelines() -> None:
    told = explained("rollout.take_window")
    assert "pipeline: rlvr, agentic" in told
    assert "integer, at least 1, default `1`" in told
    assert "1 is strictly oldest first" in told


@pytest.mark.parametrize("path", ["loss.kind=ppo", "loss.ppo"])
def test_a_kind_is_told_with_its_fields(path: str) -> None:
    told = explained(path)
    assert "The clipped surrogate" in told
    assert "clip_high" in told
    assert "not pushed further up" in told


def test_a_union_is_told_with_its_kinds() -> None:
    told = explained("policy.strategy")
    assert "default `{kind: torch}`" in told
    for kind in ("torch", "fsdp2", "deepspeed"):
        assert kind in told


def test_a_field_that_several_kinds_have_is_told_for_each() -> None:
    defaults = {
        place.owner.__name__: default_in_words(place.field) for place, _ in find("loss.clip_low") if place.owner and place.field
    }
    assert defaults["PpoLossConfig"] == "`0.2`"
    assert defaults["CispoLossConfig"] == "`1`"


def test_pipelines_that_mean_different_things_are_told_apart() -> None:
    assert [pipelines for _, pipelines in find("loss")] == [("rlvr", "agentic"), ("dpo",)]
    [(_, pipelines)] = find("policy.optim.lr")
    assert pipelines == ("rlvr", "agentic", "sft", "dpo", "reward_model", "distill")


@pytest.mark.parametrize(
    "path",
    [
        "rewards.default.kind=judge",
        "rewards.kind=judge",
        "rewards.judge",
        "rewards.math.kind=judge",
        "rewards.all.parts.a.kind=judge",
    ],
)
def test_domains_may_stand_in_a_path_or_be_left_out(path: str) -> None:
    [(place, _)] = find(path)
    assert [node.__name__ for node in place.nodes] == ["JudgeConfig"]


def test_lists_are_gone_into_with_and_without_an_index() -> None:
    assert find("data.train.0.path") == find("data.train.path")


def test_what_a_preset_sets_is_told_of_its_own_kind_and_pipeline_only() -> None:
    told = explained("aggregation")
    assert "sequence_mean with algorithm: grpo" in told
    by_owner = {
        place.owner.__name__: set_by_presets("loss.clip_high", place.owner)
        for place, _ in find("loss.clip_high")
        if place.owner
    }
    assert "dapo" in by_owner["PpoLossConfig"]["0.28"]
    assert by_owner["GspoLossConfig"] == {}
    assert "algorithm" not in explained("loss").partition("pipeline: dpo")[2]


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("take_windo", "did you mean rollout.take_window?"),
        ("rollout.take_windw", "did you mean take_window?"),
        ("rolout.take_windw", "did you mean rollout.take_window?"),
        ("loss.kind=pppo", "did you mean kind=ppo?"),
        ("prompts_per_stp", "did you mean rollout.prompts_per_step?"),
        ("kl.zzz", "known there: coef, "),
        ("zzz", "known there: pipeline, run"),
    ],
)
def test_a_path_that_leads_nowhere_is_told_where_it_should(path: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(path)
    [violation] = caught.value.violations
    assert violation.fix.startswith(fix)


def test_every_field_of_the_tree_can_be_put_into_words() -> None:
    paths = all_paths()
    assert len(paths) > 500
    for path, place in paths.items():
        assert place.field is not None
        words = [
            type_in_words(place.annotation),
            default_in_words(place.field),
            bounds_in_words(place.field),
            about(place.field),
        ]
        assert not any("typing." in word or "<class" in word or "Factory" in word for word in words), path
        assert find(path), path


NAMED_BY_THEIR_CLASS = {"DomainRolloutConfig", "DomainEvalConfig", "FrozenLakeSymbolsConfig", "SokobanSymbolsConfig"}
"""Whose fields are as those of another node, or say it all by their names."""


def test_every_field_says_what_it_does() -> None:
    nodes = {node for place in all_paths().values() for node in place.nodes} | set(pipelines().values())
    silent = [
        f"{node.__name__}.{name}"
        for node in nodes
        if node.__name__ not in NAMED_BY_THEIR_CLASS
        for name, field in node.model_fields.items()
        if name != "kind" and not about(field)
    ]
    assert silent == [], "write a docstring below each"
