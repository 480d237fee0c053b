"""Whole runs from Python objects: closures, classes and pipelines that no module has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import reroll
from reroll.observe.metrics import Last, Stats
from reroll_zoo.tiny_models import make_tiny

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number} =", "answer": str(number)} for number in range(8)]
    model = str(make_tiny(tmp_path / "tiny"))
    return {"model": model, "data": rows, "lr": 1e-3, "prompts_per_step": 2, "group_size": 4, "max_tokens": 8, "steps": 2}


def test_objects_travel_to_processes_and_mean_there_what_they_mean_here(small: dict[str, Any]) -> None:
    scale = 2.0
    curves = []
    for kind in ("local", "processes"):
        run = reroll.train(
            **small,
            reward=lambda prompt, trajectory: trajectory.text.count("1") / 8,
            loss=lambda t: -scale * t.ratio * t.advantage,
            advantage=lambda episodes: episodes.spread(episodes.reward - episodes.reward.mean()),
            runtime={"kind": kind},
        )
        curves.append([(row["reward/mean"], row["train/grad_norm"]) for row in run.metrics if "reward/mean" in row])
    assert curves[0] == curves[1]
    assert len(curves[0]) == 2


@pytest.mark.usefixtures("pictures")
def test_a_closure_judges_a_lambda_is_the_loss_and_an_own_pipeline_runs_them(small: dict[str, Any]) -> None:
    wanted = "1"

    def score(prompt: reroll.Prompt, trajectory: reroll.Trajectory) -> reroll.Score:
        return reroll.Score(value=trajectory.text.count(wanted) / 8, info={"length": float(len(trajectory.text))})

    class Watched(reroll.RlvrPipeline):
        async def step(self, step: int) -> Stats:
            return await super().step(step) + Stats({"mine/step": Last(float(step))})

    run = reroll.train(**small, reward=score, loss=lambda t: -t.ratio * t.advantage, pipeline=Watched)
    assert [row["mine/step"] for row in run.metrics if "mine/step" in row] == [0.0, 1.0]
    assert all("reward/default/length" in row for row in run.metrics if "mine/step" in row)
    assert run.curve().stat().st_size > 0
    assert (run.checkpoint / "config.json").is_file()
    assert isinstance(run.generate("1 =", max_tokens=2), str)
    assert run.generate("1 =", temperature=1.0, seed=1) == run.generate("1 =", temperature=1.0, seed=1)
    more = reroll.train(
        **small | {"steps": 3}, reward=score, loss=lambda t: -t.ratio * t.advantage, pipeline=Watched,
        name=run.folder.name, resume=True,
    )  # fmt: skip
    assert (more.num_steps, more.folder) == (3, run.folder)


def test_an_environment_that_no_module_has_is_played_in_processes(small: dict[str, Any]) -> None:
    class Even:
        """Wants an even digit, in two tries."""

        def reset(self, seed: int) -> tuple[reroll.Message, ...]:
            self.tries = 0
            return ({"role": "user", "content": f"{seed} or another?"},)

        def step(self, action: str) -> reroll.StepResult:
            self.tries += 1
            is_even = any(letter in "02468" for letter in action)
            told = ({"role": "user", "content": "again"},)
            return reroll.StepResult(messages=told, reward=float(is_even), terminated=is_even or self.tries == 2)

        def close(self) -> None:
            pass

    del small["data"]
    # Its episodes find no action, grow to the model's context, and are cut there.
    run = reroll.train(**small | {"steps": 1}, env=Even)
    assert run.num_steps == 1
    assert any(row.get("env/env/turns", 0) >= 1 for row in run.metrics)


def test_the_other_pipelines_take_rows_too(small: dict[str, Any]) -> None:
    del small["prompts_per_step"], small["group_size"]
    run = reroll.train(**small | {"max_tokens": 64}, pipeline="sft", rows_per_step=4)
    assert run.num_steps == 2
    assert run.folder.name == "sft-tiny-1"


def test_the_loop_of_ones_own_learns(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLES / "own_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    curve = module.main(steps=25)
    assert sum(curve[-5:]) / 5 > sum(curve[:5]) / 5 + 0.1
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) <= 60
