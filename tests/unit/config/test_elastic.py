"""Engines that come and go: what is refused, and where they begin."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reroll.config.elastic import begin_elastic
from reroll.config.host import parse_devices
from reroll.config.load import parse_config
from reroll.errors import ConfigError, NoRoom


def parse(tree: dict[str, Any], *, policy: Any = "cpu", runtime: str = "ray", num_gpus: int = 0, **engine: Any) -> Any:
    changes = {
        "runtime": {"kind": runtime, **({"num_gpus": num_gpus} if num_gpus else {})},
        "engine": {"devices": "elastic", **engine},
        "policy": {**tree["policy"], "devices": policy, "strategy": {"kind": "fsdp2" if num_gpus else "torch"}},
    }
    return parse_config(tree | changes, folder=Path(tree["policy"]["model"]).parent)


@pytest.mark.parametrize("kind", ["local", "processes"])
def test_engines_join_on_ray_only(tree: dict[str, Any], kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.devices: .*the {kind} runtime is one machine.*runtime: {{kind: ray}}"):
        parse(tree, runtime=kind)
    assert parse(tree).engine.devices == "elastic"


def test_a_bound_must_leave_room_for_those_that_the_run_begins_with(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine.max_workers: 2 is less than engine.num_workers.*set it to 3 or more"):
        parse(tree, num_workers=3, max_workers=2)
    assert parse(tree, num_workers=3, max_workers=3)


def test_a_bound_on_engines_of_which_none_joins_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine.max_workers: is set, but no engine joins"):
        parse(tree, devices="cpu", max_workers=4)


def test_models_name_their_devices_beside_elastic_engines(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"policy.devices: is auto, and elastic engines take the GPUs that no model names"):
        parse(tree, policy="auto")


def test_engines_begin_on_the_first_gpus_that_no_model_names_and_others_may_join(tree: dict[str, Any]) -> None:
    config = begin_elastic(parse(tree, policy="0-1", num_gpus=8, num_workers=2), partial(parse_devices, num_gpus=8))
    assert config.engine.devices == [2, 3]
    assert config.engine.max_workers > 1000
    config = begin_elastic(
        parse(tree, policy="0-1", num_gpus=8, num_workers=2, max_workers=4), partial(parse_devices, num_gpus=8)
    )
    assert config.engine.max_workers == 4


def test_without_gpus_they_begin_on_the_cpu(tree: dict[str, Any]) -> None:
    assert begin_elastic(parse(tree), partial(parse_devices, num_gpus=0)).engine.devices == "cpu"


def test_where_no_gpu_is_left_for_those_that_begin_the_run_says_what_to_do(tree: dict[str, Any]) -> None:
    with pytest.raises(NoRoom, match="begin on 2 GPUs that no model names, and of 4 there are 1 left: name fewer"):
        begin_elastic(parse(tree, policy="0-2", num_gpus=4, num_workers=2), partial(parse_devices, num_gpus=4))


def test_engines_that_do_not_join_are_left_as_they_are(tree: dict[str, Any]) -> None:
    config = parse(tree, devices="cpu")
    assert begin_elastic(config, partial(parse_devices, num_gpus=8)) is config
