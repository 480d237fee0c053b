"""Whole runs with environments and agents: mixed domains, history windows, faults, resume, and what a run tells of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from episode_fakes import trained_samples
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.errors import ConfigError, TooManyFailures
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import evaluate, train

CODE = '''
import functools, os
from reroll.envs.base import InvalidAction, StepResult


class Digits:
    """Three turns; each earns the share of digits in what was said."""

    def __init__(self, *, trouble=""):
        self.trouble = trouble

    def reset(self, seed):
        self.turn, self.seed = 0, seed
        if self.trouble == "raises" and seed % 4 == 0:
            raise RuntimeError("this seed is cursed")
        return ({"role": "user", "content": f"say {seed % 10}"},)

    def step(self, action):
        self.turn += 1
        if self.trouble == "dies" and self.turn == 2 and self.seed % 7 == 3:
            os._exit(3)
        earned = sum(character.isdigit() for character in action) / max(len(action), 1)
        over = self.turn == 3
        info = {"effective": 1.0, "success": float(earned > 0.5)}
        messages = () if over else ({"role": "user", "content": "more"},)
        return StepResult(messages=messages, reward=earned, terminated=over, info=info)

    def close(self):
        pass


@functools.cache
def connection():
    """One for all: making it takes longer than an episode."""
    import httpx

    return httpx.Client(timeout=60)


def agent(prompt, *, base_url, api_key):
    import openai  # Only here, or every process of environments would load it.

    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=connection())
    messages = [dict(message) for message in prompt.messages]
    said = ""
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        said += answer
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    return sum(character.isdigit() for character in said) / max(len(said), 1)
'''


GAMES = {"kind": "env", "domain": "digits"}


@pytest.fixture
def tree(rlvr_tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "reroll_test_envs.py").write_text(CODE)
    env = {"env": {"kind": "import", "path": "reroll_test_envs:Digits"}, "actions": {"kind": "text"}, "max_turns": 3}
    return rlvr_tree | {
        "pipeline": "agentic",
        "rewards": {},
        "envs": {"digits": env},
        "env_workers": {"kind": "inline"},
        "data": {
            "train": [{"kind": "env", "domain": "digits", "num": 50}],
            "eval": [{"kind": "env", "domain": "digits", "num": 6, "first_seed": 1000}],
        },
        "rollout": rlvr_tree["rollout"] | {"max_total_tokens": 256, "max_prompt_tokens": 64},
    }


def run(tree: dict[str, Any], **options: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    folder = Path(tree["run"]["runs_dir"]).parent
    outcome = train(parse_config(tree, folder=folder), code_folder=folder, **options)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return outcome, [row for row in rows if "reward/mean" in row]


@pytest.mark.parametrize("workers", ["inline", "threads", "processes"])
def test_a_game_of_several_turns_is_learned_wherever_it_runs(tree: dict[str, Any], workers: str) -> None:
    tree |= {"env_workers": {"kind": workers}, "algorithm": "gigpo"}
    tree["run"]["steps"] = 8
    outcome, rows = run(tree)
    assert rows[-1]["reward/mean"] > 2 * rows[0]["reward/mean"]
    assert all(row["env/digits/turns"] == 3 for row in rows)
    assert all(row["train/sampler_gap_max"] < 1e-5 for row in rows)
    assert {"env/digits/success", "env/digits/valid", "env/digits/step_s", "env/digits/num_actions"} <= set(rows[0])
    assert {"eval/pass@1", "eval/turns"} <= set(outcome.evals[0])


def test_the_place_where_environments_run_does_not_change_the_curve(tree: dict[str, Any]) -> None:
    rewards = []
    for workers in ("inline", "processes"):
        named = tree | {"run": tree["run"] | {"name": workers}, "env_workers": {"kind": workers}}
        rewards.append([row["reward/mean"] for row in run(named)[1]])
    assert rewards[0] == pytest.approx(rewards[1])


def test_resumed_is_uninterrupted(tree: dict[str, Any]) -> None:
    tree["run"]["steps"] = 4
    whole, _ = run(tree)
    parts = tree | {"run": tree["run"] | {"name": "parts"}}
    run(parts | {"run": parts["run"] | {"steps": 2}})
    resumed, _ = run(parts, resume=True)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(one.checkpoint).state_dict() for one in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_history_window_makes_one_row_of_each_turn_beyond_it(tree: dict[str, Any]) -> None:
    tree["envs"]["digits"] |= {"history": 1}
    _, rows = run(tree)
    assert all(row["train/loss_tokens"] == row["tokens"] for row in rows)  # No token is lost or trained twice.
    assert rows[0]["train/sampler_gap_max"] < 1e-5


def test_environments_agents_and_single_turns_share_a_run_by_weight(tree: dict[str, Any], rlvr_tree: dict[str, Any]) -> None:
    table = rlvr_tree["data"]["train"][0]
    tree |= {
        "rewards": {"plain": {"kind": "import", "path": "reroll_test_rewards:has_digit"}},
        "agents": {"helper": {"kind": "function", "path": "reroll_test_envs:agent", "timeout_s": 60}},
    }
    tree["data"] = {
        "train": [
            {"kind": "env", "domain": "digits", "weight": 2},
            table | {"domain": "plain"},
            table | {"domain": "helper"},
        ]
    }
    outcome, rows = run(tree)
    assert {"reward/digits", "reward/plain", "reward/helper"} <= set(rows[0])
    turns = [(sample.domain, len(sample.turns)) for sample in trained_samples(outcome.folder)]
    assert set(turns) <= {("digits", 3), ("plain", 1), ("helper", 2)}


def test_a_run_with_an_agent_learns_from_the_reward_it_returns(tree: dict[str, Any], rlvr_tree: dict[str, Any]) -> None:
    tree |= {
        "envs": {},
        "agents": {"default": {"kind": "function", "path": "reroll_test_envs:agent", "timeout_s": 60}},
        "data": {"train": rlvr_tree["data"]["train"]},
    }
    tree["run"]["steps"] = 16
    _, rows = run(tree)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-4:]) > 1.5 * sum(rewards[:4])
    assert all(row["train/sampler_gap_max"] < 1e-5 for row in rows)


def test_seeds_whose_environment_raises_fail_with_the_reason_and_the_run_goes_on(tree: dict[str, Any]) -> None:
    tree["envs"]["digits"]["env"] |= {"options": {"trouble": "raises"}}
    tree["rollout"] |= {"max_failed_fraction": 1.0}
    outcome, rows = run(tree)
    assert len(rows) == 3
    assert "this seed is cursed" in (outcome.folder / "journal" / "000000.jsonl").read_text()


def test_when_most_environments_fail_the_run_stops_and_says_why(tree: dict[str, Any]) -> None:
    tree["envs"]["digits"]["env"] |= {"options": {"trouble": "raises"}}
    tree["data"]["train"][0] |= {"num": 1}  # Only the cursed one.
    with pytest.raises(TooManyFailures, match="this seed is cursed"):
        run(tree)


def test_a_process_that_dies_takes_its_episodes_with_it_and_not_the_run(tree: dict[str, Any]) -> None:
    tree |= {"env_workers": {"kind": "processes", "num_workers": 2}}
    tree["envs"]["digits"]["env"] |= {"options": {"trouble": "dies"}}
    tree["rollout"] |= {"max_failed_fraction": 1.0}
    outcome, rows = run(tree)
    assert len(rows) == 3
    assert "exit code 3" in (outcome.folder / "journal" / "000000.jsonl").read_text()


def test_held_out_games_are_played_by_eval(tree: dict[str, Any]) -> None:
    folder = Path(tree["run"]["runs_dir"]).parent
    result = evaluate(parse_config(tree, folder=folder), code_folder=folder)
    assert len(result.prompts) == 6
    assert all(len(samples[0].turns) == 3 for samples in result.trajectories)
    assert result.as_dict()["prompts"][0]["question"] == {"seed": 1000}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"envs": {}}, "data.train.0.domain"),
        ({"env_workers": {"kind": "ray"}}, "env_workers.kind"),
        ({"agents": {"digits": {"kind": "function", "path": "json:dumps"}}}, "agents.digits"),
        ({"envs": {"digits": {"env": {"kind": "import", "path": "nowhere_at_all:Env"}}}}, "envs.digits.env.path"),
        ({"envs": {"digits": {"env": {"kind": "frozen_lake", "sise": 3}}}}, "envs.digits.env.sise"),
        ({"data": {"train": [GAMES], "eval": [GAMES]}}, "data.eval.0.first_seed"),
        ({"rollout": {"max_total_tokens": 100_000}}, "rollout.max_total_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_work_starts(tree: dict[str, Any], change: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree | change, folder=Path(tree["run"]["runs_dir"]).parent)
    assert path in [violation.path for violation in caught.value.violations]


def test_ratios_weights_and_rejections_may_be_those_of_a_turn(tree: dict[str, Any]) -> None:
    tree |= {
        "loss": {"kind": "gspo", "level": "turn", "clip_low": 0.5, "clip_high": 0.5},
        "old_policy": "trainer",
        "corrections": [{"level": "geometric_turn", "mode": "truncate"}],
        "rejections": [{"level": "turn", "take": "mean", "high": 1e6}],
        "train": {"mini_batches": 2},
    }
    tree["rollout"] |= {"max_staleness": 1}
    tree["run"]["steps"] = 3
    last = run(tree)[1][-1]
    assert last["train/correction_geometric_turn_truncate_kl"] > 0
    assert last["train/rejection_turn_mean_k3_distance"] > 0
    assert last["train/rejection_turn_mean_k3_rejected"] == 0
    assert last["train/grad_norm"] > 0
