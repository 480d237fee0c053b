"""Runs trained again from their journals: to the same bits, from any checkpoint, also under another loss."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reroll.cli import app
from reroll.config.load import parse_config
from reroll.errors import ConfigError, RunFolderError
from reroll.observe.journal import segments
from reroll.observe.run_folder import RunFolder
from reroll.pipeline import build
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll_zoo.audit.run_audit import audit_run
from reroll_zoo.replay.pipeline import compare_weights, drawn_again, replay_config
from reroll_zoo.replay.recorded_steps import recorded_steps

Tree = dict[str, Any]


def run(tree: Tree, **options: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(copy.deepcopy(tree), folder=folder), code_folder=folder, **options)


def replayed(source: Path, *, resume: bool = False, **options: Any) -> Outcome:
    return train(replay_config(source, **options), resume=resume, code_folder=source.parent.parent)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rewards(outcome: Outcome) -> list[float]:
    return [row["reward/mean"] for row in metrics(outcome.folder) if "reward/mean" in row]


def differences(outcome: Outcome, source: Path) -> dict[int, float]:
    return {one.step: one.largest_difference for one in compare_weights(outcome.folder, source)}


@pytest.fixture
def forbid_engines(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the moment that a test asks for it."""

    def forbid() -> None:
        def start(*_: object, **__: object) -> None:
            raise AssertionError("a replay starts no engine, reward or environment")

        monkeypatch.setattr(build, "open_episode_runner", start)

    return forbid


@pytest.fixture(scope="module")
def recorded(module_rlvr_tree: Tree) -> Path:
    """A run of three steps with all its checkpoints, and a KL penalty that adapts."""
    tree = module_rlvr_tree
    tree["checkpoint"] = {"every": 1, "keep": 5}
    tree["algorithm"], tree["kl"] = "grpo", {"coef": 0.1, "adaptive": {"target": 0.01, "horizon": 100}}
    return run(tree).folder


def test_a_run_is_trained_again_to_the_same_bits_without_an_engine(recorded: Path, forbid_engines: Callable[[], None]) -> None:
    forbid_engines()
    outcome = replayed(recorded, name="again")
    assert differences(outcome, recorded) == {1: 0.0, 2: 0.0, 3: 0.0}
    assert rewards(outcome) == [row["reward/mean"] for row in metrics(recorded) if "reward/mean" in row]


def test_it_begins_from_a_checkpoint_and_ends_where_it_is_told(recorded: Path) -> None:
    outcome = replayed(recorded, name="middle", start=1, stop=2)
    assert outcome.num_steps == 2
    assert len(rewards(outcome)) == 1
    assert differences(outcome, recorded) == {2: 0.0}


def test_a_replay_that_was_stopped_is_resumed(recorded: Path) -> None:
    replayed(recorded, name="in_parts", stop=2)
    outcome = replayed(recorded, name="in_parts", resume=True)
    assert differences(outcome, recorded) == {1: 0.0, 2: 0.0, 3: 0.0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[1].update({"reward/mean": 0.75}), "metrics: step 2 says reward/mean 0.75, and its samples 0."),
        (lambda rows: rows[2].update(tokens=7), "metrics: step 3 says tokens 7, and its samples "),
        (
            lambda rows: rows[0].update({"rollout/trained_samples": 15}),
            "step 1 says rollout/trained_samples 15, and its samples 16",
        ),
        (lambda rows: rows.append(rows[2]), "metrics: step 3 has 2 rows"),
        (lambda rows: rows.append(rows[2] | {"step": 4}), "metrics: step 4 has a row, and the journal does not know of it"),
    ],
    ids=["reward", "tokens", "fates", "twice", "unknown"],
)
def test_an_audit_finds_metrics_that_the_journal_does_not_bear_out(
    recorded: Path, tmp_path: Path, change: Callable[[list[Tree]], None], told: str
) -> None:
    found = audit_run(RunFolder(recorded))
    assert (found.violations, found.num_metric_rows) == ([], 3)
    assert found.num_metric_values >= 3 * 12
    shutil.copytree(recorded / "journal", tmp_path / "journal")
    shutil.copy(recorded / "config.yaml", tmp_path)
    rows = [row for row in metrics(recorded) if "reward/mean" in row]
    change(rows)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [violation] = audit_run(RunFolder(tmp_path)).violations
    assert told in violation


def test_another_loss_learns_something_else_from_the_same_samples(recorded: Path) -> None:
    outcome = replayed(recorded, name="bolder", changes=["policy.optim.lr=0.02"])
    assert rewards(outcome) == rewards(replayed(recorded, name="as_it_was"))
    assert all(difference > 0 for difference in differences(outcome, recorded).values())


def versions_of(source: Path) -> list[int]:
    """By how many versions of the weights each completion that was trained on was written."""
    steps = [groups for _, groups in recorded_steps(source / "journal")]
    turns = [turn for groups in steps for group in groups for sample in group.trajectories for turn in sample.turns]
    return [len(turn.completion.versions) for turn in turns]


