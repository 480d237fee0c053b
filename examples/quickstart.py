"""From nothing to a policy that has learned, on a CPU, in about three minutes.

A tiny transformer is warmed up on demonstrations until it is right sometimes; then GRPO, with nothing but a reward of one
or zero, makes it right nearly always, on prompts it never saw.  `python examples/quickstart.py --seed 1`
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from reroll.config.load import load_config
from reroll.pipeline.run import evaluate, train
from reroll_zoo.tiny_models import make_tiny

HERE = Path(__file__).parent / "quickstart"
DATA = Path("runs/quickstart-data")
NUM_DIGITS = 7


def make_tasks(num: int, rng: random.Random, exclude: set[str]) -> list[dict[str, str]]:
    """Digit strings to sort, none of them in `exclude`, which grows by them."""
    tasks = []
    while len(tasks) < num:
        digits = "".join(rng.choices("0123456789", k=NUM_DIGITS))
        if digits not in exclude:
            exclude.add(digits)
            tasks.append({"prompt": f"sort {digits}", "answer": "".join(sorted(digits))})
    return tasks


def write_data(seed: int) -> None:
    """Demonstrations for the warm-up, prompts for RL and held-out prompts: three sets without a common row."""
    rng, seen = random.Random(seed), set[str]()
    DATA.mkdir(parents=True, exist_ok=True)
    for name, num in (("held_out", 200), ("demonstrations", 6000), ("train", 4000)):
        rows = make_tasks(num, rng, seen)
        (DATA / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="GRPO steps, if not those of the YAML")
    parser.add_argument("--good-enough", type=float, default=0.3, help="pass rate at which the warm-up stops")
    args = parser.parse_args()
    seed, console = args.seed, Console()
    started = time.perf_counter()
    write_data(seed)
    make_tiny(DATA / "tiny", hidden=64, layers=3, heads=4, kv_heads=4, seed=seed)
    overrides = [f"run.seed={seed}"]

    console.rule("1. warm-up by supervised fine-tuning, until it is right sometimes")
    for num_steps in range(60, 400, 5):
        config = load_config(HERE / "sft.yaml", [*overrides, f"run.steps={num_steps}"])
        warm = train(config, resume=num_steps > 60, overwrite=num_steps == 60)
        if warm.interrupted:
            raise SystemExit("stopped in the warm-up: nothing was trained by RL")
        shorter = [f"run.steps={args.steps}"] if args.steps else []
        config = load_config(HERE / "grpo.yaml", [*overrides, *shorter, f"policy.model={warm.checkpoint}"])
        before = evaluate(config)
        console.print(f"right on {before.pass_rate:.0%} of the held-out prompts", highlight=False)
        if before.pass_rate >= args.good_enough:
            break

    console.rule("2. GRPO")
    outcome = train(config, overwrite=True)
    stopped = f" (stopped after {outcome.num_steps} of {config.run.steps} steps)" if outcome.interrupted else ""
    after = evaluate(load_config(HERE / "grpo.yaml", [f"policy.model={outcome.checkpoint}"]))

    table = Table(title=f"held-out prompts, never trained on{stopped}", title_justify="left")
    for column in ("prompt", "right answer", "before", "after"):
        table.add_column(column)
    for prompt, old, new in list(zip(before.prompts, before.trajectories, after.trajectories, strict=True))[:8]:
        marks = [f"{sample.text} {'[green]✓[/]' if sample.reward == 1 else '[red]✗[/]'}" for sample in (old[0], new[0])]
        table.add_row(prompt.messages[-1]["content"], prompt.answer, *marks)
    console.print(table)
    seconds = time.perf_counter() - started
    status = "interrupted" if outcome.interrupted else "finished"
    rates_now = {"before": before.pass_rate, "after": after.pass_rate}
    result = {"status": status, "steps": outcome.num_steps, **rates_now, "seconds": round(seconds, 1), "seed": seed}
    (outcome.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    rates = f"[red]{result['before']:.2f}[/] → [green]{result['after']:.2f}[/]"
    held_out = f"pass rate on {len(before.prompts)} held-out prompts"
    console.print(f"{held_out}: {rates} in {seconds:.0f} s[yellow]{stopped}[/]", highlight=False)
    for name in ("curve.png", "metrics.jsonl", "result.json"):
        console.print(f"  {outcome.folder / name}", highlight=False)
    console.print(f"  {outcome.checkpoint}: the trained model, an ordinary Hugging Face folder", highlight=False)


if __name__ == "__main__":
    main()
