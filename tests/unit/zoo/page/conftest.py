"""A run's folder as a run leaves it, without the run: a journal of two groups, metrics, logged samples, a config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from reroll.config.load import parse_config
from reroll.observe.journal import Journal, SampleState
from reroll.types import Completion, FinishReason, Message, Status, Trajectory, Turn

HOSTILE = "</pre><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def trajectory(id: str, ids: tuple[int, ...], *, reward: float, shown: str = "say 7") -> Trajectory:
    completion = Completion(
        token_ids=ids,
        logprobs=tuple(-0.25 * place for place in range(len(ids))),
        finish_reason=FinishReason.STOP,
        versions=((0, 1), (1, len(ids) - 1)),
    )
    turn = Turn(prompt_ids=(1, 2), completion=completion, text="", shown=(Message(role="user", content=shown),))
    return Trajectory(id=id, turns=(turn,), status=Status.COMPLETED, reward=reward, reward_parts={"form": reward})


def write_journal(folder: Path) -> None:
    """Group 0 was trained on, group 1 is half done."""
    with Journal(folder) as journal:
        for group in (0, 1):
            for index in (0, 1):
                about = {"prompt": f"p{group}", "domain": "sums" if group == 0 else "words", "version": group}
                journal.record(f"{group}.{index}", SampleState.QUEUED, **about)
        for number, id in enumerate(("0.0", "0.1", "1.0")):
            journal.record(id, SampleState.GENERATING)
            journal.record(id, SampleState.SCORING, tokens=3 + number)
            journal.ended(id, trajectory(id, (5, 6, 7), reward=number / 2, shown=HOSTILE if id == "0.1" else "say 7"))
        journal.taken([0])
        for id in ("0.0", "0.1"):
            journal.record(id, SampleState.TRAINED, version=1)
        journal.stepped(version=1)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    """The folder of run `one`; run `two` lies beside it."""
    for name, lr in (("one", 1e-3), ("two", 2e-3)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        tree = {
            "pipeline": "rlvr",
            "run": {"name": name, "runs_dir": str(tmp_path / "runs"), "steps": 10},
            "policy": {"model": str(tiny_model), "devices": "cpu", "optim": {"lr": lr}},
            "engine": {"devices": "cpu"},
            "data": {"train": [{"kind": "jsonl", "path": "digits.jsonl"}]},
            "rewards": {"default": {"kind": "exact"}},
            "rollout": {"prompts_per_step": 1, "group_size": 2},
        }
        config = parse_config(tree, runs_here=False)
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        rows = [{"step": step, "reward/mean": step / 10, "time/step_s": 1.0} for step in range(1, 4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_journal(tmp_path / "runs" / "one" / "journal")
    return tmp_path / "runs" / "one"
