"""What `reroll check` says about the way that weights take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.errors import ConfigError

RAY = {"kind": "ray", "num_gpus": 4}
PROCESSES = {"kind": "processes"}


@pytest.mark.parametrize(
    ("runtime", "policy", "engine", "weights", "says"),
    [
        ({"kind": "local"}, "cpu", "cpu", {"kind": "broadcast"}, "weights.kind: is broadcast, but the local runtime"),
        ({"kind": "local"}, "cpu", "cpu", {"delta": True}, "weights.delta: is set, but inside one process nothing is sent"),
        (RAY, "cpu", "cpu", {"kind": "shared"}, "weights.kind: is shared, but policy and engine run in processes"),
        (PROCESSES, "cpu", "cpu", {"kind": "shared"}, "weights.kind: is shared, but policy and engine run in processes"),
        (RAY, "cpu", "cpu", {"kind": "store", "folder": "x"}, "weights.folder: is set, but kind store writes no files"),
        (RAY, 0, 0, {"kind": "broadcast"}, "weights.kind: is broadcast, which takes one process per GPU"),
        (RAY, 0, "cpu", {"kind": "broadcast"}, "weights.kind: is broadcast, which takes one process per GPU"),
        (RAY, 0, 1, {"kind": "ipc"}, "weights.kind: is ipc, but an engine sits where no rank of the policy does"),
        (RAY, 0, "cpu", {"kind": "ipc"}, "weights.kind: is ipc, but an engine sits where no rank of the policy does"),
        (RAY, "cpu", "cpu", {"bucket_mb": 0}, "weights.bucket_mb"),
    ],
)  # fmt: skip
def test_a_way_that_cannot_work_is_refused_with_the_fix(
    rlvr_tree: dict[str, Any], runtime: Any, policy: Any, engine: Any, weights: Any, says: str
) -> None:
    rlvr_tree |= {"runtime": runtime, "weights": weights}
    rlvr_tree["policy"]["devices"], rlvr_tree["engine"]["devices"] = policy, engine
    with pytest.raises(ConfigError) as caught:
        parse_config(rlvr_tree, folder=Path(rlvr_tree["run"]["runs_dir"]).parent)
    assert str(caught.value).startswith(says)
    assert len(caught.value.violations) == 1


@pytest.mark.parametrize(
    ("policy", "engine", "weights"),
    [
        ("cpu", "cpu", {"kind": "ipc", "delta": True}),
        ("cpu", "cpu", {"kind": "broadcast"}),
        ("cpu", "cpu", {"kind": "disk", "folder": "elsewhere"}),
        (0, 0, {"kind": "ipc"}),
        (0, 1, {"kind": "broadcast"}),
        (0, 1, {"kind": "store", "bucket_mb": 0.5}),
        ("auto", "auto", {"kind": "ipc"}),
    ],
)
def test_a_way_that_may_work_is_taken(rlvr_tree: dict[str, Any], policy: Any, engine: Any, weights: Any) -> None:
    rlvr_tree |= {"runtime": RAY, "weights": weights}
    rlvr_tree["policy"]["devices"], rlvr_tree["engine"]["devices"] = policy, engine
    config = parse_config(rlvr_tree, folder=Path(rlvr_tree["run"]["runs_dir"]).parent)
    assert config.weights.kind == weights["kind"]  # type: ignore[union-attr]
