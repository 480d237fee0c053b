"""One cell of the learning matrix, a row under one seed, in a process and a working directory of its own.

`python learning_cell.py prepare SEED` makes what all rows of a seed start from; `… ROW SEED STEPS` trains a row.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from learning_rows import ROWS, SHARED_SETTINGS, TEACHER, TEACHER_PASS_RATE, WARM, WARM_PASS_RATE, Row

from reroll.config.load import load_config
from reroll.errors import RerollError
from reroll.pipeline.run import evaluate, train
from reroll_zoo.tiny_models import make_tiny

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "examples"))

import quickstart  # noqa: E402

SFT, GRPO = quickstart.HERE / "sft.yaml", quickstart.HERE / "grpo.yaml"
MAX_SFT_STEPS = 1500


def prepare(seed: int) -> None:
    """Write the seed's data, and train its starting point and its teacher by SFT. What is there already is kept."""
    if not WARM.exists():
        quickstart.write_data(seed)
        tiny = make_tiny(quickstart.DATA / "tiny", hidden=64, layers=3, heads=4, kv_heads=4, seed=seed)
        _sft_until(WARM_PASS_RATE, model=tiny, into=WARM, seed=seed, first=60, stride=5)
    if not TEACHER.exists():
        _sft_until(TEACHER_PASS_RATE, model=WARM, into=TEACHER, seed=seed, first=100, stride=50)


def _sft_until(pass_rate: float, *, model: Path, into: Path, seed: int, first: int, stride: int) -> None:
    """Train on demonstrations until the held-out pass rate is reached: looked at after `first` steps, then every `stride`."""
    for num_steps in range(first, MAX_SFT_STEPS, stride):
        overrides = [f"run.name=sft-{into}", f"run.seed={seed}", f"run.steps={num_steps}", f"policy.model={model}"]
        outcome = train(load_config(SFT, overrides), resume=num_steps > first, overwrite=num_steps == first)
        if evaluate(load_config(GRPO, [f"policy.model={outcome.checkpoint}"])).pass_rate >= pass_rate:
            shutil.copytree(outcome.checkpoint, into)
            return
    raise SystemExit(f"SFT did not reach a pass rate of {pass_rate} in {MAX_SFT_STEPS} steps with seed {seed}")


def run_row(row: Row, *, seed: int, steps: int) -> dict[str, Any]:
    """Train a row and say how its held-out pass rate changed; or, under `failed`, why it did not come to an end."""
    with TemporaryDirectory(prefix="cell-", dir=".") as runs_dir:
        overrides = [f"algorithm={row.preset}", f"run.seed={seed}", f"run.steps={steps}", f"run.runs_dir={runs_dir}"]
        try:
            outcome = train(load_config(GRPO, [*overrides, *SHARED_SETTINGS, *row.settings]), code_folder=HERE)
        except RerollError as error:
            return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}
    if outcome.interrupted:
        return {"failed": "interrupted"}
    pass_rates = {num_steps: values["eval/pass@1"] for num_steps, values in outcome.evals.items()}
    return {"before": pass_rates[0], "after": pass_rates[steps], "seconds": round(outcome.seconds, 1)}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prepare", seed]:
            prepare(int(seed))
        case [name, seed, steps]:
            print("RESULT " + json.dumps(run_row(ROWS[name], seed=int(seed), steps=int(steps))))
