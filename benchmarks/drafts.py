"""Decoding with and without drafts, by one engine each, in one run: SmolLM2-135M-Instruct answers questions.

CPU: 8 siblings of one prompt at a time, on one thread, for `--minutes`: questions, and texts to be copied, at temperature 1 and
at 0.3 (a stand-in for a policy late in training, whose answers are alike). Each prompt comes twice, with other seeds, as in
the next epoch. Seconds are those of the processor, for `auto` too, so that work beside it counts for little.
`--tail` (a GPU): 64 questions × 8 siblings of heavy-tailed lengths up to 2,048 tokens, all running; the tail is what comes
after nine tenths of the requests have ended. All write the same tokens but for rounding in bf16: tokens per second compare.
`python benchmarks/drafts.py [--minutes 3] [--threads 1] [--model FOLDER]` or `--tail [--rounds 2]`
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from report import arguments, report
from rich.progress import Progress
from side_by_side import model_folder
from work import messages

from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.renderer import Renderer
from reroll.types import Request, SamplingParams
from reroll_zoo.drafts import MeasuredPace, SiblingDrafter, SteadyPace

NUM_SIBLINGS = 8
WAYS = ("off", "auto", "always")
NUM_TOKENS = 32
"""Of an answer on a CPU."""
WORKS = (("question", 1.0), ("copy", 1.0), ("question", 0.3), ("copy", 0.3))
"""What is asked for on a CPU, and the temperature."""
_FORMS = (
    "What is {a} plus {b}? Explain each step of the addition before the answer.",
    "A farmer has {a} sheep and buys {b} more. Then {c} run away. How many sheep does the farmer have? Think step by step.",
    "Tom has {c} boxes with {a} pencils each and gives away {b} pencils. How many pencils are left? Show your reasoning.",
    "Compute {a} * {c} + {b}. Show your work.",
)
_COPY = (
    "Repeat this text word for word: On {a} March the old ship left the harbour with {b} sailors and {c} barrels of water. "
    "The wind was strong, the sea was grey, and nobody on board knew how long the voyage to the islands would take."
)

Clock = Callable[[], float]


@dataclass
class Tally:
    """What one engine did, and in the tail of its work."""

    seconds: float = 0.0
    tokens: int = 0
    tail_s: float = 0.0
    tail_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    num_answers: int = 0
    num_same: int = 0
    """As without drafts, token for token."""


def ask(num: int, *, forms: tuple[str, ...] = _FORMS) -> list[str]:
    draw = random.Random(0)
    return [draw.choice(forms).format(a=draw.randint(10, 99), b=draw.randint(10, 99), c=draw.randint(2, 9)) for _ in range(num)]


def tail_requests(renderer: Renderer, *, temperature: float, epoch: int) -> list[Request]:
    draw = random.Random(1)
    asked = []
    for number, question in enumerate(ask(64)):
        lengths = [min(2048, int(64 * draw.paretovariate(0.9))) for _ in range(NUM_SIBLINGS)]
        asked += siblings(renderer, question, lengths, min_tokens=lengths, temperature=temperature, seed=epoch * 1000 + number)
    return asked


def siblings(
    renderer: Renderer, text: str, max_tokens: list[int], *, min_tokens: list[int], temperature: float, seed: int
) -> list[Request]:
    prompt = renderer.start(messages(text))  # type: ignore[arg-type]
    return [
        Request(
            id=f"{seed}.{number}",
            prompt_ids=prompt,
            sampling=SamplingParams(
                max_tokens=most, min_tokens=least, temperature=temperature, seed=seed * NUM_SIBLINGS + number
            ),
        )
        for number, (most, least) in enumerate(zip(max_tokens, min_tokens, strict=True))
    ]


def write(engine: EmbeddedEngine, asked: list[Request], tally: Tally, *, clock: Clock) -> dict[str, tuple[int, ...]]:
    """The answers, by request."""
    answers: dict[str, tuple[int, ...]] = {}
    before = engine.counts.num_drafted, engine.counts.num_accepted
    first = engine.counts.num_tokens
    for request in asked:
        engine.submit(request)
    started_s, tail = clock(), None
    while engine.num_unfinished:
        answers |= {ended.request_id: ended.completion.token_ids for ended in engine.step()}
        if tail is None and engine.num_unfinished <= len(asked) // 10:
            tail = clock(), engine.counts.num_tokens
    now_s = clock()
    tally.seconds += now_s - started_s
    tally.tokens += engine.counts.num_tokens - first
    if tail is not None:
        tally.tail_s += now_s - tail[0]
        tally.tail_tokens += engine.counts.num_tokens - tail[1]
    tally.drafted += engine.counts.num_drafted - before[0]
    tally.accepted += engine.counts.num_accepted - before[1]
    engine.cached_prefixes.clear()  # As new weights would have it.
    return answers


def make(folder: str, way: str, *, device: str, max_running: int, clock: Clock = time.perf_counter) -> EmbeddedEngine:
    model = load_model(folder, dtype=torch.bfloat16, device=device)
    drafter = None if way == "off" else SiblingDrafter()
    pace = SteadyPace() if way == "always" else MeasuredPace(clock=clock)
    return EmbeddedEngine(model, load_tokenizer(folder), max_running=max_running, drafter=drafter, pace=pace)


def on_cpu(folder: str, *, minutes: float) -> list[dict[str, object]]:
    """A row for each work, visit and way. Ways take turns at the same requests; ends with the turns in which time is up."""
    renderer, clock = Renderer(load_tokenizer(folder)), time.process_time
    engines = {way: make(folder, way, device="cpu", max_running=NUM_SIBLINGS, clock=clock) for way in WAYS}
    tallies: dict[tuple[str, float, str, str], Tally] = {}
    texts = {"question": ask(100), "copy": ask(100, forms=(_COPY,))}
    started_s, turn = time.monotonic(), 0
    with Progress() as progress:
        bar = progress.add_task("writing", total=60 * minutes)
        while time.monotonic() - started_s < 60 * minutes or not turn:
            kind, temperature = WORKS[turn // 2 % len(WORKS)]
            visit = "again" if turn % 2 else "first"
            asked = siblings(
                renderer,
                texts[kind][turn // (2 * len(WORKS))],
                [NUM_TOKENS] * NUM_SIBLINGS,
                min_tokens=[0] * NUM_SIBLINGS,
                temperature=temperature,
                seed=turn,
            )
            answers = {}
            for way in WAYS:
                tally = tallies.setdefault((kind, temperature, visit, way), Tally())
                answers[way] = write(engines[way], asked, tally, clock=clock)
                tally.num_same += sum(answers[way][request] == answers["off"][request] for request in answers["off"])
                tally.num_answers += len(asked)
                progress.update(bar, completed=min(time.monotonic() - started_s, 60 * minutes))
            turn += 1
    return [cpu_row(*key, tally, base=tallies[(*key[:3], "off")]) for key, tally in sorted(tallies.items(), key=_order)]


def _order(item: tuple[tuple[str, float, str, str], Tally]) -> tuple[int, str, int]:
    kind, temperature, visit, way = item[0]
    return WORKS.index((kind, temperature)), visit, WAYS.index(way)


def cpu_row(kind: str, temperature: float, visit: str, way: str, ours: Tally, *, base: Tally) -> dict[str, object]:
    return {
        "work": kind,
        "temperature": temperature,
        "visit": visit,
        "drafts": way,
        "tokens_per_cpu_s": ours.tokens / ours.seconds,
        "faster_by": (ours.tokens / ours.seconds) / (base.tokens / base.seconds),
        "tokens": ours.tokens,
        "drafted": ours.drafted,
        "accepted": ours.accepted,
        "answers": ours.num_answers,
        "same_answers": ours.num_same,
    }


def on_tail(folder: str, *, temperature: float, rounds: int) -> list[dict[str, object]]:
    """A row for each way. Round 0 warms up; from round 2 on, each prompt was answered before."""
    renderer = Renderer(load_tokenizer(folder))
    engines = {way: make(folder, way, device="cuda", max_running=512) for way in WAYS}
    tallies = {(way, epoch): Tally() for way in WAYS for epoch in range(rounds + 1)}
    for epoch in range(rounds + 1):
        asked = tail_requests(renderer, temperature=temperature, epoch=epoch)
        for way, engine in engines.items():
            write(engine, asked, tallies[way, epoch], clock=time.perf_counter)
    rows: list[dict[str, object]] = []
    for epoch in range(1, rounds + 1):
        base = tallies["off", epoch]
        for way in WAYS:
            ours = tallies[way, epoch]
            row: dict[str, object] = {"temperature": temperature, "round": epoch, "drafts": way}
            row["tokens_per_s"] = ours.tokens / ours.seconds
            row["faster_by"] = (ours.tokens / ours.seconds) / (base.tokens / base.seconds)
            row["tail_tokens_per_s"] = ours.tail_tokens / ours.tail_s
            row["tail_faster_by"] = (ours.tail_tokens / ours.tail_s) / (base.tail_tokens / base.tail_s)
            row["drafted"], row["accepted"] = ours.drafted, ours.accepted
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder; by default SmolLM2 is fetched")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long to go on taking turns, on a CPU")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU; several make sense on an idle machine alone")
    parser.add_argument("--tail", action="store_true", help="the tail of a step on a GPU")
    parser.add_argument("--rounds", type=int, default=2, help="of --tail")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6, 0.0], help="of --tail")
    args = parser.parse_args()
    folder = args.model or model_folder()
    title = (__doc__ or "").splitlines()[0]
    if args.tail:
        rows = [row for each in args.temperatures for row in on_tail(folder, temperature=each, rounds=args.rounds)]
        note = "rounds interleave; in the second each prompt was answered before, with other seeds"
        report("drafts_tail", rows, title=title, note=note, save=args.save)
        return
    torch.set_num_threads(args.threads)
    note = f"{args.threads} thread(s), seconds of the processor; ways take turns; again: the prompt was answered before"
    report("drafts", on_cpu(folder, minutes=args.minutes), title=title, note=note, save=args.save)


if __name__ == "__main__":
    main()
