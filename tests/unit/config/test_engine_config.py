from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.config.parts import EmbeddedEngineConfig
from reroll.errors import ConfigError
from reroll_zoo.sglang.config import SglangConfig
from reroll_zoo.tiny_models import make_tiny
from reroll_zoo.vllm.config import VllmEngineConfig


def parse(tree: dict[str, Any], **engine: Any) -> Any:
    return parse_config(tree | {"engine": {"devices": "cpu", **engine}}, folder=Path(tree["run"]["runs_dir"]).parent)


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were there: checks look for it, and do not import it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object() if name == "vllm" else find(name, *rest))


def test_an_engine_without_a_kind_is_embedded(rlvr_tree: dict[str, Any]) -> None:
    assert isinstance(parse(rlvr_tree, max_running=9).engine, EmbeddedEngineConfig)


@pytest.mark.usefixtures("with_vllm")
def test_vllm_is_asked_for_by_its_kind(rlvr_tree: dict[str, Any]) -> None:
    assert isinstance(parse(rlvr_tree, kind="vllm", enforce_eager=True).engine, VllmEngineConfig)


def test_without_the_package_the_check_says_what_to_install(rlvr_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    with pytest.raises(ConfigError, match=r"engine.kind: needs the package vllm \(pip install 'reroll\[vllm\]'\)"):
        parse(rlvr_tree, kind="vllm")


@pytest.mark.usefixtures("with_vllm")
def test_one_process_holds_one_vllm_engine(rlvr_tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine.num_workers: .*runtime.kind to processes or ray"):
        parse(rlvr_tree, kind="vllm", num_workers=2)
    for kind in ("processes", "ray"):
        assert parse(rlvr_tree | {"runtime": {"kind": kind}}, kind="vllm", num_workers=2)


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize("devices", [0, "0-2", {"gpus": 3, "label": {"pool": "a100"}}])
def test_a_vllm_engine_is_not_spread_over_more_gpus_than_it_has(rlvr_tree: dict[str, Any], devices: Any) -> None:
    tree = rlvr_tree | {"runtime": {"kind": "ray", "num_gpus": 8}}
    with pytest.raises(ConfigError, match=r"engine.devices: names \d GPUs?, and each worker is spread over 4"):
        parse(tree, kind="vllm", tp=4, devices=devices)
    assert parse(tree, kind="vllm", tp=4, devices="0-3")


@pytest.mark.usefixtures("with_vllm")
def test_a_context_limit_must_hold_a_prompt_and_its_completion(rlvr_tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine.max_model_len: 37 is less than .* 38"):
        parse(rlvr_tree, kind="vllm", max_model_len=37)
    assert parse(rlvr_tree, kind="vllm", max_model_len=38)


def test_an_unknown_kind_names_the_known_ones(rlvr_tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="embedded"):
        parse(rlvr_tree, kind="llama.cpp")


@pytest.fixture
def sglang_python(tmp_path: Path) -> str:
    """An interpreter that finds sglang, whatever it is asked."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    return str(python)


def test_sglang_is_asked_for_by_its_kind(
    rlvr_tree: dict[str, Any], sglang_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    engine = parse(rlvr_tree, kind="sglang", devices=0, python=sglang_python, options={"attention_backend": "fa3"}).engine
    assert isinstance(engine, SglangConfig)
    assert engine.options == {"attention_backend": "fa3"}


def test_sglang_is_refused_on_a_cpu(rlvr_tree: dict[str, Any], sglang_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for devices in ("cpu", "auto"):
        with pytest.raises(ConfigError, match=r"engine.devices: sglang needs a GPU \(name GPUs"):
            parse(rlvr_tree, kind="sglang", devices=devices, python=sglang_python)


def test_an_interpreter_that_is_missing_or_has_no_sglang_is_refused(rlvr_tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine.python: there is no interpreter /no/python .*setup_sglang.sh"):
        parse(rlvr_tree, kind="sglang", python="/no/python")
    with pytest.raises(ConfigError, match=r"engine.python: .* has no package sglang .*setup_sglang.sh"):
        parse(rlvr_tree, kind="sglang", python=sys.executable)


def test_on_a_cluster_the_interpreter_is_looked_for_where_the_engine_starts(rlvr_tree: dict[str, Any]) -> None:
    tree = rlvr_tree | {"runtime": {"kind": "ray", "num_gpus": 8}}
    assert parse(tree, kind="sglang", devices="0-3", python="/on/the/nodes", tp=2, num_workers=2)


@pytest.mark.usefixtures("with_vllm")
def test_experts_are_replayed_only_of_engines_that_tell_of_them_and_of_families_that_are_known(
    rlvr_tree: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny(tmp_path / "moe", family="qwen3_moe", hidden=16)
    moe = rlvr_tree | {"policy": {"model": str(folder), "replay_routes": True, "devices": "cpu"}}
    assert parse(moe).policy.replays_routes
    with pytest.raises(ConfigError, match=r"policy.replay_routes: is set, but an engine of kind vllm does not tell here"):
        parse(moe, kind="vllm")
    dense = rlvr_tree | {"policy": rlvr_tree["policy"] | {"replay_routes": True}}
    with pytest.raises(ConfigError, match=r"policy.replay_routes: is set, but .*families afmoe, .* not llama"):
        parse(dense)


@pytest.mark.usefixtures("with_vllm")
def test_options_of_vllm_are_passed_on_unless_reroll_makes_them_itself(rlvr_tree: dict[str, Any]) -> None:
    assert parse(rlvr_tree, kind="vllm", options={"kv_cache_dtype": "fp8"}).engine.options == {"kv_cache_dtype": "fp8"}
    with pytest.raises(ConfigError, match=r"engine.options: dtype, max_num_seqs: reroll makes this setting itself"):
        parse(rlvr_tree, kind="vllm", options={"max_num_seqs": 3, "dtype": "float16", "seed": 1})


def test_drafts_are_refused_for_layers_that_carry_a_state_before_anything_starts(
    rlvr_tree: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny(tmp_path / "mamba", family="falcon_h1", hidden=16, mamba_n_heads=2, mamba_d_ssm=16, mamba_d_state=8)
    tree = rlvr_tree | {"policy": rlvr_tree["policy"] | {"model": str(folder)}}
    assert parse(tree)
    with pytest.raises(ConfigError, match=r"engine\.draft: is auto, but a wrong draft .* layers of falcon_h1 carry"):
        parse(tree, draft="auto")
    assert parse(rlvr_tree, draft="auto")
