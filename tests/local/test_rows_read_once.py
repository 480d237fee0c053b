"""The rows of a run are read once: by the check before it, which hands them over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reroll
from reroll.config.load import parse_config
from reroll.errors import WorkerDied
from reroll.pipeline import restarts
from reroll.pipeline.run import TrainLoop, train

OWN_ROWS = """
from pathlib import Path

READ = Path(__file__).with_name("read.txt")


def rows(name):
    with READ.open("a") as file:
        file.write(f"{name}\\n")
    for digit in range(10):
        yield {
            "prompt": f"say {digit}",
            "answer": str(digit),
            "chosen": str(digit),
            "rejected": "no",
            "label": digit % 2,
        }
"""


def own(name: str) -> dict[str, Any]:
    return {"kind": "import", "path": "counted_rows:rows", "options": {"name": name}}


@pytest.fixture
def tree(rlvr_tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "counted_rows.py").write_text(OWN_ROWS)
    rlvr_tree["run"]["steps"] = 1
    rlvr_tree["data"] = {"train": [own("first"), own("second")], "eval": [own("held out")]}
    return rlvr_tree


OFFLINE: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {},
    "dpo by kto": {"pipeline": "dpo", "loss": {"kind": "kto"}},
    "reward_model": {},
}


@pytest.mark.parametrize("name", ["rlvr", *OFFLINE])
def test_every_source_of_a_run_is_read_once(tree: dict[str, Any], tmp_path: Path, name: str) -> None:
    if name in OFFLINE:
        tree = {key: tree[key] for key in ("run", "policy", "data")} | {"pipeline": name, "max_tokens": 64} | OFFLINE[name]
    train(parse_config(tree, folder=tmp_path), code_folder=tmp_path)
    assert (tmp_path / "read.txt").read_text().splitlines() == ["first", "second", "held out"]


def test_a_run_that_heals_goes_on_with_the_rows_that_it_began_with(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["run"]["restarts"] = 1
    run, lost = TrainLoop.run, [WorkerDied("policy[0] died")]

    async def loses_a_worker(loop: TrainLoop) -> Any:
        if lost:
            raise lost.pop()
        return await run(loop)

    monkeypatch.setattr(TrainLoop, "run", loses_a_worker)
    monkeypatch.setattr(restarts, "PAUSE_S", 0.01)
    assert train(parse_config(tree, folder=tmp_path), code_folder=tmp_path).num_steps == 1
    assert (tmp_path / "read.txt").read_text().splitlines() == ["first", "second", "held out"]


async def test_a_loop_of_ones_own_reads_them_once_too(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with reroll.build(parse_config(tree, folder=tmp_path)) as parts:
        assert [prompt.id for prompt in parts.held_out] == [f"eval/default/{index}" for index in range(10)]
    assert (tmp_path / "read.txt").read_text().splitlines() == ["first", "second", "held out"]
