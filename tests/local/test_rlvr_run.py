"""Whole RLVR runs on a tiny model: what a run leaves behind, resume, interruption, and faults that must not stop it."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import yaml
from episode_fakes import trained_samples
from transformers import AutoModelForCausalLM, AutoTokenizer

from reroll.config.load import parse_config
from reroll.errors import ConfigError, ModelError, RunFolderError, TooManyFailures, TrainingDiverged
from reroll.observe.journal import read_journal
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import evaluate, train


def run(tree: dict[str, Any], **options: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder, **options)


def metrics(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()


@pytest.fixture(scope="module")
def plain_run(module_rlvr_tree: dict[str, Any]) -> Outcome:
    return run(module_rlvr_tree)


def test_a_run_leaves_behind_everything_it_promises(plain_run: Outcome) -> None:
    outcome = plain_run
    names = {path.name for path in outcome.folder.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "journal", "curve.png", "result.json", "checkpoints"}
    result = json.loads((outcome.folder / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 3)
    assert set(result["before"]) >= {"eval/pass@1", "eval/reward"}
    assert parse_config(yaml.safe_load((outcome.folder / "config.yaml").read_text()), folder=outcome.folder.parents[1])
    rows = metrics(outcome)
    steps = [row for row in rows if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row[f"time/{part}_s"] >= 0 for row in steps for part in ("wait", "generate", "score", "train", "push", "step"))
    samples = trained_samples(outcome.folder)
    assert all(sample.prompt.startswith("say ") and sample.answer and sample.num_tokens for sample in samples)
    for row in steps:  # The metrics of a step are those of the samples that the journal has of it.
        of_step = [sample for sample in samples if sample.step == row["step"]]
        assert len(of_step) * row["rollout/completion_tokens"] == pytest.approx(sum(sample.num_tokens for sample in of_step))
        assert len(of_step) == len(samples) / 3 > 0
        assert row["reward/mean"] == pytest.approx(mean(sample.reward for sample in of_step))


def test_the_trainer_and_the_sampler_agree_on_every_log_prob(plain_run: Outcome) -> None:
    for row in metrics(plain_run):
        assert row.get("train/sampler_gap_max", 0.0) < 1e-5


def test_a_run_that_learns_nothing_says_so_once_with_the_remedy(rlvr_tree: dict[str, Any], capsys: Any) -> None:
    (Path(rlvr_tree["run"]["runs_dir"]).parent / "same.py").write_text("def score(prompt, trajectory):\n    return 0.5\n")
    rlvr_tree["rewards"] = {"default": {"kind": "import", "path": "same:score"}}
    rlvr_tree["run"]["steps"] = 5
    run(rlvr_tree)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nothing is learned")]
    assert len(notes) == 1
    assert "for 3 steps" in notes[0]
    assert "(0.5 throughout)" in notes[0]
    assert "rollout.drop_zero_variance_groups=true" in notes[0]


def test_a_checkpoint_opens_in_plain_transformers(plain_run: Outcome) -> None:
    checkpoint = plain_run.checkpoint
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "llama"
    assert weights(checkpoint)


def test_every_sample_of_a_run_ends_trained_or_aborted(plain_run: Outcome) -> None:
    last = {event.sample_id: str(event.state) for event in read_journal(plain_run.folder / "journal") if event.sample_id}
    assert list(last.values()).count("trained") == 3 * 16
    assert set(last.values()) <= {"trained", "aborted"}


def test_a_resumed_run_equals_an_uninterrupted_one(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["run"]["steps"] = 5
    whole = run(rlvr_tree)
    rlvr_tree["run"] |= {"name": "parts", "steps": 2}
    run(rlvr_tree)
    rlvr_tree["run"]["steps"] = 5
    resumed = run(rlvr_tree, resume=True)
    for name, tensor in weights(whole.checkpoint).items():
        assert torch.equal(tensor, weights(resumed.checkpoint)[name]), name
    curves = [[row["reward/mean"] for row in metrics(outcome) if "reward/mean" in row] for outcome in (whole, resumed)]
    assert curves[0] == curves[1]


def test_an_existing_run_is_not_overwritten_by_accident(rlvr_tree: dict[str, Any]) -> None:
    run(rlvr_tree)
    with pytest.raises(RunFolderError, match="--resume"):
        run(rlvr_tree)
    assert run(rlvr_tree, overwrite=True).num_steps == 3


def test_a_run_that_failed_before_its_first_number_can_simply_be_started_again(rlvr_tree: dict[str, Any]) -> None:
    data = Path(rlvr_tree["data"]["train"][0]["path"])
    sound = data.read_text()
    data.write_text("not json\n")
    with pytest.raises(ConfigError, match="line 1"):
        run(rlvr_tree)
    data.write_text(sound)
    assert run(rlvr_tree).num_steps == 3


def test_train_says_at_once_all_that_check_says_and_leaves_the_run_it_would_overwrite(
    rlvr_tree: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rlvr_tree["rollout"]["prompts_per_step"] = 11
    rlvr_tree["run"]["steps"] = 1
    outcome = run(rlvr_tree)
    assert "note: rollout.prompts_per_step is 11, and data.train has 10" in capsys.readouterr().out
    Path(rlvr_tree["data"]["train"][0]["path"]).write_text("not json\n")
    rlvr_tree["loss"] = {"kind": "import", "path": "reroll_test_rewards:has_digit"}
    with pytest.raises(ConfigError) as caught:
        run(rlvr_tree, overwrite=True)
    assert {violation.path for violation in caught.value.violations} == {"data.train.0", "data.eval.0", "loss.path"}
    assert outcome.checkpoint.is_dir()


@pytest.mark.parametrize("algorithm", ["reinforce", "dr_grpo"])
def test_other_presets_and_several_optimizer_steps_run(rlvr_tree: dict[str, Any], algorithm: str) -> None:
    rlvr_tree["algorithm"] = algorithm
    if algorithm == "dr_grpo":
        rlvr_tree |= {"train": {"epochs": 2, "mini_batches": 2}, "kl": {"coef": 0.01}}
    rows = [row for row in metrics(run(rlvr_tree)) if "reward/mean" in row]
    assert all(row["train/grad_norm"] >= 0 for row in rows)
    if algorithm == "dr_grpo":
        assert rows[0]["train/kl_ref"] == pytest.approx(0.0, abs=0.05)
        assert rows[-1]["train/ratio_max"] > 1.0


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_staleness_budget_is_kept_and_used(rlvr_tree: dict[str, Any], staleness: int) -> None:
    rlvr_tree["rollout"]["max_staleness"] = staleness
    rlvr_tree["run"]["steps"] = 6
    seen = [row["rollout/staleness_max"] for row in metrics(run(rlvr_tree)) if "rollout/staleness_max" in row]
    assert max(seen) == staleness


def test_oversampling_and_the_dynamic_filter_work_together(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["rollout"] |= {"oversample": 2.0, "drop_zero_variance_groups": True}
    rows = [row for row in metrics(run(rlvr_tree)) if "reward/mean" in row]
    assert all(row["rollout/groups_with_signal"] == 1.0 for row in rows)
    assert sum(row["rollout/aborted_samples"] for row in rows) > 0


@pytest.mark.parametrize(("reward", "timeout_s"), [("raises_on_even", 60), ("hangs_on_seven", 0.5), ("nan_on_three", 60)])
def test_a_reward_that_fails_sometimes_fails_its_samples_and_the_run_goes_on(
    rlvr_tree: dict[str, Any], reward: str, timeout_s: float
) -> None:
    rlvr_tree["rewards"] = {"default": {"kind": "import", "path": f"reroll_test_rewards:{reward}", "timeout_s": timeout_s}}
    rlvr_tree["rollout"]["max_failed_fraction"] = 0.9
    rlvr_tree["data"]["eval"] = []
    outcome = run(rlvr_tree)
    assert outcome.num_steps == 3
    failed = [event for event in read_journal(outcome.folder / "journal") if str(event.state) == "failed"]
    assert failed
    assert all(event.detail["reason"] for event in failed)


def test_too_many_failures_stop_the_run_and_say_why(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["rewards"] = {"default": {"kind": "import", "path": "reroll_test_rewards:always_raises"}}
    rlvr_tree["data"]["eval"] = []
    with pytest.raises(TooManyFailures, match="no such thing"):
        run(rlvr_tree)


def test_a_reward_that_cannot_be_imported_is_found_before_work_starts(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["rewards"] = {"default": {"kind": "import", "path": "reroll_test_rewards:gone"}}
    with pytest.raises(ConfigError, match="gone"):
        run(rlvr_tree)


def test_prompts_longer_than_the_limit_fail_with_the_key_to_raise(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["rollout"]["max_prompt_tokens"] = 3
    rlvr_tree["data"]["eval"] = []
    with pytest.raises(TooManyFailures, match=r"rollout\.max_prompt_tokens"):
        run(rlvr_tree)


def test_an_empty_dataset_is_refused(rlvr_tree: dict[str, Any]) -> None:
    Path(rlvr_tree["data"]["train"][0]["path"]).write_text("")
    with pytest.raises(ConfigError, match="empty"):
        run(rlvr_tree)


def test_a_tokenizer_without_a_chat_template_is_refused(rlvr_tree: dict[str, Any], tmp_path: Path) -> None:
    from reroll_zoo.tiny_models import make_tiny

    model = make_tiny(tmp_path / "plain")
    (model / "chat_template.jinja").unlink()
    rlvr_tree["policy"]["model"] = str(model)
    with pytest.raises(ModelError, match="chat template"):
        run(rlvr_tree)


def test_a_diverging_run_stops_with_its_step_and_keeps_the_last_checkpoint(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["policy"]["optim"] = {"lr": 1e30, "clip_norm": 1e30}
    rlvr_tree["checkpoint"] = {"every": 1}
    rlvr_tree["run"]["steps"] = 8
    with pytest.raises(TrainingDiverged, match="step"):
        run(rlvr_tree)
    checkpoints = sorted((Path(rlvr_tree["run"]["runs_dir"]) / "test" / "checkpoints").glob("step-*"))
    assert checkpoints
    assert weights(checkpoints[-1])


def test_an_unwritable_run_folder_is_refused_before_work_starts(rlvr_tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rlvr_tree["run"]["runs_dir"] = str(tmp_path / "file" / "runs")
    with pytest.raises(RunFolderError, match="cannot write"):
        train(parse_config(rlvr_tree, folder=tmp_path), code_folder=tmp_path)


def test_an_interrupted_run_is_saved_and_can_be_resumed(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["run"]["steps"] = 10_000
    folder = Path(rlvr_tree["run"]["runs_dir"]) / "test"

    def interrupt_after_two_steps() -> None:
        while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_text().count("reward/mean") < 2:
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_after_two_steps)
    thread.start()
    outcome = run(rlvr_tree)
    thread.join()
    assert outcome.interrupted
    assert 2 <= outcome.num_steps < 10_000
    rlvr_tree["run"]["steps"] = outcome.num_steps + 1
    assert run(rlvr_tree, resume=True).num_steps == outcome.num_steps + 1


def test_evaluation_reports_pass_at_k_of_a_checkpoint(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["eval"] = {"samples": 4, "temperature": 1.0, "threshold": 0.5}
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    result = evaluate(parse_config(rlvr_tree, folder=folder), code_folder=folder)
    values = result.stats().values_by_name()
    assert 0 <= values["eval/pass@1"] <= values["eval/pass@2"] <= values["eval/pass@4"] <= 1
    assert len(result.trajectories) == 10


def test_trackers_are_written_beside_the_metrics(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["run"]["trackers"] = ["tensorboard", "wandb"]
    outcome = run(rlvr_tree)
    assert list((outcome.folder / "tensorboard").glob("events*"))
    assert list((outcome.folder / "wandb").glob("offline-run-*"))