@pytest.mark.parametrize("staleness", [1, 2])
def test_asynchronous_runs_come_to_the_same_bits_too_and_every_token_is_drawn_again(rlvr_tree: Tree, staleness: int) -> None:
    rlvr_tree["rollout"] |= {"max_staleness": staleness, "extra_samples": 1, "max_tokens": 48, "min_tokens": 40}
    rlvr_tree["engine"]["new_weights"] = "read_again"
    rlvr_tree["run"]["steps"] = 5
    source = run(rlvr_tree).folder
    assert max(versions_of(source)) > 1, "some were written while new weights came"
    outcome = replayed(source, draw=True)
    assert differences(outcome, source) == {5: 0.0}
    found = drawn_again(outcome.folder)
    assert found.num_tokens == sum(row["tokens"] for row in metrics(source) if "tokens" in row)
    assert found.num_differing == 0
    assert found.logp_gap < 1e-5


def test_what_was_drawn_from_a_cache_of_older_weights_is_left_out(rlvr_tree: Tree) -> None:
    rlvr_tree["rollout"] |= {"max_staleness": 1, "max_tokens": 48, "min_tokens": 40}
    source = run(rlvr_tree).folder
    found = drawn_again(replayed(source, draw=True).folder)
    assert 0 < found.num_tokens < sum(row["tokens"] for row in metrics(source) if "tokens" in row)
    assert found.num_differing == 0


def test_tokens_that_come_out_otherwise_are_counted(recorded: Path) -> None:
    outcome = replayed(recorded, name="other_weights", draw=True, changes=["policy.optim.lr=0.5"])
    found = drawn_again(outcome.folder)
    assert 0 < found.num_differing < found.num_tokens, "those of the first step are drawn by the same weights"


def test_greedy_baselines_are_taken_for_what_they_are(rlvr_tree: Tree) -> None:
    rlvr_tree["algorithm"] = "remax"
    source = run(rlvr_tree).folder
    assert differences(replayed(source), source) == {3: 0.0}
    assert rewards(replayed(source, name="other", changes=["advantage={kind: opo}"])) == rewards(replayed(source, name="b"))


DIGITS = '''
from reroll.envs.base import StepResult

class Digits:
    """Three turns; each earns the share of digits in what was said."""

    def reset(self, seed):
        self.turn = 0
        return ({"role": "user", "content": f"say {seed % 10}"},)

    def step(self, action):
        self.turn += 1
        earned = sum(character.isdigit() for character in action) / max(len(action), 1)
        return StepResult(messages=({"role": "user", "content": "more"},), reward=earned, terminated=self.turn == 3)

    def close(self):
        pass
'''


def test_episodes_of_several_turns_in_two_domains_come_to_the_same_bits(rlvr_tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "digit_env.py").write_text(DIGITS)
    rlvr_tree["pipeline"] = "agentic"
    rlvr_tree["envs"] = {"digits": {"env": {"kind": "import", "path": "digit_env:Digits"}, "max_turns": 3}}
    rlvr_tree["data"]["train"].append({"kind": "env", "domain": "digits", "num": 8})
    rlvr_tree["rollout"] |= {"max_staleness": 1, "max_total_tokens": 128, "max_prompt_tokens": 96}
    rlvr_tree["shaping"] = {"domains": "normalised"}
    source = run(rlvr_tree).folder
    outcome = replayed(source, draw=True)
    assert differences(outcome, source) == {3: 0.0}
    assert drawn_again(outcome.folder).num_differing == 0


def test_what_cannot_be_replayed_is_refused_with_the_reason(recorded: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.temperature: decides what is sampled"):
        replay_config(recorded, changes=["rollout.temperature=0.5"])
    with pytest.raises(RunFolderError, match="has finished 3 steps"):
        replayed(recorded, name="long", stop=4)
    with pytest.raises(RunFolderError, match="no checkpoint of step 7: there are 1, 2, 3, and 0"):
        replayed(recorded, name="late", start=7)
    with pytest.raises(RunFolderError, match="already holds a run"):
        replayed(recorded, name=recorded.name)


def test_deleted_tokens_are_named(rlvr_tree: Tree) -> None:
    source = run(rlvr_tree).folder
    for segment in segments(source / "journal"):
        segment.with_suffix(".tokens").unlink()
    with pytest.raises(RunFolderError, match=r"trained in step 1, are no longer in .*journal_gib"):
        replayed(source)


def test_the_command_says_whether_the_weights_are_the_same(recorded: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(recorded), "--name", "by_hand"])
    assert done.exit_code == 0, done.output
    assert "weights after step 3: equal to the bit" in done.output
    changed = CliRunner().invoke(
        app, ["replay", str(recorded), "--from", "2", "--with", "loss.clip_high=0.5", "--name", "wider"]
    )
    assert changed.exit_code == 0, changed.output
