"""A tiny model learns to read drawn digits, on a CPU; its blind twin does not.

A random model that sees (SmolVLM's design, 9 tokens a picture) imitates the names of some digits until it is right sometimes;
then GRPO, with nothing but a reward of one or zero, makes it read ones that it never saw. The blind twin goes through the same,
step for step, with a grey picture in the place of each: it shows what guessing earns.  `python examples/pictures.py --seed 1`
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

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
WARM_UP_STEPS = range(20, 240, 20)
"""After how many it is asked whether it is good enough."""


class Learned(NamedTuple):
    """Pass rates on the held-out digits before and after GRPO."""

    before: float
    after: float
    warm_up_steps: int


def draw_digit(digit: int, rng: np.random.Generator, *, blind: bool) -> Image.Image:
    """A digit of some size and colour, about in the middle of a noisy ground; grey for the blind twin."""
    ground = rng.integers(0, 40, (SIZE, SIZE, 3), dtype=np.uint8)
    colour = tuple(int(part) for part in rng.integers(150, 256, 3))
    place = (int(rng.integers(4, 7)), int(rng.integers(-1, 2)))
    font = ImageFont.load_default(size=float(rng.integers(18, 20)))
    if blind:
        return Image.new("RGB", (SIZE, SIZE), (128, 128, 128))
    picture = Image.fromarray(ground)
    ImageDraw.Draw(picture).text(place, str(digit), fill=colour, font=font)
    return picture


def write_data(seed: int, *, blind: bool) -> None:
    """Demonstrations, prompts for RL and held-out prompts, rows that name a file. Both twins are asked for the same digits."""
    rng = np.random.default_rng(seed)
    (DATA / "drawn").mkdir(parents=True, exist_ok=True)
    for name, num in SETS.items():
        with (DATA / f"{name}.jsonl").open("w") as rows:
            for number in range(num):
                digit, file = int(rng.integers(10)), f"drawn/{name}-{number}.png"
                draw_digit(digit, rng, blind=blind).save(DATA / file)
                rows.write(json.dumps({"prompt": "Digit?", "image": file, "answer": str(digit)}) + "\n")


def learn(name: str, overrides: list[str], *, good_enough: float, at_least: int, console: Console) -> Learned:
    """Warm-up until it is good enough, for `at_least` so many steps, and GRPO."""
    seed = overrides[0]
    for num_steps in WARM_UP_STEPS:
        warm_up = load_config(HERE / "sft.yaml", [seed, f"run.steps={num_steps}", f"run.name={name}-sft"])
        is_first = num_steps == WARM_UP_STEPS[0]
        warm = train(warm_up, resume=not is_first, overwrite=is_first)
        config = load_config(HERE / "grpo.yaml", [*overrides, f"run.name={name}", f"policy.model={warm.checkpoint}"])
        before = evaluate(config).pass_rate
        console.print(f"{name} reads {before:.0%} of the held-out digits", highlight=False)
        if num_steps >= at_least and (at_least or before >= good_enough):
            break
    outcome = train(config, overwrite=True)
    after = evaluate(load_config(HERE / "grpo.yaml", [f"policy.model={outcome.checkpoint}"])).pass_rate
    return Learned(before, after, num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="GRPO steps, if not those of the YAML")
    parser.add_argument("--good-enough", type=float, default=0.3, help="pass rate at which the warm-up stops")
    args = parser.parse_args()
    console, started = Console(), time.perf_counter()
    overrides = [f"run.seed={args.seed}", *([f"run.steps={args.steps}"] if args.steps else [])]
    make_tiny_vision(DATA / "tiny", image_size=SIZE, words=("Digit?",), initializer_range=0.06, seed=args.seed)
    found: dict[str, Learned] = {}
    for name in ("pictures", "pictures-blind"):
        console.rule(name)
        write_data(args.seed, blind=bool(found))
        at_least = found["pictures"].warm_up_steps if found else 0
        found[name] = learn(name, overrides, good_enough=args.good_enough, at_least=at_least, console=console)
    seconds = round(time.perf_counter() - started, 1)
    seeing, blind = found.values()
    for name, learned in zip(("seeing", "blind"), found.values(), strict=True):
        rates = f"{learned.before:.2f} → {learned.after:.2f}"
        console.print(f"{name}: {rates} of {SETS['held_out']} held-out digits", highlight=False)
    result = {"seed": args.seed, "before": seeing.before, "after": seeing.after, "blind": blind.after, "seconds": seconds}
    (Path("runs") / "pictures" / "result.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
