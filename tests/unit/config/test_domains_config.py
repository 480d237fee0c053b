"""Settings of one domain: what they fall back to, and what is wrong with them."""

import json
from pathlib import Path
from typing import Any, Optional

import pytest

from reroll.config.load import parse_config
from reroll.config.parts import DomainEvalConfig, DomainRolloutConfig, EvalConfig, RolloutConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError


def tree(folder: Path, **parts: Any) -> dict[str, Any]:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    data = folder / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "1 + 1", "answer": "2"}) + "\n")
    sources = [{"kind": "jsonl", "path": str(data), "domain": domain} for domain in ("math", "code")]
    whole = {
        "pipeline": "rlvr",
        "policy": {"model": str(model), "devices": "cpu"},
        "engine": {"devices": "cpu"},
        "data": {"train": sources, "eval": sources[:1]},
        "rewards": {"default": {"kind": "exact"}},
    }
    return whole | parts


def violations(folder: Path, **parts: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree(folder, **parts), folder=folder)
    return {violation.path: f"{violation.problem} -> {violation.fix}" for violation in caught.value.violations}


def test_a_domains_fields_are_bounded_as_those_that_they_replace() -> None:
    for of_domain, whole in ((DomainRolloutConfig, RolloutConfig), (DomainEvalConfig, EvalConfig)):
        for name, field in of_domain.model_fields.items():
            replaced = whole.model_fields[name]
            assert (field.metadata, field.default) == (replaced.metadata, None), name
            assert field.annotation in (replaced.annotation, Optional[replaced.annotation]), name  # noqa: UP045


def test_what_a_domain_leaves_out_is_as_the_rollout_says() -> None:
    config = RolloutConfig(group_size=4, temperature=0.9, stop=["!"], domains={"math": {"group_size": 16, "top_k": 0}})
    math = config.of("math")
    assert (math.group_size, math.temperature, math.stop, math.top_k) == (16, 0.9, ["!"], 0)
    assert config.of("code") is config


def test_what_a_domain_leaves_out_is_as_the_evaluation_says() -> None:
    config = EvalConfig(samples=2, temperature=0.7, domains={"math": {"samples": 8}})
    assert (config.of("math").samples, config.of("math").temperature, config.of("code").samples) == (8, 0.7, 2)


def test_a_sound_config_with_settings_by_domain_passes(tmp_path: Path) -> None:
    rollout = {"domains": {"math": {"group_size": 3, "max_tokens": 512, "temperature": 0.8}}}
    config = parse_config(
        tree(
            tmp_path, rollout=rollout, eval={"domains": {"math": {"samples": 4, "temperature": 0.6}}}, train={"mini_batches": 3}
        ),
        folder=tmp_path,
    )
    assert isinstance(config, RlvrConfig)
    assert config.rollout.of("math").max_tokens == 512


def test_settings_of_an_unknown_domain_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    found = violations(tmp_path, rollout={"domains": {"maths": {}}}, eval={"domains": {"code": {}}})
    assert "choose among: code, math" in found["rollout.domains.maths"]
    assert "no source of data.eval" in found["eval.domains.code"]
    assert "choose among: math" in found["eval.domains.code"]


def test_a_domains_own_settings_keep_the_rules_of_the_rollout(tmp_path: Path) -> None:
    domains = {"math": {"group_size": 1, "min_tokens": 300}, "code": {"max_tokens": 4096}}
    found = violations(tmp_path, rollout={"domains": domains})
    assert "at least 2" in found["rollout.domains.math.group_size"]
    assert "300 is more than" in found["rollout.domains.math.min_tokens"]
    assert "exceeds the model's context of 2048" in found["rollout.domains.code.max_tokens"]
    assert "rollout.max_tokens" not in found


def test_several_greedy_samples_of_one_domain_are_refused(tmp_path: Path) -> None:
    found = violations(tmp_path, eval={"domains": {"math": {"samples": 4}}})
    assert "4 greedy samples" in found["eval.domains.math.samples"]


def test_levels_without_a_ladder_and_a_ladder_without_levels_are_refused(tmp_path: Path) -> None:
    whole = tree(tmp_path)
    whole["data"]["curriculum"] = {"kind": "ladder"}
    assert "no domain has sources of different levels" in violations(tmp_path, data=whole["data"])["data.curriculum.kind"]
    whole["data"]["train"][1]["level"] = 2
    assert "different levels" in violations(tmp_path, data=whole["data"])["data.curriculum.kind"], "levels of two domains"
    whole["data"]["curriculum"] = {"kind": "filter", "low": 0.9, "high": 0.1}
    found = violations(tmp_path, data=whole["data"])
    assert "nothing goes by levels" in found["data.train.1.level"]
    assert "no prompt fits" in found["data.curriculum.low"]
