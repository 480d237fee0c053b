"""Whole runs that go on: after damage, errors and kills, with another config, and beside another process."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from warm import WarmProcess

from reroll.config.load import parse_config
from reroll.errors import RerollError, RunFolderError, TooManyFailures, TrainingDiverged
from reroll.observe.files import read_jsonl
from reroll.observe.journal import SampleState, read_journal
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.training.torch_strategy import TorchStrategy
from reroll_zoo import folder_lock
from reroll_zoo.audit.audit import audit
from reroll_zoo.samples.folders import failure_of
from reroll_zoo.tiny_models import make_tiny

Tree = dict[str, Any]


def run(tree: Tree, **options: Any) -> Outcome:
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(copy.deepcopy(tree), folder=folder), code_folder=folder, **options)


def folder_of(tree: Tree) -> Path:
    return Path(tree["run"]["runs_dir"]) / str(tree["run"]["name"])


def steps(tree: Tree) -> list[int]:
    path = folder_of(tree) / "metrics.jsonl"
    rows = read_jsonl(path) if path.exists() else []  # Another process may be in the middle of a line.
    return [row["step"] for row in rows if "reward/mean" in row]


def rewards(outcome: Outcome) -> list[float]:
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def assert_same(ours: Outcome, expected: Outcome) -> None:
    assert rewards(ours) == rewards(expected)
    weights = [AutoModelForCausalLM.from_pretrained(outcome.checkpoint).state_dict() for outcome in (ours, expected)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def checkpoints(tree: Tree) -> list[str]:
    return sorted(path.name for path in (folder_of(tree) / "checkpoints").iterdir())


def contents(folder: Path) -> dict[Path, bytes]:
    """Without the journal: what is started and refused is written down there too."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent.name != "journal"}


@pytest.fixture
def tree(rlvr_tree: Tree) -> Tree:
    return saving_every_step(rlvr_tree)


@pytest.fixture(scope="module")
def whole(module_rlvr_tree: Tree) -> Outcome:
    """What comes of `tree` when nothing happens."""
    return run(saving_every_step(module_rlvr_tree))


