"""A tiny model learns to read drawn digits, on a CPU, in about three minutes; its blind twin does not.

Digits are drawn with jitter and noise. A random model that sees (SmolVLM's design, 9 tokens a picture) imitates the names of some
of them until it is right sometimes; then GRPO, with nothing but a reward of one or zero, makes it read ones that it never saw. The
blind twin goes through the same with a grey picture in the place of each.  `python examples/pictures.py --seed 1`
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console

from reroll.config.load import load_config
from reroll.pipeline.run import evaluate, train
from reroll_zoo.vision.tiny import make_tiny_vision

HERE = Path(__file__).parent / "pictures"
DATA = Path("runs/pictures-data")
SIZE = 24
SETS = {"held_out": 200, "demonstrations": 2000, "train": 2000}


def draw_digit(digit: int, rng: np.random.Generator, *, blind: bool) -> Image.Image:
    """A digit in some place, size and colour on a noisy ground; grey for the blind twin."""
    if blind:
        return Image.new("RGB", (SIZE, SIZE), (128, 128, 128))
    ground = rng.integers(0, 90, (SIZE, SIZE, 3), dtype=np.uint8)
    picture = Image.fromarray(ground)
    colour = tuple(int(part) for part in rng.integers(150, 256, 3))
    place = (int(rng.integers(2, 8)), int(rng.integers(-3, 3)))
    ImageDraw.Draw(picture).text(place, str(digit), fill=colour, font=ImageFont.load_default(size=float(rng.integers(18, 23))))
    return picture


def write_data(seed: int, *, blind: bool) -> None:
    """Demonstrations, prompts for RL and held-out prompts: rows that name a file."""
    rng = np.random.default_rng(seed)
    (DATA / "drawn").mkdir(parents=True, exist_ok=True)
    for name, num in SETS.items():
        with (DATA / f"{name}.jsonl").open("w") as rows:
            for number in range(num):
                digit, file = int(rng.integers(10)), f"drawn/{name}-{number}.png"
                draw_digit(digit, rng, blind=blind).save(DATA / file)
                rows.write(json.dumps({"prompt": "Digit?", "image": file, "answer": str(digit)}) + "\n")


def learn(seed: int, *, blind: bool, good_enough: float, steps: int | None, console: Console) -> dict[str, float]:
    """Warm-up and GRPO; the pass rates on held-out digits before and after GRPO."""
    write_data(seed, blind=blind)
    make_tiny_vision(DATA / "tiny", image_size=SIZE, words=("Digit?",), seed=seed)
    name = "pictures-blind" if blind else "pictures"
    overrides, shorter = [f"run.seed={seed}"], [f"run.steps={steps}"] if steps else []
    for num_steps in range(20, 140, 20):
        warm_up = load_config(HERE / "sft.yaml", [*overrides, f"run.steps={num_steps}", f"run.name={name}-sft"])
        warm = train(warm_up, resume=num_steps > 20, overwrite=num_steps == 20)
        config = load_config(
            HERE / "grpo.yaml", [*overrides, *shorter, f"run.name={name}", f"policy.model={warm.checkpoint}"]
        )
        before = evaluate(config)
        console.print(f"reads {before.pass_rate:.0%} of the held-out digits", highlight=False)
        if before.pass_rate >= good_enough or blind:
            break
    outcome = train(config, overwrite=True)
    after = evaluate(load_config(HERE / "grpo.yaml", [f"policy.model={outcome.checkpoint}"]))
    return {"before": before.pass_rate, "after": after.pass_rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="GRPO steps, if not those of the YAML")
    parser.add_argument("--good-enough", type=float, default=0.3, help="pass rate at which the warm-up stops")
    args = parser.parse_args()
    console, started = Console(), time.perf_counter()
    result: dict[str, dict[str, float]] = {}
    for name in ("seeing", "blind"):
        console.rule(f"the {name} twin")
        result[name] = learn(
            args.seed, blind=name == "blind", good_enough=args.good_enough, steps=args.steps, console=console
        )
    for name, rates in result.items():
        console.print(f"{name}: {rates['before']:.2f} → {rates['after']:.2f} of {SETS['held_out']} held-out digits", highlight=False)
    seconds = round(time.perf_counter() - started, 1)
    (Path("runs") / "pictures" / "result.json").write_text(json.dumps({**result, "seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
