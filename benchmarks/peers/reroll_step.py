"""GRPO steps with reroll on the shared work. Usage: reroll_step.py MODEL_FOLDER bf16|fp32"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from work import NUM_NEW_TOKENS, NUM_SIBLINGS, NUM_TOKENS, QUESTIONS, WARM_UP

from reroll.config.load import parse_config
from reroll.pipeline.run import train

NUM_STEPS = 6


def count_e(prompt: object, trajectory: object) -> float:
    return float(trajectory.text.count("e")) / 20  # type: ignore[attr-defined]


def main() -> None:
    folder, precision = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
        tree = {
            "pipeline": "rlvr",
            "run": {"runs_dir": scratch, "steps": NUM_STEPS},
            "policy": {"model": folder, "strategy": {"kind": "torch", "precision": precision}, "optim": {"lr": 1e-6}},
            "data": {"train": [{"kind": "jsonl", "path": str(prompts)}]},
            "rewards": {"default": {"kind": "import", "path": "reroll_step:count_e"}},
            "rollout": {
                "prompts_per_step": len(QUESTIONS),
                "group_size": NUM_SIBLINGS,
                "max_tokens": NUM_TOKENS,
                "min_tokens": NUM_TOKENS,
                "max_prompt_tokens": 128,
            },
        }
        here = Path(__file__).parent
        outcome = train(parse_config(tree, folder=here), code_folder=here)
        rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    steady = [row for row in rows if "time/step_s" in row][WARM_UP:]
    seconds = {part: statistics.median(row[f"time/{part}_s"] for row in steady) for part in ("step", "wait", "train", "push")}
    print("RESULT " + json.dumps({"seconds": seconds.pop("step"), "tokens": NUM_NEW_TOKENS, **seconds}), flush=True)


if __name__ == "__main__":
    main()
