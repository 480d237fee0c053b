"""Whole runs of what algorithms add to the plain loop: critics, KL in its places, greedy baselines, corrections, masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from reroll.config.load import parse_config
from reroll.errors import ConfigError
from reroll.observe.journal import read_journal
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train

ALWAYS_ONE = {"default": {"kind": "exact", "correct": 1.0, "wrong": 1.0}}
OWN = {"kind": "own", "devices": "cpu", "optim": {"lr": 1e-2}}


def run(tree: dict[str, Any], **options: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    folder = Path(tree["run"]["runs_dir"]).parent
    outcome = train(parse_config(tree, folder=folder), code_folder=folder, **options)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return outcome, [row for row in rows if "reward/mean" in row]


def named(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return tree | {"run": tree["run"] | {"name": name}}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_critic_of_its_own_learns_and_is_saved_as_an_ordinary_classifier(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"algorithm": "ppo", "critic": OWN, "train": {"mini_batches": 2}, "rewards": ALWAYS_ONE}
    rlvr_tree["run"]["steps"] = 12
    outcome, rows = run(rlvr_tree)
    assert rows[0]["critic/error"] > 0.5
    assert rows[-1]["critic/error"] < 0.05
    assert rows[-1]["critic/mean"] == pytest.approx(1, abs=0.2)
    assert {"train/loss", "critic/grad_norm", "time/critic_s"} <= set(rows[0])
    critic = AutoModelForSequenceClassification.from_pretrained(outcome.checkpoint / "critic")
    assert critic.config.num_labels == 1
    assert critic.score.weight.abs().max() > 0


@pytest.mark.parametrize("critic", [OWN, {"kind": "shared"}])
def test_ppo_resumed_is_ppo_uninterrupted(rlvr_tree: dict[str, Any], critic: dict[str, Any]) -> None:
    rlvr_tree |= {"algorithm": "ppo", "critic": critic, "train": {"mini_batches": 2}}
    rlvr_tree["run"]["steps"] = 4
    whole, expected = run(rlvr_tree)
    tree = named(rlvr_tree, "parts")
    run(tree | {"run": tree["run"] | {"steps": 2}})
    parts, rows = run(tree, resume=True)
    ours, theirs = weights(parts.checkpoint), weights(whole.checkpoint)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert rows[-1]["train/loss"] == expected[-1]["train/loss"]


def test_a_critic_on_the_policys_trunk_learns_beside_it(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"algorithm": "ppo", "critic": {"kind": "shared"}, "rewards": ALWAYS_ONE, "value_loss": {"clip": 10.0}}
    rlvr_tree["run"]["steps"] = 12
    outcome, rows = run(rlvr_tree)
    assert rows[0]["train/value_error"] > 0.5
    assert rows[-1]["train/value_error"] < 0.05
    assert rows[0]["train/sampler_gap_max"] < 1e-5
    assert weights(outcome.checkpoint)  # The folder opens as a language model all the same.


def test_while_the_critic_warms_up_the_policy_stands_still(rlvr_tree: dict[str, Any], tiny_model: Path) -> None:
    rlvr_tree |= {"algorithm": "ppo", "critic": OWN | {"warmup_steps": 5}}
    outcome, rows = run(rlvr_tree)
    before = weights(tiny_model)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(outcome.checkpoint).items())
    assert "critic/loss" in rows[0]
    assert "train/loss" not in rows[0]


def test_a_kl_penalty_in_the_reward_holds_the_policy_back(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree["run"]["steps"] = 10
    ends = []
    for coef in (1e-6, 10.0):
        tree = named(rlvr_tree, f"coef-{coef}") | {
            "algorithm": "reinforce++",
            "advantage": {"kind": "returns", "whiten": False},
            "kl": {"coef": coef, "estimator": "k1", "apply_to": "reward"},
        }
        _, rows = run(tree)
        assert rows[0]["kl/reference"] == pytest.approx(0, abs=1e-9)
        ends.append(rows[-1]["kl/reference"])
    assert ends[1] < 0.2 * ends[0]


def test_an_adaptive_coefficient_follows_the_measured_kl_and_survives_a_resume(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"kl": {"coef": 0.1, "adaptive": {"target": 0.001, "horizon": 16}}}
    rlvr_tree["run"]["steps"] = 4
    _, rows = run(rlvr_tree)
    coefs = [row["kl/coef"] for row in rows]
    assert coefs[:2] == pytest.approx([0.1, 0.08])  # No KL yet: down by a fifth ...
    assert coefs[3] == pytest.approx(coefs[2] * 1.2)  # ... and up again once the policy has left its target behind.
    tree = named(rlvr_tree, "parts")
    run(tree | {"run": tree["run"] | {"steps": 2}})
    _, resumed = run(tree, resume=True)
    assert [row["kl/coef"] for row in resumed] == coefs


def test_a_step_with_nothing_in_the_loss_leaves_an_adaptive_coefficient_alone(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {
        "kl": {"coef": 0.1, "adaptive": {"target": 0.001, "horizon": 16}},
        "masks": {"zero_advantage": True},
        "rewards": ALWAYS_ONE,
    }
    rlvr_tree["run"]["steps"] = 2
    outcome, rows = run(rlvr_tree)
    assert [row["kl/coef"] for row in rows] == [0.1, 0.1]
    assert "kl/reference" not in rows[0]
    assert json.loads((outcome.checkpoint / "state.json").read_text())["pipeline"]["kl_coef"] == 0.1


def test_a_checkpoint_whose_coefficient_is_no_number_goes_on_from_the_configs_and_says_so(
    rlvr_tree: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rlvr_tree |= {"kl": {"coef": 0.1, "adaptive": {"target": 0.001, "horizon": 16}}}
    rlvr_tree["run"]["steps"] = 1
    outcome, _ = run(rlvr_tree)
    state = json.loads((outcome.checkpoint / "state.json").read_text())
    state["pipeline"]["kl_coef"] = None
    (outcome.checkpoint / "state.json").write_text(json.dumps(state))
    (outcome.checkpoint / "manifest.json").unlink()  # The versions that spoilt it wrote none.
    rlvr_tree["run"]["steps"] = 2
    _, rows = run(rlvr_tree, resume=True)
    assert rows[-1]["kl/coef"] == 0.1
    assert "KL coefficient is no number" in capsys.readouterr().out


def test_only_the_least_sure_tokens_of_a_step_are_learned_from_however_it_is_cut(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"masks": {"top_entropy": 0.2}, "train": {"mini_batches": 2}}
    rlvr_tree["run"]["steps"] = 2
    ends = []
    for tokens in (4096, 40):  # All rows of an optimizer step at once, or one by one.
        tree = named(rlvr_tree, f"cut-{tokens}")
        outcome, rows = run(tree | {"policy": tree["policy"] | {"strategy": {"micro_batch_tokens": tokens}}})
        ends.append(weights(outcome.checkpoint))
        assert rows[0]["train/grad_norm"] > 0
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight, rtol=1e-3, atol=1e-4)
    plain, _ = run(named(rlvr_tree, "plain") | {"masks": {}})
    assert any(not torch.allclose(weights(plain.checkpoint)[name], weight, atol=1e-3) for name, weight in ends[0].items())


def test_stale_samples_of_a_loss_without_a_ratio_are_weighed_by_a_correction(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"algorithm": "rloo", "corrections": [{}], "rejections": [{"high": 1e-6, "take": "max"}]}
    rlvr_tree["rollout"]["max_staleness"] = 2
    rlvr_tree["run"]["steps"] = 4
    _, rows = run(rlvr_tree)
    assert rows[-1]["train/correction_token_truncate_kl"] > 1e-6  # Not the sampler against itself.
    assert rows[-1]["train/rejection_sequence_max_k3_rejected"] > 0


def test_the_full_kl_is_near_its_estimate_from_samples(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"kl": {"coef": 1e-9, "estimator": "full"}, "train": {"epochs": 2}}
    rlvr_tree["run"]["steps"] = 6
    rlvr_tree["rollout"] |= {"prompts_per_step": 10, "group_size": 8}
    _, rows = run(rlvr_tree)
    estimates = sum(row["kl/reference"] for row in rows)
    exact = sum(row["train/kl_ref"] for row in rows)
    assert exact > 0.01
    assert exact == pytest.approx(estimates, rel=0.6)  # Measured an update apart, one of them from samples.


def test_remax_plays_one_greedy_sample_a_group_and_does_not_train_on_it(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"algorithm": "remax"}
    outcome, rows = run(rlvr_tree)
    samples = {event.sample_id for event in read_journal(outcome.folder / "journal") if event.sample_id}
    groups = {sample.split(".")[0] for sample in samples}
    assert len(samples) == 5 * len(groups)
    assert rows[0]["train/loss_tokens"] == rows[0]["tokens"]  # Four siblings a group in both.


def test_stale_samples_are_corrected_and_the_correction_is_reported(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"algorithm": "decoupled_ppo"}
    rlvr_tree["rollout"]["max_staleness"] = 1
    rlvr_tree["run"]["steps"] = 6
    _, rows = run(rlvr_tree)
    weight = [row["train/correction_token_truncate_weight"] for row in rows]
    assert weight[0] == pytest.approx(1, abs=1e-5)
    assert any(abs(value - 1) > 1e-3 for value in weight[2:])
    assert all(0 < row["train/correction_token_truncate_effective"] <= 1 + 1e-9 for row in rows)


def test_overlong_samples_are_masked_out_of_the_loss(rlvr_tree: dict[str, Any]) -> None:
    rlvr_tree |= {"masks": {"overlong": True}}
    _, rows = run(rlvr_tree)
    assert any(row["rollout/truncated"] > 0 for row in rows)
    for row in rows:
        cut_tokens = row["rollout/truncated"] * 16 * 6
        assert row.get("train/loss_tokens", 0.0) == pytest.approx(row["tokens"] - cut_tokens)


def test_a_step_in_which_every_sample_is_masked_leaves_the_policy_alone(rlvr_tree: dict[str, Any], tiny_model: Path) -> None:
    rlvr_tree |= {"masks": {"keep_pass_rate": [5.0, 6.0]}}
    outcome, rows = run(rlvr_tree)
    before = weights(tiny_model)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(outcome.checkpoint).items())
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"advantage": {"kind": "gae"}}, "critic"),
        ({"critic": OWN}, "critic"),
        ({"algorithm": "tis", "old_policy": "sampler"}, "corrections"),
        ({"kl": {"coef": 0.1, "estimator": "full", "apply_to": "reward"}}, "kl.apply_to"),
        ({"kl": {"adaptive": {"target": 0.1}}}, "kl.coef"),
        ({"kl": {"coef": 0.1, "top_k": 4}}, "kl.top_k"),
        ({"algorithm": "opd"}, "teachers"),
        ({"teachers": {"one": {"model": "a/b", "domains": ["nowhere"]}}}, "teachers.one.domains"),
        ({"algorithm": "pass_at_k"}, "advantage.k"),
        ({"loss": {"kind": "import", "path": "nowhere_at_all:loss"}}, "loss.path"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_work_starts(rlvr_tree: dict[str, Any], change: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(rlvr_tree | change)
    assert path in [violation.path for violation in caught.value.violations]
