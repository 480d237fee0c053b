"""Decoding with and without drafts, by one engine each, in one run: SmolLM2-135M-Instruct answers arithmetic questions.

CPU: 8 questions × 8 siblings, 8 running, at temperatures 1, 0.6 and 0, and once more as the next epoch, with other seeds.
`--tail` (a GPU): 64 questions × 8 siblings of heavy-tailed lengths up to 2,048 tokens, all running; the tail is what comes
after nine tenths of the requests have ended. All write the same tokens but for rounding in bf16: tokens per second compare.
`python benchmarks/drafts.py [--tail] [--model FOLDER] [--rounds 2]`
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from report import arguments, report
from side_by_side import model_folder
from work import messages

from reroll.infer.embedded.drafts import Drafter
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.infer.embedded.pace import Pace, Steady
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.renderer import Renderer
from reroll.types import Request, SamplingParams

NUM_SIBLINGS = 8
WAYS = ("off", "auto", "always")
_FORMS = (
    "What is {a} plus {b}? Explain each step of the addition before the answer.",
    "A farmer has {a} sheep and buys {b} more. Then {c} run away. How many sheep does the farmer have? Think step by step.",
    "Tom has {c} boxes with {a} pencils each and gives away {b} pencils. How many pencils are left? Show your reasoning.",
    "Compute {a} * {c} + {b}. Show your work.",
)


@dataclass
class Tally:
    """What one engine did, and in the tail of its work."""

    seconds: float = 0.0
    tokens: int = 0
    tail_s: float = 0.0
    tail_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


def questions(num: int) -> list[str]:
    draw = random.Random(0)
    return [
        draw.choice(_FORMS).format(a=draw.randint(10, 99), b=draw.randint(10, 99), c=draw.randint(2, 9)) for _ in range(num)
    ]


def requests(folder: str, *, tail: bool, temperature: float, epoch: int) -> list[Request]:
    renderer, draw = Renderer(load_tokenizer(folder)), random.Random(1)
    asked = []
    for number, question in enumerate(questions(64 if tail else 8)):
        prompt = renderer.start(messages(question))  # type: ignore[arg-type]
        for sibling in range(NUM_SIBLINGS):
            length = min(2048, int(64 * draw.paretovariate(0.9))) if tail else 0
            sampling = SamplingParams(
                max_tokens=length or 192,
                min_tokens=length,
                temperature=temperature,
                seed=(epoch * 1000 + number) * NUM_SIBLINGS + sibling,
            )
            asked.append(Request(id=f"{number}.{sibling}", prompt_ids=prompt, sampling=sampling))
    return asked


def write(engine: EmbeddedEngine, asked: list[Request], tally: Tally) -> None:
    before = engine.counts.num_drafted, engine.counts.num_accepted
    first = engine.counts.num_tokens
    for request in asked:
        engine.submit(request)
    started_s, tail = time.perf_counter(), None
    while engine.num_unfinished:
        engine.step()
        if tail is None and engine.num_unfinished <= len(asked) // 10:
            tail = time.perf_counter(), engine.counts.num_tokens
    now_s = time.perf_counter()
    tally.seconds += now_s - started_s
    tally.tokens += engine.counts.num_tokens - first
    if tail is not None:
        tally.tail_s += now_s - tail[0]
        tally.tail_tokens += engine.counts.num_tokens - tail[1]
    tally.drafted += engine.counts.num_drafted - before[0]
    tally.accepted += engine.counts.num_accepted - before[1]


def make(folder: str, way: str, *, device: str, max_running: int) -> EmbeddedEngine:
    model = load_model(folder, dtype=torch.bfloat16, device=device)
    drafter = None if way == "off" else Drafter()
    pace = Steady() if way == "always" else Pace()
    return EmbeddedEngine(model, load_tokenizer(folder), max_running=max_running, drafter=drafter, pace=pace)


def compare(folder: str, *, tail: bool, temperature: float, rounds: int) -> list[dict[str, object]]:
    """A row for each way. Round 0 warms up; from round 2 on, each prompt was answered before."""
    device = "cuda" if tail else "cpu"
    engines = {way: make(folder, way, device=device, max_running=512 if tail else 8) for way in WAYS}
    tallies = {(way, epoch): Tally() for way in WAYS for epoch in range(rounds + 1)}
    for epoch in range(rounds + 1):
        asked = requests(folder, tail=tail, temperature=temperature, epoch=epoch)
        for way, engine in engines.items():
            write(engine, asked if epoch or tail else asked[:16], tallies[way, epoch])
            engine._cached_prefixes.clear()  # As new weights would have it.
    rows: list[dict[str, object]] = []
    for epoch in range(1, rounds + 1):
        base = tallies["off", epoch]
        for way in WAYS:
            ours = tallies[way, epoch]
            row: dict[str, object] = {"temperature": temperature, "round": epoch, "drafts": way}
            row["tokens_per_s"] = ours.tokens / ours.seconds
            row["faster_by"] = (ours.tokens / ours.seconds) / (base.tokens / base.seconds)
            if tail:
                row["tail_tokens_per_s"] = ours.tail_tokens / ours.tail_s
                row["tail_faster_by"] = (ours.tail_tokens / ours.tail_s) / (base.tail_tokens / base.tail_s)
            row["drafted"], row["accepted"] = ours.drafted, ours.accepted
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder; by default SmolLM2 is fetched")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tail", action="store_true", help="the tail of a step on a GPU")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6, 0.0])
    args = parser.parse_args()
    folder = args.model or model_folder()
    rows = [
        row
        for temperature in args.temperatures
        for row in compare(folder, tail=args.tail, temperature=temperature, rounds=args.rounds)
    ]
    report(
        "drafts_tail" if args.tail else "drafts",
        rows,
        title=__doc__.splitlines()[0],
        note="rounds interleave; in the second each prompt was answered before, with other seeds",
        save=args.save,
    )


if __name__ == "__main__":
    main()
