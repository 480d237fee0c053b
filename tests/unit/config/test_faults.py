"""One fault in a file is one problem in the report, and the rest of the file is looked at all the same."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from reroll.config.base import NotKnown
from reroll.config.explain import known_part
from reroll.config.load import load_config, parse_config
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError, Violation

EXAMPLES = Path(__file__).parents[3] / "examples"


def put(tree: dict[str, Any], changes: dict[str, Any]) -> None:
    for path, value in changes.items():
        *parents, last = path.split(".")
        node: Any = tree
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[int(last) if isinstance(node, list) else last] = value


def reported(tree: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    return [(violation.path, f"{violation.problem}: {violation.fix}") for violation in caught.value.violations]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"run.trackers": ["neptune"]}, {"run.trackers.0": "'tensorboard'"}),
        ({"policy.optim.betas": [0.9, "two"]}, {"policy.optim.betas.1": "should be a number"}),
        ({"policy.optim.betas": [0.9]}, {"policy.optim.betas": "is [0.9]: give 2 entries"}),
        ({"rollout.stop": [1]}, {"rollout.stop.0": "should be text"}),
        ({"runtime": "ray"}, {"runtime": "is 'ray': write {kind: ray}"}),
        ({"loss": "gone"}, {"loss": "it should be a mapping with a kind: one of reinforce, ppo"}),
        ({"rewards.default": None}, {"rewards.default": "it should be a mapping with a kind: one of exact"}),
        ({"algorithm": None}, {"algorithm": "should be text"}),
        ({"algorithm": ["grpo"]}, {"algorithm": "should be text"}),
        ({"run.runs_dir": 3}, {"run.runs_dir": "should be a path"}),
        ({"data.train.0": {"kind": "env", "domain": "a"}}, {"data.train.0.domain": "has no environment"}),
        ({"cluster.nodes": 10**30}, {"cluster.nodes": "should be less than or equal to"}),
        (
            {"cluster.nodes": [{"device": "h100"}, {"device": {"memory_gib": 4, "kind": "x"}}]},
            {
                f"cluster.nodes.1.device.{name}": ""
                for name in ("kind", "bf16_tflops", "fp32_tflops", "bandwidth_gb_s", "link_gb_s", "host_gb_s")
            },
        ),
        ({"envs.a.env": {"kind": "import"}}, {"envs.a.env.path": "is missing: add path: my_module:my_name"}),
        ({"envs.a.env": {"kind": "tools"}}, {"envs.a.env.tasks": "is missing", "envs.a.env.tools": "is missing"}),
        ({"envs.a.env": {"kind": "gymnasium"}}, {"envs.a.env.env_id": "is missing"}),
        ({"envs.a": {}}, {"envs.a.env": "is missing"}),
        ({"envs.a.env": {}}, {"envs.a.env": "has no kind: add kind: one of "}),
        ({"agents.a": {"kind": "function"}}, {"agents.a.path": "is missing: add path: my_module:my_name"}),
        ({"agents.a": {"kind": "command"}}, {"agents.a.argv": "is missing"}),
        ({"agents.a": {}}, {"agents.a": "has no kind: add kind: one of function, command"}),
        (
            {"envs.a.env": {"kind": "sokoban"}, "envs.a.actions": {"kind": "regex"}},
            {"envs.a.actions.pattern": "is missing", "envs.a.actions.rule": "is missing"},
        ),
        ({"policy.devices": 1.5}, {"policy.devices": "it should be text, an integer or a list"}),
        ({"policy.devices": [0, "x"]}, {"policy.devices.1": "an integer"}),
        ({"policy.lora": {"targets": 5}}, {"policy.lora.targets": "a list or 'all-linear'"}),
        (
            {"cluster.device": {"memory_gib": 4}},
            {
                f"cluster.device.{name}": "is missing"
                for name in ("bf16_tflops", "fp32_tflops", "bandwidth_gb_s", "link_gb_s", "host_gb_s")
            },
        ),
        ({"cluster.device": "b200"}, {"cluster.device": "is 'b200': no data sheet has this name: use one of h100"}),
        ({"pipeline": ["rlvr"]}, {"pipeline": "['rlvr'] is unknown"}),
        ({"policy": None}, {"policy": "should be a mapping"}),
        ({"data.train": []}, {"data.train": "is empty: give at least 1"}),
        ({"rewards.default": {"kind": "exct"}}, {"rewards.default": "did you mean exact?"}),
        ({"rewards.default": {"kind": "import", "path": "score"}}, {"rewards.default.path": "write it like my_module:my_name"}),
        ({"rewards.default": {"kind": "import", "path": "my.py:f"}}, {"rewards.default.path": "write my:f"}),
        ({"rewards.default": {"kind": "import", "path": "__main__:f"}}, {"rewards.default.path": "into a file of its own"}),
        ({"rewards": {}}, {"data.train.0.domain": "has no reward: add rewards.default"}),
        ({"run.steps": True}, {"run.steps": "is true: it should be a number"}),
        ({"policy.optim.betas": [True, 0.9]}, {"policy.optim.betas.0": "should be a number"}),
        ({"run.name": ".."}, {"run.name": "use letters, digits"}),
        ({"run.name": "a/b"}, {"run.name": "use letters, digits"}),
        ({"data.train.0.path": "/"}, {"data.train.0.path": "/ is a folder: name a file in it"}),
        ({"policy.model": "/no/such/folder"}, {"policy.model": "there is no folder /no/such/folder: check the path"}),
        # A rule that asks for a field that is wrong, or that a misspelt key was meant for, cannot say anything true.
        ({"rollout.prompts_per_step": "four", "train.mini_batches": 7}, {"rollout.prompts_per_step": "integer"}),
        (
            {"rollout.prompt_per_step": 7, "train.mini_batches": 7},
            {"rollout.prompt_per_step": "did you mean prompts_per_step?"},
        ),
        ({"rewards.math": {"kind": "nope"}, "data.train.0.domain": "math"}, {"rewards.math": "'nope' is unknown"}),
        # All others do.
        (
            {"rollout.prompts_per_step": "four", "rollout.min_tokens": 65, "data.train.0.limit": "x", "eval.every": 2},
            {
                "rollout.prompts_per_step": "integer",
                "rollout.min_tokens": "at most 64",
                "data.train.0.limit": "integer",
                "eval.every": "data.eval is empty",
            },
        ),
        (
            {
                "rewards.default": {
                    "kind": "stack",
                    "parts": {"a": {"kind": "exact", "patern": "x"}, "b": {"kind": "stack", "parts": {}}},
                }
            },
            {"rewards.default.parts.a.patern": "did you mean pattern?", "rewards.default.parts.b.parts": "is empty"},
        ),
    ],
)
def test_a_fault_is_reported_once_and_nothing_is_invented(
    tree: dict[str, Any], changes: dict[str, Any], expected: dict[str, str]
) -> None:
    put(tree, changes)
    found = reported(tree)
    assert sorted(path for path, _ in found) == sorted(expected)
    for path, says in found:
        assert expected[path] in says


def test_keys_that_are_no_text_are_told_so(tree: dict[str, Any]) -> None:
    tree["rollout"][1] = tree[None] = 2
    tree["rewards"][False] = tree["rewards"]["default"]
    says = dict(reported(tree))
    assert says.keys() == {"rollout.1", "None", "rewards.False"}
    assert says["rewards.False"] == "is a key that YAML does not read as text: put it in quotes"
    assert says["rollout.1"].startswith("unknown key: known here: prompts_per_step")


JUNK: list[Any] = [
    *(None, True, -1, 3.5, math.nan, "", "auto", b"x", 10**30, date(2026, 1, 1), [], [1], ["a", None]),
    *({}, {1: 2}, {None: 1}, {"a": {"b": 1}}, {"kind": 3}, {"kind": "zzz"}, {"kind": "import"}, {"kind": "tools"}),
]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@pytest.mark.parametrize("example", ["multi_domain.yaml", "games/tiny/mixed.yaml", "clusters/qwen3_8b_mixed.yaml"])
def test_whatever_stands_in_a_place_nothing_is_reported_twice_and_every_fault_has_a_fix(example: str) -> None:
    file = EXAMPLES / example
    whole = yaml.safe_load(file.read_text())
    for number, (path, junk) in enumerate(itertools.product(places(whole), JUNK)):
        if number % 20:  # As many as take a second: nearly all places, and each kind of junk in some of them.
            continue
        tree = copy.deepcopy(whole)
        node = tree
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = copy.deepcopy(junk)
        found: Sequence[Violation] = ()
        try:
            parse_config(tree, folder=file.parent)
        except ConfigError as error:
            found = error.violations
        said = [(violation.path, violation.problem) for violation in found]
        assert len(set(said)) == len(said), (path, junk, said)
        assert all(violation.fix for violation in found), (path, junk)


def test_without_a_pipeline_the_rest_is_still_looked_at(tree: dict[str, Any]) -> None:
    del tree["pipeline"]
    tree["rollout"]["group_size"] = 1
    assert [path for path, _ in reported(tree)] == ["pipeline", "rollout.group_size"]
    assert [path for path, _ in reported({"policy": tree["policy"], "data": tree["data"], "rows_per_step": 0})] == [
        "pipeline",
        "rows_per_step",
    ]


def test_what_is_wrong_is_not_known_and_the_rest_is_whole(tree: dict[str, Any]) -> None:
    put(tree, {"rollout.group_size": "x", "data.train.0.weight": -1, "run.seed": 7})
    config = known_part(RlvrConfig, tree, [("rollout", "group_size"), ("data", "train", 0, "weight")])
    assert (config.rollout.max_tokens, config.rollout.take_window, config.run.seed, config.eval.samples) == (64, 1, 7, 1)
    assert config.data.train[0].kind == "jsonl"
    with pytest.raises(NotKnown):
        _ = config.rollout.group_size
    with pytest.raises(NotKnown):
        _ = config.data.train[0].weight


def broken_file(tmp_path: Path, content: bytes) -> list[tuple[str, str]]:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return [(violation.path, violation.problem) for violation in caught.value.violations]


def test_keys_that_stand_twice_are_refused(tmp_path: Path) -> None:
    text = b"run: {name: a}\nrun: {name: b}\npolicy:\n  model: x\n  model: y\n"
    assert broken_file(tmp_path, text) == [
        ("run", "stands twice, in line 1 and in line 2"),
        ("model", "stands twice, in line 4 and in line 5"),
    ]


def test_a_merged_mapping_may_be_overridden(tree: dict[str, Any], tmp_path: Path) -> None:
    merged = "rollout: {<<: {prompts_per_step: 4, group_size: 4, max_tokens: 64, max_prompt_tokens: 64}, group_size: 2}\n"
    rest = {key: value for key, value in tree.items() if key != "rollout"}
    (tmp_path / "run.yaml").write_text(merged + yaml.safe_dump(rest))
    config = load_config(tmp_path / "run.yaml")
    assert isinstance(config, RlvrConfig)
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (4, 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: 1\n# café\n".encode("latin-1"), "is not UTF-8 in line 2"),
        (b"a: 2026-02-30\n", "is not YAML"),
        (b"- 1\n", "no mapping"),
        (b"a: &a {b: *a}\n", "Circular reference"),
    ],
)
def test_a_file_that_is_no_config_is_told_in_words(tmp_path: Path, content: bytes, says: str) -> None:
    [(path, problem)] = broken_file(tmp_path, content)
    assert path.endswith("run.yaml")
    assert says in problem
