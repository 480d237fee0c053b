"""A run as one page, and the list of its samples by step and by reward."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from episode_fakes import play, user
from typer.testing import CliRunner

from reroll.cli import app
from reroll.observe.journal import Journal, SampleState
from reroll.observe.run_folder import RunFolder
from reroll.types import Completion, FinishReason, Status, Trajectory, Turn
from reroll_zoo.show.report import render_report

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Ten steps: the reward grows, and each was trained on two samples. One more failed, and a group was dropped."""
    folder = RunFolder(tmp_path / "lake")
    folder.path.mkdir()
    folder.config_path.write_text("algorithm: grpo\n")
    rows = [{"step": step, "reward/mean": step / 10, "time/step_s": 1.0, "own/number": step} for step in range(1, 11)]
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Journal(folder.journal_path) as journal:
        for step in range(1, 11):
            journal.record_group(
                step, [0, 1], SampleState.QUEUED, prompt=f"p{step}", domain="lake", version=step - 1, answer="42"
            )
            for place in range(2):
                end(journal, f"{step}.{place}", step * 10 + place, reward=step / 10 - place)
            journal.record_group(step, [0, 1], SampleState.TRAINED, version=step)
            journal.stepped(version=step)
        journal.record_group(11, [0, 1], SampleState.QUEUED, prompt="p11", domain="lake", version=10, seed=7)
        journal.record("11.0", SampleState.FAILED, reason="its reward is nan")
        end(journal, "11.1", 999, reward=0.5)
        journal.record_group(11, [1], SampleState.FILTERED, reason="too few siblings are usable")
    return folder


def end(journal: Journal, id: str, token: int, *, reward: float) -> None:
    """A sample of one token: without a tokenizer it is shown by its number."""
    completion = Completion(token_ids=(token,), logprobs=(-0.5,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    turn = Turn(prompt_ids=(1, 2), completion=completion, text="", shown=(user("which way?"),))
    journal.ended(id, Trajectory(id=id, turns=(turn,), status=Status.COMPLETED, reward=reward))


def listed(run: RunFolder, *options: str) -> list[str]:
    result = CliRunner().invoke(app, ["show", str(run.path), *options])
    assert result.exit_code == 0, result.output
    return [line.split("│")[2].strip() for line in result.output.splitlines() if line.startswith("│")]


def test_samples_are_listed_by_step_and_by_reward(run: RunFolder) -> None:
    assert len(listed(run)) == 22
    assert listed(run, "-n", "4") == ["10.0", "10.1", "11.0", "11.1"]
    assert listed(run, "--step", "4") == ["4.0", "4.1"]
    assert listed(run, "--worst", "-n", "2") == ["1.1", "2.1"]
    assert listed(run, "--best", "-n", "2") == ["10.0", "9.0"]
    refused = CliRunner().invoke(app, ["show", str(run.path), "--step", "11"])
    assert refused.exit_code == 2
    assert "steps 1 to 10" in refused.output


def shown(run: RunFolder, id: str) -> str:
    result = CliRunner().invoke(app, ["show", str(run.path), id])
    return " ".join(result.output.split())


def test_one_sample_is_shown_with_what_its_prompt_was_and_what_became_of_it(run: RunFolder) -> None:
    text = shown(run, "4.1")
    assert "sample 4.1 · step 4" in text
    assert "prompt p4 domain lake answer 42 status completed tokens 1" in text
    assert "user which way? policy ⟨41⟩" in text
    assert "sample 11.1 · filtered" in shown(run, "11.1")
    assert "seed 7 status failed reason its reward is nan" in shown(run, "11.0")
    assert "did you mean" in str(CliRunner().invoke(app, ["show", str(run.path), "4.7"]).exception)
    for tokens in run.journal_path.glob("*.tokens"):
        tokens.unlink()
    assert "its tokens were deleted" in shown(run, "4.1")
    assert len(listed(run)) == 22


def test_what_an_interruption_undid_is_not_shown(run: RunFolder) -> None:
    with Journal(run.journal_path) as journal:
        journal.resume(version=9, max_staleness=0)
        journal.record_group(10, [0, 1], SampleState.QUEUED, prompt="p10", domain="lake", version=9)
        end(journal, "10.0", 1, reward=0.25)
    assert listed(run, "-n", "3") == ["9.0", "9.1", "10.0"]
    assert "sample 10.0 · done" in shown(run, "10.0")


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
    assert newest < page.index("⟨101⟩") < best < page.index("⟨100⟩", best) < worst < page.index("⟨81⟩", worst)
    assert "⟨20⟩" not in page, "the policy as it has become, not as it was"
    anchors = re.findall(r'<article id="([^"]+)"', page)
    assert len(anchors) == len(set(anchors))


def test_nothing_that_a_model_wrote_is_markup_in_a_report(run: RunFolder) -> None:
    episode = play({"said": [EVIL], "shown": EVIL}, id=EVIL)
    page = render_report(run, {EVIL: [episode]})
    assert EVIL not in page
    assert not re.search(r"https?:|url\(|@import|<script|<link", page)


def test_a_run_that_has_not_begun_has_a_report_that_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    folder.path.mkdir()
    page = render_report(folder, {})
    assert "No step has been logged yet" in page
    assert "no result yet" in page
