"""`reroll show` as a user types it, after a run that played a game."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.pipeline.run import train

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


def write_old_log(folder: Path) -> None:
    """One row as it was before turns were logged, and half a row."""
    words = {
        "prompt_id": "p",
        "domain": "math",
        "prompt": "1+1?",
        "completion": "2",
        "answer": "2",
        "reason": "",
        "num_tokens": 1,
    }
    row = {"step": 1, "id": "0.0", "reward": 1.0, "parts": {}, "status": "completed", **words}
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text(json.dumps(row) + '\n{"step": 2\n')


@pytest.fixture
def game_tree(rlvr_tree: dict[str, Any]) -> dict[str, Any]:
    """Three turns on a lake, of one character each, which is never an action. The last is not shown the first."""
    lake = {"kind": "frozen_lake", "size": 3, "rules": False}
    rlvr_tree["envs"] = {
        "lake": {"env": lake, "max_turns": 3, "history": 1, "format_penalty": 0.5, "actions": {"kind": "text"}}
    }
    rlvr_tree["env_workers"] = {"kind": "inline"}
    rlvr_tree["data"] = {"train": [{"kind": "env", "domain": "lake", "num": 8}]}
    rlvr_tree["rewards"] = {}
    rlvr_tree["rollout"] |= {"max_prompt_tokens": 128, "max_tokens": 3, "stop": [*digits, *ascii_letters, *punctuation]}
    rlvr_tree["run"] |= {"name": "lake", "steps": 1, "log_samples": 16}
    return rlvr_tree


def test_a_game_is_logged_listed_printed_and_made_a_page(
    reroll: CommandLine, game_tree: dict[str, Any], tmp_path: Path
) -> None:
    outcome = train(parse_config(game_tree, folder=tmp_path), code_folder=tmp_path)
    rows = [json.loads(line) for line in (outcome.folder / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    row = max(rows, key=lambda row: len(row["turns"]))
    assert [turn["is_rendered_afresh"] for turn in row["turns"]] == [False, False, True]
    board, *refusals = (turn["shown"][-1]["content"] for turn in row["turns"])
    assert all("Answer with one action" in refusal for refusal in refusals)
    assert [len(line.split(" ")) for line in board.splitlines()] == [3, 3, 3]
    for turn in row["turns"]:
        assert len(turn["pieces"]) == len(turn["logp"]) == sum(count for _, count in turn["versions"]) > 0
        assert turn["text"] in "".join(turn["pieces"])
    listed = reroll("show", "lake", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert all(f" {row['id']} " in listed.stdout for row in rows)
    printed = reroll("show", str(outcome.folder), row["id"], cwd=tmp_path)
    assert board in printed.stdout
    page = reroll("show", "lake", row["id"], "--page", cwd=tmp_path)
    file = Path("runs") / "lake" / f"episode-{row['id']}.html"
    assert str(file) in page.stdout
    assert 'class="board"' in (tmp_path / file).read_text()


def test_the_log_of_an_older_run_shows_with_its_damage_noted(reroll: CommandLine, tmp_path: Path) -> None:
    write_old_log(tmp_path / "runs" / "old")
    done = reroll("show", "old", cwd=tmp_path)
    assert done.returncode == 0
    assert "math" in done.stdout
    assert "line 2 is damaged" in done.stderr
    assert reroll("show", "old", "0.0", "--html", "x.html", cwd=tmp_path).returncode == 0
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["lak"], "did you mean lake?"),
        (["lake"], "run.log_samples is 0"),
        (["old", "0.9"], "did you mean 0.0?"),
        (["old", "--worst", "--best"], "give one of them"),
    ],
)
def test_what_cannot_be_shown_says_what_to_do(reroll: CommandLine, words: list[str], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "lake").mkdir(parents=True)
    write_old_log(tmp_path / "runs" / "old")
    done = reroll("show", *words, cwd=tmp_path)
    assert done.returncode != 0
    assert complaint in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
