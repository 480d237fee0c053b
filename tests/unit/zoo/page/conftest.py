"""A run's folder as a run leaves it, without the run: a journal of two groups, metrics, logged samples, a config."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import yaml
from PIL import Image

from reroll.config.load import parse_config
from reroll.observe.journal import Journal, SampleState
from reroll.types import Completion, FinishReason, Message, Status, Trajectory, Turn
from reroll_zoo.samples.activity import CREDITED
from reroll_zoo.samples.pictures import FOLDER
from reroll_zoo.vision.store import PICTURES

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


def png(red: int = 200) -> bytes:
    """A picture of one colour."""
    file = BytesIO()
    Image.new("RGB", (24, 16), (red, 40, 90)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def seen(run: Path) -> str:
    """Sample 3.0 of the run: it was shown a picture and, in a later turn, one that is not kept; the first of its two turns was
    trained on, the second was masked."""
    name = PICTURES.write("data:image/png;base64," + b64encode(png()).decode(), run / FOLDER)
    about: Message = {"role": "user", "content": "before\ufffcafter", "images": [name]}
    gone: Message = {"role": "user", "content": "\ufffc", "images": ["/tmp/elsewhere.png"]}
    first = trajectory("3.0", (5, 6, 7), reward=1.0).turns[0]
    later = replace(first, prompt_ids=(1, 2, 5, 6, 7, 3), shown=(gone,))
    turns = (replace(first, shown=(about,)), later)
    with Journal(run / "journal") as journal:
        journal.record("3.0", SampleState.QUEUED, prompt="p3", domain="sums", version=1)
        journal.ended("3.0", replace(trajectory("3.0", (5,), reward=1.0), turns=turns))
        journal.record("", CREDITED, samples=["3.0"], advantages=[[[1.5, 2], [-0.5, 1], [None, 3]]])
    return name.removeprefix("picture:")


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
