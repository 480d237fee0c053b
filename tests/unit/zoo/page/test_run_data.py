"""What the page is told of a run's folder, at rest and as it grows."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from reroll.observe.journal import Journal, SampleState
from reroll_zoo.folder_lock import RunLock
from reroll_zoo.page import run_data
from reroll_zoo.page.run_data import RunData, Unknown
from reroll_zoo.samples.episode import LoggedEpisode


def test_a_run_says_how_far_it_is_and_whether_it_lives(run: Path) -> None:
    data = RunData(run)
    about = data.run()
    assert (about["name"], about["step"], about["steps"], about["status"]) == ("one", 3, 10, "ended without a word")
    assert about["runs"] == ["two"]
    assert about["rollout"]["group_size"] == 2
    with RunLock(run):
        assert data.run()["status"] == "running"
    (run / "result.json").write_text(json.dumps({"status": "failed", "error": "WorkerDied", "reason": "rank 3"}))
    about = data.run()
    assert (about["status"], about["reason"]) == ("failed", "WorkerDied: rank 3")


def test_events_give_every_sample_once_and_then_only_what_changed(run: Path) -> None:
    data = RunData(run)
    answer = data.events(since=0, marks=0)
    assert {row[1] for row in answer["lives"]} == {"0.0", "0.1", "1.0", "1.1"}
    assert [kind for _, kind, *_ in answer["marks"]] == ["begun", "taken", "stepped"]
    assert not answer["more"]
    again = data.events(since=answer["revision"], marks=len(answer["marks"]))
    assert (again["lives"], again["marks"]) == ([], [])
    with Journal(run / "journal") as journal:
        journal.record("9.0", SampleState.QUEUED, prompt="p9", domain="sums", version=1)
    later = data.events(since=answer["revision"], marks=3)
    assert {row[1]: row[-1][-2] for row in later["lives"]} == {"1.0": 10, "1.1": 10, "9.0": 0}  # Lost, lost, queued.
    json.dumps(answer)


def test_answers_are_bounded_and_say_that_there_is_more(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_data, "MAX_LIVES_SENT", 3)
    monkeypatch.setattr(run_data, "MAX_ROWS_SENT", 2)
    monkeypatch.setattr(run_data, "MAX_SAMPLES_SENT", 1)
    data = RunData(run)
    first = data.events(since=0, marks=0)
    assert (len(first["lives"]), first["more"]) == (3, True)
    rest = data.events(since=first["revision"], marks=3)
    assert (len(rest["lives"]), rest["more"]) == (1, False)
    rows = data.metrics(run="", since=0, generation=0)
    assert (len(rows["rows"]), rows["more"]) == (2, True)
    assert len(data.samples(limit=10**9)["rows"]) == 1


def test_a_long_journal_is_read_in_parts_and_whole_where_a_sample_is_asked_for(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "_BYTES_AT_ONCE", 300)
    data = RunData(run)
    answers = [data.events(since=0, marks=0)]
    while answers[-1]["more"]:
        answers.append(data.events(since=answers[-1]["revision"], marks=sum(len(answer["marks"]) for answer in answers)))
    assert len(answers) > 3
    last = {row[1]: row[-1][-2] for answer in answers for row in answer["lives"]}
    assert last == {"0.0": 6, "0.1": 6, "1.0": 3, "1.1": 0}
    assert [kind for answer in answers for _, kind, *_ in answer["marks"]] == ["begun", "taken", "stepped"]
    assert RunData(run).sample("1.0")["life"]["reward"] == 1.0


def test_another_run_in_the_folder_voids_what_was_told(run: Path) -> None:
    data = RunData(run)
    before = data.events(since=0, marks=0)["boot"]
    shutil.rmtree(run / "journal")
    with Journal(run / "journal") as journal:
        journal.record("0.0", SampleState.QUEUED, prompt="p", domain="new", version=0)
    answer = data.events(since=0, marks=0)
    assert answer["boot"] != before
    assert [row[2] for row in answer["lives"]] == ["new"]


def test_metrics_follow_the_file_and_start_again_when_a_resumed_run_has_cut_it(run: Path) -> None:
    data, path = RunData(run), run / "metrics.jsonl"
    assert len(data.metrics(run="", since=0, generation=0)["rows"]) == 3
    with path.open("a") as file:
        file.write('{"step": 4, "x": NaN}\nno json\n{"step": 5')
    assert [row["step"] for row in data.metrics(run="", since=3, generation=0)["rows"]] == [4]
    path.with_suffix(".new").write_text('{"step": 1}\n')
    os.replace(path.with_suffix(".new"), path)
    answer = data.metrics(run="", since=4, generation=0)
    assert (answer["generation"], answer["start"], answer["rows"]) == (1, 0, [{"step": 1}])
    assert [row["step"] for row in data.metrics(run="two", since=0, generation=0)["rows"]] == [1, 2, 3]


@pytest.mark.parametrize("name", ["three", "../one", "/etc", ".."])
def test_only_runs_that_lie_beside_are_read(run: Path, name: str) -> None:
    with pytest.raises(Unknown, match="beside"):
        RunData(run).metrics(run=name, since=0, generation=0)
    with pytest.raises(Unknown, match="beside"):
        RunData(run).config(against=name)


def test_samples_are_sorted_filtered_and_searched(run: Path) -> None:
    data = RunData(run)

    def ids(**wishes: object) -> list[str]:
        return [row["id"] for row in data.samples(**wishes)["rows"]]  # type: ignore[arg-type]

    assert ids(sort="best") == ["1.0", "0.1", "0.0"]
    assert ids(sort="shortest") == ["0.0", "0.1", "1.0"]
    assert ids(domain="words") == ["1.0"]
    assert set(ids(phase="trained")) == {"0.0", "0.1"}
    assert set(ids(phase="scored")) == {"0.0", "0.1", "1.0"}
    assert set(ids(step=1)) == {"0.0", "0.1"}
    assert ids(search="ONERROR") == ["0.1"]  # In what it was shown, which only the journal's tokens tell.
    assert ids(search="p1") == ["1.0"]
    assert ids(search="nowhere") == []
    assert ids(sort="best", offset=2) == ["0.0"]


def test_a_sample_is_read_from_the_journal_by_the_runs_tokenizer(run: Path) -> None:
    answer = RunData(run).sample("0.1")
    episode = LoggedEpisode.model_validate(answer["episode"])
    [turn] = episode.turns
    assert "".join(turn.pieces) == turn.text != ""
    assert [token.version for token in turn.tokens] == [0, 1, 1]
    assert [token.logp for token in turn.tokens] == [0.0, -0.25, -0.5]
    assert [row["id"] for row in answer["siblings"]] == ["0.0", "0.1"]
    assert answer["group_mean"] == 0.25
    assert answer["note"] == ""
    with pytest.raises(Unknown, match="has not ended"):
        RunData(run).sample("1.1")


def test_without_a_tokenizer_tokens_are_numbers_and_the_page_says_why(run: Path, tiny_model: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny_model), "/nowhere/at/all"))
    answer = RunData(run).sample("0.0")
    assert answer["episode"]["turns"][0]["pieces"] == ["⟨5⟩", "⟨6⟩", "⟨7⟩"]
    assert "no tokenizer could be loaded" in answer["note"]


def test_a_run_without_a_journal_has_no_samples_to_show(run: Path) -> None:
    shutil.rmtree(run / "journal")
    data = RunData(run)
    assert data.samples(search="two")["rows"] == []
    assert data.run()["has_journal"] is False
    assert data.events(since=0, marks=0)["lives"] == []
    with pytest.raises(Unknown, match="nothing to read"):
        data.sample("0.0")


def test_the_config_is_told_by_what_differs(run: Path) -> None:
    data = RunData(run)
    from_default = {row.path: (row.here, row.there) for row in data.config(against="")["rows"]}
    assert from_default["policy.optim.lr"] == (1e-3, 1e-6)
    assert from_default["data.train[0].path"] == ("digits.jsonl", None)
    assert "policy.optim.betas" not in from_default
    from_other = {row.path: (row.here, row.there) for row in data.config(against="two")["rows"]}
    assert from_other == {"run.name": ("one", "two"), "policy.optim.lr": (1e-3, 2e-3)}
