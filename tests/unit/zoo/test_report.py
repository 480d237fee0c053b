"""A run as one page, and the list of its samples by step and by reward."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from episode_fakes import play
from typer.testing import CliRunner

from reroll.cli import app
from reroll.observe.run_folder import RunFolder
from reroll_zoo.show.report import render_report

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Ten steps: the reward grows, and each step logged two samples."""
    folder = RunFolder(tmp_path / "lake")
    folder.path.mkdir()
    folder.config_path.write_text("algorithm: grpo\n")
    rows = [{"step": step, "reward/mean": step / 10, "time/step_s": 1.0, "own/number": step} for step in range(1, 11)]
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = []
    for step in range(1, 11):
        for place in range(2):
            sample = play({"said": [f"word{step}-{place}"]}, id=f"{step}.{place}", reward=step / 10 - place)
            samples.append(sample.model_copy(update={"step": step}))
    folder.samples_path.write_text("".join(sample.model_dump_json() + "\n" for sample in samples))
    return folder


def listed(run: RunFolder, *options: str) -> list[str]:
    result = CliRunner().invoke(app, ["show", str(run.path), *options])
    assert result.exit_code == 0, result.output
    return [line.split("│")[2].strip() for line in result.output.splitlines() if line.startswith("│")]


def test_samples_are_listed_by_step_and_by_reward(run: RunFolder) -> None:
    assert len(listed(run)) == 20
    assert listed(run, "-n", "3") == ["9.1", "10.0", "10.1"]
    assert listed(run, "--step", "4") == ["4.0", "4.1"]
    assert listed(run, "--worst", "-n", "2") == ["1.1", "2.1"]
    assert listed(run, "--best", "-n", "2") == ["10.0", "9.0"]
    refused = CliRunner().invoke(app, ["show", str(run.path), "--step", "11"])
    assert refused.exit_code == 2
    assert "steps 1 to 10" in refused.output


def test_a_report_holds_the_end_the_curve_the_numbers_and_samples(run: RunFolder) -> None:
    run.write_result({"status": "finished", "steps": 10, "seconds": 12.5, "before": {"eval/pass@1": 0.1}})
    result = CliRunner().invoke(app, ["show", str(run.path), "--page"])
    assert result.exit_code == 0, result.output
    page = (run.path / "report.html").read_text()
    assert "<dd>finished</dd>" in page
    assert "data:image/png;base64," in page
    assert re.search(r">training reward</th>.*?<td>0.1</td><td>0.1</td><td>1</td><td>1</td>", page)
    assert "own/number" in page
    assert "algorithm: grpo" in page
    newest, best, worst = (page.index(title) for title in ("newest samples", "best samples since", "worst samples since"))
    assert newest < page.index("word10-1") < best < page.index("word10-0", best) < worst < page.index("word8-1", worst)
    assert "word2-0" not in page, "the policy as it has become, not as it was"
    anchors = re.findall(r'<article id="([^"]+)"', page)
    assert len(anchors) == len(set(anchors))


def test_nothing_that_a_model_wrote_is_markup_in_a_report(run: RunFolder) -> None:
    episode = play({"said": [EVIL], "shown": EVIL}, id=EVIL)
    page = render_report(run, [episode])
    assert EVIL not in page
    assert not re.search(r"https?:|url\(|@import|<script|<link", page)


def test_a_run_that_has_not_begun_has_a_report_that_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    folder.path.mkdir()
    page = render_report(folder, [])
    assert "No step has been logged yet" in page
    assert "no result yet" in page
