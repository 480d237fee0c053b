import json
import subprocess
import sys

import numpy as np
import pytest

from reroll.errors import RunFolderError
from reroll_zoo.show.curve import draw_curve, series_of, smooth


def write_metrics(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def colours_in(png):
    """Share of the pixels close to each colour of the picture."""
    from matplotlib.image import imread

    pixels = (imread(png)[..., :3] * 255).round().astype(int)
    targets = {"blue": (9, 105, 218), "green": (26, 127, 55), "orange": (188, 76, 0), "purple": (130, 80, 223)}
    return {name: bool((np.abs(pixels - target).max(axis=-1) < 12).sum() > 50) for name, target in targets.items()}


def test_an_rl_run_shows_reward_pass_rate_length_and_time(tmp_path):
    rows = [{"step": 0, "eval/pass@1": 0.2}]
    for step in range(1, 31):
        rows += [{"step": step, "reward/mean": step / 40, "rollout/completion_tokens": 90 + step, "time/step_s": 2.0}]
    rows += [{"step": 30, "eval/pass@1": 0.8, "reward/mean": None}]
    draw_curve(write_metrics(tmp_path / "metrics.jsonl", rows), tmp_path / "curve.png", title="demo")
    assert colours_in(tmp_path / "curve.png") == {"blue": True, "green": True, "orange": True, "purple": True}


def test_a_supervised_run_shows_its_losses_alone(tmp_path):
    rows = [{"step": step, "train/loss": 3 / step} for step in range(1, 20)]
    draw_curve(write_metrics(tmp_path / "metrics.jsonl", rows), tmp_path / "curve.png", title="sft")
    assert colours_in(tmp_path / "curve.png") == {"blue": True, "green": False, "orange": False, "purple": False}
    rows += [{"step": 0, "eval/loss": 3.0}, {"step": 19, "eval/loss": 0.5}]
    draw_curve(write_metrics(tmp_path / "metrics.jsonl", rows), tmp_path / "curve.png", title="sft")
    assert colours_in(tmp_path / "curve.png") == {"blue": True, "green": True, "orange": False, "purple": False}


def test_one_step_is_enough_for_a_picture_and_none_gives_none(tmp_path):
    metrics = write_metrics(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    assert draw_curve(metrics, tmp_path / "curve.png", title="demo")
    assert colours_in(tmp_path / "curve.png")["blue"]
    for rows in ([], [{"step": 0, "eval/pass@1": 0.5}]):
        write_metrics(metrics, rows)
        assert not draw_curve(metrics, tmp_path / "none.png", title="demo")
    assert not (tmp_path / "none.png").exists()


def test_a_picture_that_cannot_be_written_is_a_run_folder_error(tmp_path):
    metrics = write_metrics(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    with pytest.raises(RunFolderError, match=r"cannot write .*curve\.png"):
        draw_curve(metrics, tmp_path / "nowhere" / "curve.png", title="demo")


def test_the_trend_keeps_a_constant_and_does_not_lag_behind_a_line():
    assert smooth([2.0]) == [2.0]
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    line = [float(step) for step in range(100)]
    assert smooth(line)[20:80] == pytest.approx(line[20:80])


def test_the_trend_is_calmer_than_the_values():
    noisy = [float(step % 2) for step in range(100)]
    assert max(smooth(noisy)[10:90]) - min(smooth(noisy)[10:90]) < 0.05


def test_a_series_leaves_out_what_was_not_finite():
    assert series_of([{"step": 1, "a": 1.0}, {"step": 2, "a": None}, {"step": 3}], "a") == ([1], [1.0])


def test_importing_the_observers_loads_neither_matplotlib_nor_torch():
    code = (
        "import sys, reroll_zoo.show.curve, reroll_zoo.trackers.wandb, reroll.observe.progress, reroll.data.sources;"
        "print({'matplotlib', 'torch', 'pyarrow', 'datasets', 'wandb'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"
