"""Whole runs of a model that sees: imitation, GRPO and games shown as pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from reroll.config.load import parse_config
from reroll.models.load import load_model
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import evaluate, train
from reroll_zoo.vision.tiny import make_tiny_vision

COLOURS = {"r": (255, 40, 40), "g": (40, 255, 40), "b": (40, 40, 255), "w": (255, 255, 255)}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "seeing"
    return make_tiny_vision(folder, image_size=16, hidden=32, vision_hidden=32, words=("Colour?",), seed=2)


@pytest.fixture
def tree(tmp_path: Path, seeing: Path) -> dict[str, Any]:
    """What is learned: the colour of a noisy square."""
    rng, rows = np.random.default_rng(0), []
    for number in range(40):
        name, colour = list(COLOURS.items())[number % len(COLOURS)]
        pixels = np.clip(np.array(colour) + rng.integers(-40, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        rows.append({"prompt": "Colour?", "image": f"{number}.png", "answer": name})
    for part, chosen in (("train", rows[8:]), ("held_out", rows[:8])):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return {
        "run": {"name": "seeing", "runs_dir": str(tmp_path / "runs")},
        "policy": {"model": str(seeing), "devices": "cpu", "optim": {"lr": 5e-3}},
        "data": {
            "train": [{"kind": "jsonl", "path": str(tmp_path / "train.jsonl")}],
            "eval": [{"kind": "jsonl", "path": str(tmp_path / "held_out.jsonl")}],
        },
    }


def sft(tree: dict[str, Any], *, steps: int = 40) -> dict[str, Any]:
    return {**tree, "pipeline": "sft", "run": {**tree["run"], "steps": steps}, "rows_per_step": 16, "max_tokens": 64}


def grpo(tree: dict[str, Any], **fields: Any) -> dict[str, Any]:
    rollout = {"prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 40, "max_tokens": 2}
    return {
        **tree,
        "pipeline": "rlvr",
        "run": {**tree["run"], "name": "grpo", "steps": 3},
        "engine": {"devices": "cpu"},
        "rewards": {"default": {"kind": "exact"}},
        "rollout": rollout,
        **fields,
    }


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]


def weights_of(folder: Path) -> dict[str, Tensor]:
    return dict(load_model(str(folder), dtype=torch.float32, device="cpu").named_parameters())


def test_a_model_learns_to_name_what_it_sees_and_goes_on_by_rl(tree: dict[str, Any]) -> None:
    warm = train(parse_config(sft(tree)))
    # Blind, no model gets below ln 4 for the letter, halved by the end of the turn, which is sure.
    assert warm.evals[40]["eval/loss"] < 0.35, "it tells four colours apart"
    tree["policy"] |= {"model": str(warm.checkpoint), "optim": {"lr": 1e-4}}
    outcome = train(parse_config(grpo(tree)))
    shown = {file.read_bytes() for file in outcome.folder.glob("pictures/*")}
    drawn = {file.read_bytes() for file in Path(tree["data"]["train"][0]["path"]).parent.glob("*.png")}
    assert 12 <= len(shown) == len([*outcome.folder.glob("pictures/*")]), "each is kept once"
    assert shown <= drawn
    gaps = [row["train/sampler_gap_current"] for row in rows_of(outcome) if "train/sampler_gap_current" in row]
    assert gaps
    assert max(gaps) < 1e-4, "the engine sees what the trainer sees"
    assert evaluate(parse_config(grpo(tree))).pass_rate > 0.5


LIGHTS = """
import numpy as np

from reroll.envs.base import StepResult
from reroll_zoo.vision.parts import message


class Lights:
    def reset(self, seed):
        self.rng, self.turn = np.random.default_rng(seed), 0
        return (message("user", self.seen(), "Colour?"),)

    def seen(self):
        return np.full((16, 16, 3), self.rng.integers(0, 255, 3), dtype=np.uint8)

    def step(self, action):
        self.turn += 1
        messages = (message("user", self.seen()),) if self.turn < 3 else ()
        return StepResult(messages=messages, reward=float(len(action)), terminated=self.turn == 3)

    def close(self):
        pass
"""


@pytest.fixture
def lights(tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """An environment that shows a picture in every turn."""
    (tmp_path / "reroll_test_lights.py").write_text(LIGHTS)
    env = {"env": {"kind": "import", "path": "reroll_test_lights:Lights"}, "actions": {"kind": "text"}, "max_turns": 3}
    agentic = grpo(tree, pipeline="agentic", envs={"lights": env}, rewards={})
    agentic["data"] = {"train": [{"kind": "env", "domain": "lights", "num": 50}]}
    agentic["rollout"] |= {"max_prompt_tokens": 200, "max_total_tokens": 256}
    return agentic


@pytest.mark.parametrize("workers", ["inline", "processes"])
def test_an_environment_shows_a_picture_in_every_turn(lights: dict[str, Any], tmp_path: Path, workers: str) -> None:
    config = parse_config(lights | {"env_workers": {"kind": workers}}, folder=tmp_path)
    outcome = train(config, code_folder=tmp_path)
    rows = [row for row in rows_of(outcome) if "reward/mean" in row]
    assert all(row["env/lights/turns"] == 3 for row in rows)
    assert max(row["train/sampler_gap_max"] for row in rows) < 1e-5, "the engine sees what the trainer sees, in later turns too"
    # Three turns of four instances in three steps; siblings see the same.
    assert len([*outcome.folder.glob("pictures/*")]) == 36


@pytest.mark.slow
def test_two_ranks_have_the_run_of_one_process(lights: dict[str, Any], tmp_path: Path, seeing: Path) -> None:
    lights |= {"runtime": {"kind": "processes"}, "env_workers": {"kind": "inline"}}
    runs = {}
    for name, strategy in {"alone": {}, "ranks": {"strategy": {"kind": "fsdp2", "num_ranks": 2}}}.items():
        lights["run"]["name"] = name
        policy = lights["policy"] | strategy
        outcome = train(parse_config(lights | {"policy": policy}, folder=tmp_path), code_folder=tmp_path)
        gaps = [row["train/sampler_gap_max"] for row in rows_of(outcome) if "reward/mean" in row]
        assert max(gaps) < 1e-5, "the engine sees what the ranks see, after pushes too"
        runs[name] = weights_of(outcome.checkpoint)
    first = weights_of(seeing)
    assert max(float((runs["alone"][name] - weight).detach().abs().max()) for name, weight in first.items()) > 1e-3
    torch.testing.assert_close(runs["ranks"], runs["alone"], rtol=0, atol=1e-4)


def test_a_tower_stays_as_it_was_unless_it_is_to_be_trained(tree: dict[str, Any], seeing: Path) -> None:
    first = weights_of(seeing)
    for trains in (False, True):
        tree["policy"]["train_vision"] = trains
        tree["run"]["name"] = f"tower-{trains}"
        last = weights_of(train(parse_config(sft(tree, steps=2))).checkpoint)
        changed = {"text" if "text_model" in name else "tower" for name in first if not torch.equal(first[name], last[name])}
        assert changed == ({"text", "tower"} if trains else {"text"})
