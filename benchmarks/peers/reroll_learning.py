"""Learning with reroll on `learning_tasks`. Usage: reroll_learning.py train|evaluate|warm JSON, by `learning_trl.py`.

`train` also says how the trained model does on the held-out questions, `evaluate` says it of any folder: both in fp32,
greedily. `warm` makes a small model that answers some of the questions.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from learning_tasks import GROUP_SIZE, MAX_TOKENS, PROMPTS_PER_STEP, TASKS, held_out, reward_of, to_train

from reroll.config.load import load_config
from reroll.pipeline.run import evaluate, train
from reroll.types import Prompt, Trajectory
from reroll_zoo.tiny_models import make_tiny

HERE = Path(__file__).parent
NUM_DEMONSTRATIONS = 2000


def score(prompt: Prompt, trajectory: Trajectory) -> float:
    return reward_of(trajectory.text, prompt.answer or "")


def tree_of(asked: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The GRPO run that is asked for; `policy` of the arm is laid over it."""
    data = {
        "train": to_train(asked["task"], seed=asked["seed"], num=PROMPTS_PER_STEP * asked["steps"]),
        "eval": held_out(asked["task"]),
    }
    for name, rows in data.items():
        write_rows(scratch / f"{name}.jsonl", rows)
    arm = asked.get("arm", {})
    return {
        "pipeline": "rlvr",
        "algorithm": "grpo",
        "run": {"name": "run", "runs_dir": str(scratch), "steps": asked["steps"], "seed": asked["seed"]},
        "policy": {
            "model": asked["model"],
            "devices": asked["device"],
            "strategy": {"kind": "torch", "precision": arm.get("precision", "fp32"), "micro_batch_tokens": 16384},
            "optim": {"lr": asked["lr"], **arm.get("optim", {})},
        },
        "engine": {
            "devices": asked["device"],
            "max_running": PROMPTS_PER_STEP * GROUP_SIZE,
            "cache_gib": None if asked["device"] == "cpu" else 2,  # Several runs share a GPU.
        },
        "data": {"shuffle": False, "train": [source(scratch / "train.jsonl")]},
        "rewards": {"default": {"kind": "import", "path": "reroll_learning:score"}},
        "rollout": {
            "prompts_per_step": PROMPTS_PER_STEP,
            "group_size": GROUP_SIZE,
            "max_prompt_tokens": 128,
            "max_tokens": MAX_TOKENS,
        },
    }


def source(path: Path) -> dict[str, str]:
    return {"kind": "jsonl", "path": str(path)}


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(tree: dict[str, Any], scratch: Path) -> Any:
    file = scratch / "run.yaml"
    file.write_text(json.dumps(tree))  # JSON is YAML.
    return load_config(file, [])


def learned(asked: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Mean reward by step, and the held-out pass rate afterwards."""
    outcome = train(config_of(tree_of(asked, scratch), scratch), code_folder=HERE)
    lines = (outcome.folder / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    return {"rewards": rewards, **judged(asked | {"model": str(outcome.checkpoint)}, scratch)}


def judged(asked: dict[str, Any], scratch: Path) -> dict[str, Any]:
    tree = tree_of(asked | {"arm": {}}, scratch)
    tree["data"]["eval"] = [source(scratch / "eval.jsonl")]
    return {"held_out": evaluate(config_of(tree, scratch), code_folder=HERE).pass_rate}


def warmed(asked: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """A small random model sees answers to questions of all tasks, and is stopped before it knows them."""
    tiny = make_tiny(scratch / "tiny", hidden=64, layers=3, heads=4, kv_heads=4)
    each = NUM_DEMONSTRATIONS // len(TASKS)
    write_rows(scratch / "shown.jsonl", [row for task in TASKS for row in to_train(task, seed=-1, num=each)])
    tree = {
        "pipeline": "sft",
        "run": {"name": "warm", "runs_dir": str(scratch), "steps": asked["steps"]},
        "policy": {"model": str(tiny), "devices": asked["device"], "optim": {"lr": 2e-3, "warmup_steps": 20}},
        "data": {"train": [source(scratch / "shown.jsonl")]},
        "rows_per_step": 64,
        "max_tokens": 96,
    }
    outcome = train(config_of(tree, scratch))
    outcome.checkpoint.rename(asked["out"])
    return {"seconds": outcome.seconds}


def main() -> None:
    verb, asked = sys.argv[1], json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        done = {"train": learned, "evaluate": judged, "warm": warmed}[verb](asked, Path(scratch))
    print("RESULT " + json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