def saving_every_step(tree: Tree) -> Tree:
    tree["data"]["eval"] = []
    tree["checkpoint"] = {"every": 1, "keep": 5}
    return tree


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("file", "damage"),
    [("model.safetensors", flip_a_bit), ("trainer.pt", flip_a_bit), ("state.json", cut_off), ("trainer.pt", Path.unlink)],
)
def test_a_damaged_newest_checkpoint_is_told_and_the_run_goes_on_from_the_one_before_to_the_same_end(
    tree: Tree, whole: Outcome, file: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    tree["run"] |= {"name": "damaged", "steps": 2}
    damage(run(tree).checkpoint / file)
    tree["run"]["steps"] = 3
    resumed = run(tree, resume=True)
    told = capsys.readouterr().out
    assert f"step-000002 is damaged: {file}" in told
    assert "step-000001, which is whole: the steps after 1 are done again" in told
    assert checkpoints(tree) == ["damaged-step-000002", "step-000001", "step-000002", "step-000003"]
    assert_same(resumed, whole)


TRAIN = """
import json, sys
from pathlib import Path
from reroll.config.load import parse_config
from reroll.pipeline.run import train
tree = json.loads(Path(sys.argv[1]).read_text())
folder = Path(sys.argv[1]).parent
FAILPOINT = sys.argv[2] if len(sys.argv) > 2 else ""
exec(FAILPOINT)
train(parse_config(tree, folder=folder), code_folder=folder)
"""


def in_another_process(tree: Tree, failpoint: str = "") -> WarmProcess:
    file = Path(tree["run"]["runs_dir"]).parent / "tree.json"
    file.write_text(json.dumps(tree))
    return WarmProcess(TRAIN, str(file), failpoint)


def until_it_has_done(num_steps: int, tree: Tree, other: WarmProcess) -> None:
    while len(steps(tree)) < num_steps:
        assert other.poll() is None
        time.sleep(0.05)


def test_a_run_that_another_process_works_on_is_neither_resumed_nor_overwritten(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder_lock, "WAIT_S", 0.2)
    tree["run"]["steps"] = 100_000
    other = in_another_process(tree)
    try:
        until_it_has_done(2, tree, other)
        with pytest.raises(RunFolderError, match=rf"in use by process {other.pid} on"):
            run(tree, overwrite=True)
        with pytest.raises(RunFolderError, match=rf"in use by process {other.pid} on"):
            run(tree, resume=True)
        assert f"in use by process {other.pid}" in capsys.readouterr().out  # It waited, and said so.
        until_it_has_done(len(steps(tree)) + 2, tree, other)
        os.kill(other.pid, signal.SIGTERM)
        other.wait(120)
        assert steps(tree) == list(range(1, len(steps(tree)) + 1))
    finally:
        other.kill()
        other.wait()


def test_a_requeued_run_waits_until_its_predecessor_has_saved(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree["run"]["steps"] = 100_000
    other = in_another_process(tree)
    try:
        until_it_has_done(2, tree, other)
        os.kill(other.pid, signal.SIGTERM)
        tree["run"]["steps"] = 1
        outcome = run(tree, resume=True)
        assert other.wait(300) == 0
        assert outcome.num_steps >= 2  # From where the other has left it.
    finally:
        other.kill()
        other.wait()


KILL_ONCE_NAMED = """
import os, signal
from reroll.observe.run_folder import RunFolder
put_in_place = RunFolder._put_in_place
def put_and_die(self, unfinished, final):
    put_in_place(self, unfinished, final)
    os.kill(os.getpid(), signal.SIGKILL)
RunFolder._put_in_place = put_and_die
"""


def test_the_samples_of_a_checkpoint_are_marked_as_trained_when_it_has_its_name(tree: Tree) -> None:
    tree["checkpoint"] = {"every": 2, "background": False}
    assert in_another_process(tree, KILL_ONCE_NAMED).wait() == -signal.SIGKILL
    assert checkpoints(tree) == ["step-000002"]
    events = list(read_journal(folder_of(tree) / "journal"))
    trained = {event.sample_id for event in events if event.state is SampleState.TRAINED}
    assert len(trained) == 2 * 16


BREAKABLE_REWARD = """
import os
from reroll_test_rewards import has_digit

def score(prompt, trajectory):
    if os.path.exists(os.environ["BREAK_AFTER"]) and open(os.environ["BREAK_AFTER"]).read().count("reward/mean") >= 2:
        raise KeyError("the reward broke")
    return has_digit(prompt, trajectory)
"""


def test_a_run_that_a_reward_ends_saves_its_last_step_says_why_and_goes_on_to_the_same_end(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breakable.py").write_text(BREAKABLE_REWARD)
    tree["checkpoint"] = {"every": 0}
    tree["run"]["steps"] = 5
    tree["rewards"]["default"]["path"] = "breakable:score"
    monkeypatch.setenv("BREAK_AFTER", str(tmp_path / "never"))
    whole = run(tree)
    tree["run"]["name"] = "broken"
    monkeypatch.setenv("BREAK_AFTER", str(folder_of(tree) / "metrics.jsonl"))
    with pytest.raises(TooManyFailures, match="the reward broke"):
        run(tree)
    result = json.loads((folder_of(tree) / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "TooManyFailures")
    assert "the reward broke" in result["reason"]
    assert checkpoints(tree) == [f"step-{result['steps']:06d}"] == [Path(result["checkpoint"]).name]
    assert result["steps"] >= 2
    assert "this run failed after" in failure_of(folder_of(tree))[0]
    monkeypatch.setenv("BREAK_AFTER", str(tmp_path / "never"))
    resumed = run(tree, resume=True)
    assert_same(resumed, whole)
    assert json.loads((resumed.folder / "result.json").read_text())["status"] == "finished"


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The gradient of one optimizer step is not finite."""
    step, num_calls = TorchStrategy.optim_step, 0

    def step_or_diverge(self: TorchStrategy) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            next(master for master in self._masters.values() if master.grad is not None).grad.fill_(float("nan"))
        return step(self)

    monkeypatch.setattr(TorchStrategy, "optim_step", step_or_diverge)


def test_a_run_that_diverges_saves_the_step_before_and_deletes_no_older_one(
    tree: Tree, whole: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["run"]["name"] = "diverged"
    tree["checkpoint"] = {"every": 0, "keep": 1}
    with monkeypatch.context() as patch:
        fail_at(patch, 3)
        with pytest.raises(TrainingDiverged):
            run(tree)
    assert checkpoints(tree) == ["step-000002"]
    assert_same(run(tree, resume=True), whole)


def test_weights_that_are_half_way_through_a_step_are_not_saved(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree |= {"train": {"mini_batches": 2}, "checkpoint": {"every": 0}}
    fail_at(monkeypatch, 6)  # The second half of the third step.
    with pytest.raises(TrainingDiverged):
        run(tree)
    assert "step 2 is not saved: the step after it has already changed the weights" in capsys.readouterr().out
    assert checkpoints(tree) == []
    assert json.loads((folder_of(tree) / "result.json").read_text())["checkpoint"] is None


def another_model(tree: Tree, tmp_path: Path) -> None:
    tree["policy"]["model"] = str(make_tiny(tmp_path / "wide", hidden=64, layers=2, heads=4, kv_heads=2))


def another_depth(tree: Tree, tmp_path: Path) -> None:
    tree["policy"]["model"] = str(make_tiny(tmp_path / "deep", hidden=32, layers=3, heads=4, kv_heads=2))


def an_adapter(tree: Tree, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tree["policy"]["lora"] = {"rank": 4}


def a_critic(tree: Tree, tmp_path: Path) -> None:
    tree["algorithm"] = "ppo"


def another_seed(tree: Tree, tmp_path: Path) -> None:
    tree["run"]["seed"] = 7


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (another_model, r"step-000002 is of another model: .*embed_tokens.weight is \[\d+, 64\] here and \[\d+, 32\] there"),
        (another_depth, r"is of another model: model.layers.2.* here and missing there"),
        (an_adapter, "was written by a run that trained every weight; this one trains an adapter"),
        (
            a_critic,
            "step-000002 holds no critic, which this run trains beside the policy: resume with the algorithm that",
        ),
        (another_seed, "seed was 1, is 7"),
    ],
)
def test_what_cannot_go_on_is_refused_before_anything_is_changed(
    tree: Tree, tmp_path: Path, change: Callable[[Tree, Path], None], told: str
) -> None:
    tree["run"]["steps"] = 2
    run(tree)
    before = contents(folder_of(tree))
    change(tree, tmp_path)
    tree["run"]["steps"] = 3
    with pytest.raises(RerollError, match=told):
        run(tree, resume=True)
    assert contents(folder_of(tree)) == before


def test_another_pipeline_cannot_go_on(tree: Tree, tmp_path: Path) -> None:
    tree["run"]["steps"] = 1
    run(tree)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "say 1", "answer": "1"}\n')
    sft = {
        "pipeline": "sft",
        "run": tree["run"],
        "policy": tree["policy"],
        "data": {"train": [{"kind": "jsonl", "path": str(rows)}]},
    }
    with pytest.raises(RunFolderError, match="is a run of pipeline rlvr: pipeline sft cannot go on with it"):
        run(sft, resume=True)


def test_a_resumed_run_says_what_is_different(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    tree["run"]["steps"] = 1
    run(tree)
    tree["run"]["steps"] = 2
    tree["policy"]["optim"] = {"lr": 5e-4}
    tree["rollout"]["group_size"] = 2
    run(tree, resume=True)
    told = capsys.readouterr().out
    assert "config: policy.optim.lr 0.01 → 0.0005\n" in told
    assert "config: rollout.group_size 4 → 2\n" in told
    assert told.count("config:") == 3  # And the number of steps.


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_run_goes_on_in_another_precision_from_the_weights_it_had(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    masters: list[dict[str, torch.Tensor]] = []

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: TorchStrategy, folder: Path) -> Any:
            result = method(self, folder)
            masters.append({name: master.detach().clone() for name, master in self._masters.items()})
            return result

        return call

    tree["run"]["steps"] = 1
    tree["checkpoint"]["background"] = False
    tree["policy"]["strategy"] = {"precision": before}
    monkeypatch.setattr(TorchStrategy, "save", noting(TorchStrategy.save))
    monkeypatch.setattr(TorchStrategy, "load", noting(TorchStrategy.load))
    run(tree)
    tree["run"]["steps"] = 2
    tree["policy"]["strategy"] = {"precision": after}
    run(tree, resume=True)
    saved, loaded = masters[0], masters[1]
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())


def edit_state(outcome: Outcome, change: Callable[[dict[str, Any]], object]) -> None:
    """As if another version had written it: without a manifest."""
    path = outcome.checkpoint / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    (outcome.checkpoint / "manifest.json").unlink()


def test_a_state_without_what_a_later_version_remembers_is_gone_on_from(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    tree["run"]["steps"] = 1
    outcome = run(tree)

    def as_before(state: dict[str, Any]) -> None:
        del state["version"], state["pipeline"]["domain_moments"]
        del state["pipeline"]["rollouts"]["num_ceded_to"], state["pipeline"]["rollouts"]["num_dropped"]

    edit_state(outcome, as_before)
    tree["run"]["steps"] = 2
    assert run(tree, resume=True).num_steps == 2
    told = capsys.readouterr().out
    assert "state.json has no domain_moments, as an earlier version wrote it: it starts anew" in told
    assert "has no manifest.json" in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.update(version=99), "is of version 99, and this reroll knows 1 at most"),
        (lambda state: state["pipeline"].pop("rollouts"), "state.json has no 'rollouts': it was written by another version"),
        (lambda state: state["pipeline"]["rollouts"].pop("queue"), "state.json has no 'queue'"),
        (lambda state: state.pop("pipeline"), "is damaged: state.json has no pipeline"),
    ],
)
def test_a_state_that_lacks_what_cannot_be_made_up_is_refused_with_its_name(
    tree: Tree, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    tree["run"]["steps"] = 1
    edit_state(run(tree), change)
    tree["run"]["steps"] = 2
    with pytest.raises(RunFolderError, match=told):
        run(tree, resume=True)


def test_a_damaged_optimizer_that_nobody_vouches_for_is_named(tree: Tree) -> None:
    tree["run"]["steps"] = 1
    outcome = run(tree)
    edit_state(outcome, lambda state: None)
    cut_off(outcome.checkpoint / "trainer.pt")
    tree["run"]["steps"] = 2
    with pytest.raises(RunFolderError, match=r"cannot go on from .*trainer.pt: .*damaged.*delete this checkpoint"):
        run(tree, resume=True)


def test_a_finished_run_that_is_resumed_has_nothing_to_do_and_keeps_its_result(tree: Tree) -> None:
    outcome = run(tree)
    before = {path: path.stat().st_mtime_ns for path in outcome.folder.rglob("*") if path.is_file()}
    again = run(tree, resume=True)
    assert before == {path: path.stat().st_mtime_ns for path in outcome.folder.rglob("*") if path.is_file()}
    assert (again.num_steps, again.checkpoint) == (3, outcome.checkpoint)
    assert again.seconds == pytest.approx(outcome.seconds, abs=0.1)


def test_a_run_without_a_checkpoint_says_that_it_starts_anew(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    tree["checkpoint"] = {"every": 0}
    assert in_another_process(tree, KILL_ONCE_NAMED.replace("put_in_place(self, unfinished, final)", "pass")).wait()
    tree["run"]["steps"] = 1
    assert run(tree, resume=True).num_steps == 1
    assert "has no checkpoint: the run starts anew at step 0" in capsys.readouterr().out


KILL_IN_THE_SECOND_STEP_AFTER_A_CHECKPOINT = """
import os, signal
from reroll.pipeline.rlvr import RlvrPipeline
learn = RlvrPipeline.learn
async def learn_or_die(self, batch, episodes, groups, step):
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return await learn(self, batch, episodes, groups, step)
RlvrPipeline.learn = learn_or_die
"""


def recalled(outcome: Outcome) -> list[float]:
    rows = read_jsonl(outcome.folder / "metrics.jsonl")
    return [row["rollout/recalled_samples"] for row in rows if "rollout/recalled_samples" in row]


def test_steps_since_the_checkpoint_are_trained_again_from_the_same_samples_to_the_same_bits(tree: Tree) -> None:
    tree["run"]["steps"] = 5
    tree["checkpoint"] = {"every": 2, "background": False}
    whole = run(tree)
    tree["run"]["name"] = "killed"
    assert in_another_process(tree, KILL_IN_THE_SECOND_STEP_AFTER_A_CHECKPOINT).wait(200) == -signal.SIGKILL
    assert checkpoints(tree) == ["step-000002"]
    resumed = run(tree, resume=True)
    assert recalled(resumed) == [0, 0, 16, 16, 0]  # What was sampled for steps 3 and 4 was not sampled again.
    assert_same(resumed, whole)
    for outcome in (whole, resumed):
        found = audit(outcome.folder / "journal", max_staleness=0)
        assert found.violations == []
        assert (found.num_steps, found.num_samples) == (5, 80)


def test_a_run_killed_before_its_first_checkpoint_takes_up_its_samples(tree: Tree) -> None:
    tree["checkpoint"] = {"every": 0}
    whole = run(tree)
    tree["run"]["name"] = "killed"
    first = KILL_IN_THE_SECOND_STEP_AFTER_A_CHECKPOINT.replace("step == 3", "step == 0")
    assert in_another_process(tree, first).wait(200) == -signal.SIGKILL
    resumed = run(tree, resume=True)
    assert recalled(resumed)[0] == 16
    assert_same(resumed, whole)


KILL_WHILE_IT_GENERATES = """
import os, signal
from reroll.observe.partial_samples import PartialSamples
flush = PartialSamples.flush
def flush_or_die(self):
    flush(self)
    unfinished = [turn for _, turn in self._all_turns() if turn.finish is None and turn.versions]
    checkpoints = self._path.parent.parent / "checkpoints"
    if sum(turn.num_tokens for turn in unfinished if CAN_GO_ON) >= 64:
        os.kill(os.getpid(), signal.SIGKILL)
PartialSamples.flush = flush_or_die
"""


def total(outcome: Outcome, name: str) -> float:
    return sum(row.get(name, 0) for row in read_jsonl(outcome.folder / "metrics.jsonl"))


@pytest.mark.parametrize("every", [1, 2])
def test_samples_that_a_kill_interrupts_go_on_after_their_last_token_to_the_same_weights(tree: Tree, every: int) -> None:
    tree["checkpoint"] = {"every": every, "background": False}
    tree["rollout"]["max_tokens"] = 24
    tree["engine"]["report_every"] = 2
    whole = run(tree)
    tree["run"]["name"] = "killed"
    killed = in_another_process(tree, KILL_WHILE_IT_GENERATES.replace("CAN_GO_ON", "turn.versions[-1][0] == 1"))
    assert killed.wait(200) == -signal.SIGKILL
    resumed = run(tree, resume=True)
    assert total(resumed, "rollout/continued_tokens") >= 64
    assert total(resumed, "rollout/discarded_tokens") == 0
    assert_same(resumed, whole)
    found = audit(resumed.folder / "journal", max_staleness=0)
    assert found.violations == []
    assert found.num_continued_tokens == total(resumed, "rollout/continued_tokens")


def test_under_a_staleness_budget_what_is_interrupted_goes_on_within_it(tree: Tree) -> None:
    tree["run"]["steps"] = 12
    tree["checkpoint"] = {"every": 1, "background": False}
    tree["rollout"] |= {"max_tokens": 96, "max_staleness": 2}
    tree["engine"]["report_every"] = 2
    is_saved = '(checkpoints / f"step-{turn.versions[-1][0]:06d}").exists()'
    killed = in_another_process(tree, KILL_WHILE_IT_GENERATES.replace("CAN_GO_ON", is_saved))
    assert killed.wait(200) == -signal.SIGKILL
    resumed = run(tree, resume=True)
    events = list(read_journal(resumed.folder / "journal"))
    continued = {event.sample_id for event in events if "kept" in event.detail}
    ended = {event.sample_id: event.detail["versions"] for event in events if event.state is SampleState.DONE}
    assert continued
    assert continued <= ended.keys()
    assert audit(resumed.folder / "journal", max_staleness=2).violations == []


def test_with_other_settings_nothing_is_taken_from_the_journal(tree: Tree) -> None:
    tree["checkpoint"] = {"every": 2, "background": False}
    tree["run"]["steps"] = 4
    assert in_another_process(tree, KILL_IN_THE_SECOND_STEP_AFTER_A_CHECKPOINT).wait(200) == -signal.SIGKILL
    tree["rollout"]["temperature"] = 0.7
    assert set(recalled(run(tree, resume=True))) == {0}


def test_the_audit_of_a_run_is_a_command(tree: Tree, reroll: Callable[..., Any], unaudited: set[Path]) -> None:
    outcome = run(tree)
    unaudited.add(outcome.folder)
    done = reroll("audit", str(outcome.folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every group has one fate" in done.stdout
    [segment] = (outcome.folder / "journal").glob("*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b'"state":"trained"', b'"state":"trainee"', 1))
    done = reroll("audit", str(outcome.folder))
    assert done.returncode == 1
    assert "does not match its checksum" in done.stdout
