"""What reusing the contexts of earlier turns buys: the embedded engine with and without it, in one run on a CPU.

A tiny model (hidden 96, 4 layers, character tokens). Conversations: 64 episodes × 6 turns, a reply of 32 tokens and about 8
written tokens a turn. Single turns: 64 prompts of 40 tokens × 4 siblings, 32 written tokens; nothing there can be reused.
`python benchmarks/turns.py [--rounds N]`
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from report import arguments, report

from reroll.infer.base import EngineCounts
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.types import Request, SamplingParams
from reroll_zoo.tiny_models import make_tiny

NUM_EPISODES, NUM_TURNS, NUM_REPLY, NUM_WRITTEN = 64, 6, 32, 8
NUM_PROMPTS, NUM_SIBLINGS, NUM_PROMPT_TOKENS, NUM_LONG = 64, 4, 40, 32
Work = Callable[[EmbeddedEngine], None]


def ask(name: str, prompt: Sequence[int], num_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, seed=random.Random(name).getrandbits(32))
    return Request(id=name, prompt_ids=tuple(prompt), sampling=sampling)


def words(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 90) for _ in range(count)]


def conversations(engine: EmbeddedEngine) -> None:
    """Each episode goes on the moment its turn ends, as in a rollout."""
    contexts = {f"{episode}": words(f"{episode}", NUM_REPLY) for episode in range(NUM_EPISODES)}
    turns = dict.fromkeys(contexts, 1)
    for episode, context in contexts.items():
        engine.submit(ask(episode, context, NUM_WRITTEN))
    while engine.num_unfinished:
        for finished in engine.step():
            episode = finished.request_id
            if turns[episode] < NUM_TURNS:
                turns[episode] += 1
                contexts[episode] += [*finished.completion.token_ids, *words(f"{episode}.{turns[episode]}", NUM_REPLY)]
                engine.submit(ask(episode, contexts[episode], NUM_WRITTEN + int(episode) % 3 - 1))


def single_turns(engine: EmbeddedEngine) -> None:
    prompts = [words(f"prompt {number}", NUM_PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
    for number, prompt in enumerate(prompts):
        for sibling in range(NUM_SIBLINGS):
            engine.submit(ask(f"{number}.{sibling}", prompt, NUM_LONG - number % 5))
    while engine.num_unfinished:
        engine.step()


def measure(engine: EmbeddedEngine, work: Work) -> tuple[float, EngineCounts]:
    """Seconds, and what was done. Sleep forgets what the last round left."""
    engine.sleep()
    engine.wake()
    engine.counts = EngineCounts()
    started = time.perf_counter()
    work(engine)
    return time.perf_counter() - started, engine.counts


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    rounds: int = given.rounds
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(make_tiny(Path(scratch), hidden=96, layers=4, max_positions=512))
        engines = {
            name: EmbeddedEngine(load_model(folder, dtype=torch.float32, device="cpu"), load_tokenizer(folder), max_cached=size)
            for name, size in (("reuse", None), ("no reuse", 0))
        }
        for work in (conversations, single_turns):
            results: dict[str, list[tuple[float, EngineCounts]]] = {name: [] for name in engines}
            for number in range(rounds + 1):
                for name, engine in engines.items():  # Side by side: a slow minute of the machine hits both alike.
                    result = measure(engine, work)
                    if number:  # The first round warms up.
                        results[name].append(result)
            seconds = {name: statistics.median(wall_s for wall_s, _ in result) for name, result in results.items()}
            for name, result in results.items():
                counts = result[0][1]
                rows.append(
                    {
                        "work": work.__name__.replace("_", " "),
                        "engine": name,
                        "prefill_tokens": counts.num_prefill_tokens,
                        "reused_tokens": counts.num_reused_tokens,
                        "written_tokens_per_s": counts.num_tokens / seconds[name],
                        "speedup": seconds["no reuse"] / seconds[name],
                    }
                )
    report(
        "turns",
        rows,
        title="The next turn reads only what is new",
        note=f"median of {rounds} interleaved rounds",
        save=given.save,
    )


if __name__ == "__main__":
    main()
