"""`reroll rewards try` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reroll.cli import main

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]

MY_JUDGES = """
def fussy(prompt, trajectory, *, bonus=0.0):
    if trajectory.text == "boom":
        raise ValueError("cannot bear it")
    return len(trajectory.text) + bonus + len(prompt.extra.get("hint", ""))
"""
YAML = """
pipeline: rlvr
policy: {model: there/is-no-need-for-it}
data:
  train: [{kind: jsonl, path: rows.jsonl, domain: sums, prompt_key: question, answer_key: gold}]
rewards:
  sums: {kind: stack, parts: {answer: {kind: numeric, weight: 2}, mine: {kind: import, path: "judges:fussy"}}}
  poems: {kind: repetition}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "judges.py").write_text(MY_JUDGES)
    (tmp_path / "run.yaml").write_text(YAML)
    rows = [{"question": "1+1", "gold": "2"}, {"question": "2+2", "gold": "4", "hint": "12"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def cells(table: str) -> list[list[str]]:
    """The rows of the table, without its head."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line.startswith("│")]


def test_a_domain_of_a_yaml_is_tried_on_its_first_row_with_the_gold_and_an_empty_answer(
    reroll: CommandLine, folder: Path
) -> None:
    done = reroll("rewards", "try", "run.yaml", "sums", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "user 1+1" in done.stdout
    rows = cells(done.stdout)
    assert [row[:3] for row in rows] == [
        ["2", "3", "answer 1"],
        ["", "", "mine 1"],
        ["(empty)", "0", "answer 0"],
        ["", "", "mine 0"],
    ]
    assert float(rows[0][3]) > 0


def test_any_row_of_a_file_and_any_answers_can_be_given(reroll: CommandLine, folder: Path) -> None:
    done = reroll("rewards", "try", "run.yaml", "sums", "--row", "rows.jsonl:2", "--text", "4", "--text", "five", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [row[:2] for row in cells(done.stdout)][::2] == [["4", "5"], ["five", "6"]]


def test_a_function_of_ones_own_is_tried_with_its_options(reroll: CommandLine, folder: Path) -> None:
    done = reroll("rewards", "try", "judges:fussy", "bonus=10", "--json", '{"hint": "x"}', "--text", "four", cwd=folder)
    assert cells(done.stdout)[0][:2] == ["four", "15"]


def test_an_answer_without_a_score_is_shown_with_its_reason_and_ends_with_1(reroll: CommandLine, folder: Path) -> None:
    done = reroll("rewards", "try", "judges:fussy", "--json", "{}", "--text", "boom", "--text", "ok", cwd=folder)
    assert done.returncode == 1
    assert cells(done.stdout)[0][1] == "failed"
    assert "ValueError: cannot bear it" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run.yaml"], "which of its rewards? It has: sums, poems"),
        (["run.yaml", "sms"], "rewards.sms is not in run.yaml, which has: sums, poems"),
        (["nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["exakt", "--json", "{}"], "did you mean exact? choose one of: exact"),
        (["exact", "ignore_cas=true", "--json", "{}"], "did you mean ignore_case?"),
        (["judges:fussy", "malus=1", "--json", "{}"], "unexpected keyword argument 'malus'"),
        (["no_such_module:f", "--json", "{}"], "no module 'no_such_module'"),
        (["exact"], "no row to judge: give one with --row FILE:N or --json"),
        (["run.yaml", "poems"], "no row to judge"),
        (["exact", "--json", "{"], "--json is not JSON"),
        (["exact", "--json", "3"], "--json holds no object"),
        (["exact", "--row", "rows.jsonl:9"], "no `prompt` and no `messages`"),
        (["run.yaml", "sums", "--row", "rows.jsonl:9"], "rows.jsonl has 2 rows: there is no row 9"),
        (["run.yaml", "sums", "--row", "rows.jsonl:0"], "rows are counted from 1"),
        (["exact", "--row", "x", "--json", "{}"], "give one of them"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_the_fix(
    folder: Path, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["reroll", "rewards", "try", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (1, 2)
    assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())
