"""Every example config is sound and runs, shortened, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from reroll.config.load import load_config
from reroll.pipeline.run import train

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TINY_GAMES = sorted((ROOT / "examples" / "games" / "tiny").glob("*.yaml"))


def script(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What an example prints when it is run in an empty folder: in this process, a new one would load torch again."""

    def run(module: ModuleType, *words: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *words])
        module.main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_runs_shortened(file: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides = [f"policy.model={tiny_model}", "policy.devices=cpu", f"run.runs_dir={tmp_path}", "run.steps=1"]
    if "pipeline: rlvr" in file.read_text():
        overrides += ["engine.devices=cpu", "rollout.max_tokens=4", "rollout.max_prompt_tokens=1000"]
        overrides += ["rollout.prompts_per_step=4", "rollout.group_size=4"]
        overrides += [
            f"data.{part}.{index}.size=8"
            for part, sources in yaml.safe_load(file.read_text())["data"].items()
            for index, source in enumerate(sources)
            if "size" in source
        ]
        overrides += ["policy.strategy.micro_batch_tokens=8192"]
    if "\nteacher:" in file.read_text():
        overrides += [f"teacher.model={tiny_model}", "teacher.devices=cpu"]
    if "\nteachers:" in file.read_text():
        overrides += [f"teachers.larger.model={tiny_model}", "teachers.larger.devices=cpu"]
    outcome = train(load_config(file, overrides), code_folder=file.parent)
    assert outcome.num_steps == 1


@pytest.mark.usefixtures("pictures")
def test_the_quickstart_runs_shortened_and_writes_its_result(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run(script("quickstart"), "--steps", "4", "--good-enough", "0.01")
    assert "held-out prompts, never trained on" in printed
    result = json.loads((tmp_path / "runs" / "quickstart" / "result.json").read_text())
    assert set(result) >= {"before", "after", "seconds"}
    assert (tmp_path / "runs" / "quickstart" / "curve.png").stat().st_size > 1000
    rows = {
        name: {json.loads(line)["prompt"] for line in (tmp_path / "runs" / "quickstart-data" / f"{name}.jsonl").open()}
        for name in ("held_out", "demonstrations", "train")
    }
    assert not rows["held_out"] & (rows["demonstrations"] | rows["train"]), "held-out prompts are never trained on"


def test_the_example_of_pictures_runs_shortened(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = script("pictures")
    monkeypatch.setattr(pictures, "SETS", {"held_out": 8, "demonstrations": 64, "train": 32})
    monkeypatch.setattr(pictures, "WARM_UP_STEPS", range(2, 6, 2))
    printed = run(pictures, "--steps", "1")
    assert "seeing: " in printed
    assert "blind: " in printed
    result = json.loads((tmp_path / "runs" / "pictures" / "result.json").read_text())
    assert set(result) == {"seed", "before", "after", "blind", "seconds"}


@pytest.mark.slow
def test_a_model_reads_drawn_digits_and_its_blind_twin_guesses(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = script("pictures")
    monkeypatch.setattr(pictures, "SETS", {"held_out": 100, "demonstrations": 640, "train": 64})
    monkeypatch.setattr(pictures, "WARM_UP_STEPS", range(80, 160, 80))
    run(pictures, "--steps", "1")
    result = json.loads((tmp_path / "runs" / "pictures" / "result.json").read_text())
    assert result["after"] > result["blind"] + 0.1, "more than guessing earns"


@pytest.mark.parametrize("file", TINY_GAMES, ids=lambda file: file.stem)
def test_the_config_of_a_tiny_game_is_sound(file: Path) -> None:
    sources = yaml.safe_load(file.read_text())["data"]["train"]
    written = [f"data.train.{index}.path={file}" for index, source in enumerate(sources) if "path" in source]
    load_config(file, ["policy.model=any/model", *written])  # The example writes these files itself.


def test_two_games_in_one_run_are_imitated_and_played_and_counted_apart(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    games = script("games")
    monkeypatch.setattr(games, "NUM_DEMONSTRATIONS", 200)
    shorter = ["--imitate", "2", "--steps", "1", "rollout.prompts_per_step=4", "rollout.drop_zero_variance_groups=false"]
    fewer = [f"data.eval.{place}.num=8" for place in (0, 1)]
    printed = run(games, "mixed", *shorter, *fewer)
    for game in ("frozen_lake", "sokoban"):
        assert f"held-out games of {game} won: " in printed
    result = json.loads((tmp_path / "runs" / "mixed" / "result.json").read_text())
    assert {"eval/frozen_lake/pass@1", "eval/sokoban/pass@1"} <= set(result["after"])
    logged = [json.loads(line) for line in (tmp_path / "runs" / "mixed" / "metrics.jsonl").open()]
    assert any("env/frozen_lake/turns" in row and "env/sokoban/turns" in row for row in logged), "both are trained on"
