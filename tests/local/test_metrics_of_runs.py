"""What runs of every pipeline write is in the catalogue of metrics, and merges as that says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.observe.metrics import Metric, Stats
from reroll.pipeline.run import train
from reroll_zoo.reference.catalogue import MERGES, doc_of

Tree = dict[str, Any]


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Metric]]:
    """How each metric that is logged while a test runs was merged."""
    seen: dict[str, type[Metric]] = {}
    values_by_name = Stats.values_by_name

    def watched(self: Stats) -> dict[str, float]:
        seen.update({name: type(metric) for name, metric in self.items()})
        return values_by_name(self)

    monkeypatch.setattr(Stats, "values_by_name", watched)
    return seen


def rows(tmp_path: Path, name: str, rows: list[Tree]) -> Tree:
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "jsonl", "path": str(tmp_path / f"{name}.jsonl")}


def offline(tree: Tree, pipeline: str, source: Tree, **more: Any) -> Tree:
    kept = {name: tree[name] for name in ("run", "policy")}
    return (
        kept
        | {"pipeline": pipeline, "data": {"train": [source], "eval": [source]}, "rows_per_step": 4, "max_tokens": 64}
        | more
    )


def answered(tree: Tree, tmp_path: Path) -> Tree:
    return rows(tmp_path, "answered", [{"prompt": f"say {digit}", "answer": f"{digit}"} for digit in range(8)])


def compared(tree: Tree, tmp_path: Path) -> Tree:
    return rows(tmp_path, "pairs", [{"prompt": f"say {digit}", "chosen": f"{digit}", "rejected": "x"} for digit in range(8)])


def judged(tree: Tree, tmp_path: Path) -> Tree:
    return rows(tmp_path, "judged", [{"prompt": f"say {n}", "answer": f"{n}", "label": n % 2 == 0} for n in range(8)])


def stale_ppo(tree: Tree, tmp_path: Path) -> Tree:
    """A critic of its own, a reference, an entropy bonus, a correction of stale samples."""
    return tree | {
        "algorithm": "ppo",
        "kl": {"coef": 0.1, "adaptive": {"target": 0.1}},
        "entropy_coef": 0.01,
        "old_policy": "trainer",
        "corrections": [{"level": "token", "mode": "truncate"}],
        "rollout": tree["rollout"] | {"max_staleness": 1, "extra_samples": 1},
        "train": {"mini_batches": 2},
        "eval": {"samples": 2, "temperature": 1.0},
    }


def mixed_domains(tree: Tree, tmp_path: Path) -> Tree:
    """A table and a game; a reward with parts; a critic on the policy's trunk."""
    game = {"env": {"kind": "frozen_lake", "size": 3}, "max_turns": 2}
    return tree | {
        "algorithm": "ppo",
        "critic": {"kind": "shared"},
        "rewards": {
            "default": {
                "kind": "stack",
                "parts": {"length": {"kind": "overlong", "max_tokens": 6, "buffer_tokens": 4}, "exact": {"kind": "exact"}},
            }
        },
        "envs": {"lake": game},
        "env_workers": {"kind": "inline"},
        "data": {
            part: [*tree["data"][part], {"kind": "env", "domain": "lake", "num": 4, "first_seed": seed}]
            for part, seed in (("train", 0), ("eval", 1000))
        },
        "rollout": tree["rollout"] | {"max_prompt_tokens": 512, "max_total_tokens": 1024},
    }


RUNS: dict[str, Callable[[Tree, Path], Tree]] = {
    "stale ppo": stale_ppo,
    "mixed domains": mixed_domains,
    "sft": lambda tree, path: offline(tree, "sft", answered(tree, path)),
    "dpo": lambda tree, path: offline(tree, "dpo", compared(tree, path), loss={"kind": "sigmoid", "sft_coef": 1.0}),
    "kto": lambda tree, path: offline(tree, "dpo", judged(tree, path), loss={"kind": "kto"}),
    "reward model": lambda tree, path: offline(tree, "reward_model", compared(tree, path)),
    "distill": lambda tree, path: offline(
        tree, "distill", answered(tree, path), teacher={"model": tree["policy"]["model"], "devices": "cpu"}, sft_weight=0.5
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_metric_of_a_run_is_written_down(
    rlvr_tree: Tree, tmp_path: Path, merged: dict[str, type[Metric]], name: str
) -> None:
    rlvr_tree["run"]["steps"] = 2
    outcome = train(parse_config(RUNS[name](rlvr_tree, tmp_path), folder=tmp_path), code_folder=tmp_path)
    logged = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    names = {metric for row in logged for metric in row} - {"step"}
    assert len(names) > 10
    docs = {metric: doc_of(metric) for metric in names}
    assert {metric for metric, doc in docs.items() if doc is None} == set()
    wrong = {
        metric: merged[metric].__name__
        for metric, doc in docs.items()
        if doc and doc.merge and metric in merged and merged[metric] is not MERGES[doc.merge]
    }
    assert wrong == {}
