"""What the live page costs: the controller's time on a core for each step, without a page, with one, and with 1 and 100 open
tabs; and how long a frame of its Time view takes with up to 100,000 samples, in Chromium without a GPU.

Cost: a real run of a tiny model, whose engine and trainer are processes of their own, so that the time of the run's own process
is the controller's and the page's. Tabs ask as a browser's do, once a second. The kinds take turns; each is compared with the
run without a page of its own round. Frames: the view is moved and zoomed by wheel, and each callback that draws is timed in the
browser.
Run: python benchmarks/page.py [--rounds 2] [--steps 100] [--only cost|frames] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
from report import arguments, report

from reroll.config.load import parse_config
from reroll.observe.files import read_jsonl
from reroll.observe.journal import Journal, SampleState
from reroll.pipeline.run import train
from reroll.types import Completion, FinishReason, Status, Trajectory, Turn
from reroll_zoo.page.companion import PageCompanion
from reroll_zoo.page.run_data import RunData
from reroll_zoo.page.server import PageServer
from reroll_zoo.tiny_models import make_tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/unit/zoo/page"))  # A helper of the tests, no package.
from browser import CHROMIUM, Tab, opened

FIRST_STEP = 10
"""Counted from here on: everything is started and warm."""
NUM_TABS = 100
NUM_FRAMES = 60
GROUP_SIZE = 8
COMPLETION = Completion(token_ids=(1,), logprobs=(-1.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
TICKS_S = os.sysconf("SC_CLK_TCK")
KINDS: dict[str, int | None] = {"no page": None, "page, no tab": 0, "page, 1 tab": 1, f"page, {NUM_TABS} tabs": NUM_TABS}
"""How many tabs look; None is a run without a page."""
TIMED_FRAMES = """
window.drawnMs = [];
const plain = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (callback) => plain((now) => {
  const start = performance.now();
  callback(now);
  window.drawnMs.push(performance.now() - start);
});
"""
MOVE = """
(async () => {
  const canvas = document.querySelector('.timeline canvas'), frames = () => new Promise((done) => setTimeout(done, 0));
  const times = [], always = { bubbles: true, cancelable: true, clientX: 600 };
  const wheel = (about) => canvas.dispatchEvent(new WheelEvent('wheel', { ...always, ...about }));
  for (let frame = 0; frame < %d; frame++) {
    const before = window.drawnMs.length;
    wheel(frame %% 2 ? { deltaY: 60, shiftKey: true } : { deltaY: frame %% 4 ? 40 : -40 });
    while (window.drawnMs.length === before) await frames();
    times.push(window.drawnMs.slice(before).reduce((a, b) => a + b, 0));
  }
  return times;
})()
"""
"""Moves and zooms by turns, and waits for the frame that shows it."""


def tree_in(folder: Path, *, steps: int) -> dict[str, Any]:
    """A run whose workers are processes of their own."""
    data = folder / "digits.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {digit}", "answer": str(digit)}) + "\n" for digit in range(10)))
    if not (folder / "model").exists():
        make_tiny(folder / "model", hidden=32, layers=2, heads=4, kv_heads=2, seed=3)
    return {
        "pipeline": "rlvr",
        "run": {"name": "run", "runs_dir": str(folder / "runs"), "steps": steps, "seed": 1},
        "runtime": {"kind": "processes"},
        "policy": {"model": str(folder / "model"), "devices": "cpu"},
        "engine": {"devices": "cpu"},
        "data": {"train": [{"kind": "jsonl", "path": str(data)}]},
        "rewards": {"default": {"kind": "exact"}},
        "rollout": {"prompts_per_step": 16, "group_size": GROUP_SIZE, "max_prompt_tokens": 32, "max_tokens": 24},
    }


def run_in(folder: Path, *, steps: int, has_page: bool) -> None:
    """Train, in a process of its own, whose time is read from outside."""
    companion = PageCompanion(port=0) if has_page else None
    train(parse_config(tree_in(folder, steps=steps), folder=folder), code_folder=folder, companion=companion)


@contextmanager
def child(*words: str, out: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """This file in another process, ended with the block."""
    stdout = out.open("wb") if out else subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, __file__, *words], stdout=stdout, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


class Cost(NamedTuple):
    """Of a step."""

    cpu_s: float
    """On a core, of the run's own process."""
    wall_s: float
    looks: float
    """Of all tabs."""


def cost_of(num_tabs: int | None, *, steps: int) -> Cost:
    """Of a run with so many tabs open; None is a run without a page."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        said, metrics = Path(scratch) / "said.txt", Path(scratch) / "runs" / "run" / "metrics.jsonl"
        has_page = ["--page"] if num_tabs is not None else []
        run = stack.enter_context(child("--run", scratch, "--steps", "100000", *has_page, out=said))

        def steps_taken(at_least: int) -> int:
            while not metrics.exists() or len(rows := read_jsonl(metrics)) < at_least:
                assert run.poll() is None, said.read_text()
                time.sleep(0.02)
            return len(rows)

        looks = Path(scratch) / "looks.txt"
        looks.touch()
        steps_taken(FIRST_STEP)
        if num_tabs:
            found = re.search(r"page: (http://\S+)\?token", said.read_text())
            assert found, said.read_text()
            tabs = stack.enter_context(child("--tabs", str(num_tabs), "--url", found[1], out=looks))
            while looks.stat().st_size < 2 * num_tabs:  # Each has looked twice.
                assert tabs.poll() is None, looks.read_text()
                time.sleep(0.02)
        first = steps_taken(FIRST_STEP)
        before = (_cpu_s(run.pid), time.monotonic(), float(looks.stat().st_size))
        num = steps_taken(first + steps) - first
        after = (_cpu_s(run.pid), time.monotonic(), float(looks.stat().st_size))
        return Cost(*((end - start) / num for start, end in zip(before, after, strict=True)))


def _cpu_s(pid: int) -> float:
    """Of this process and its threads, not of the workers that it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


async def look(url: str, num_tabs: int) -> None:
    """Ask as so many open tabs do, until ended."""

    async def tab(session: aiohttp.ClientSession) -> None:
        revision = marks = activity = rows = generation = 0
        await asyncio.sleep(random.random())
        while True:
            async with session.get(f"{url}api/run") as response:
                await response.json()
            about = {"run": "", "since": rows, "generation": generation}
            async with session.get(f"{url}api/metrics", params=about) as response:
                metrics = await response.json()
            rows, generation = metrics["start"] + len(metrics["rows"]), metrics["generation"]
            since = {"since": revision, "marks": marks, "activity": activity}
            async with session.get(f"{url}api/events", params=since) as response:
                events = await response.json()
            revision, activity = events["revision"], events["activity"]["next"]
            marks += len(events["marks"])
            os.write(1, b".")  # A look: three questions.
            await asyncio.sleep(1.0)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(tab(session) for _ in range(num_tabs)))


def write_lives(folder: Path, num: int) -> None:
    """The journal of an asynchronous run of so many samples: a step a second of 512, lengths with a long tail."""
    rng, clock_s = random.Random(0), 0.0
    turn = Turn(prompt_ids=(1,), completion=COMPLETION, text="")
    events: list[tuple[float, int, Any]] = []
    for group in range(num // GROUP_SIZE):
        start_s = group * GROUP_SIZE / 512
        step = math.ceil(start_s) + 4
        for index in range(GROUP_SIZE):
            begin_s = start_s + rng.uniform(0.05, 0.2)
            end_s = min(step - 0.3, begin_s + 0.3 * rng.paretovariate(1.5))
            events += [(start_s, 0, (group, index, step)), (begin_s, 1, (group, index, step))]
            events += [(end_s, 2, (group, index, step)), (end_s + 0.02, 3, (group, index, step))]
            events += [(step + 0.9, 5, (group, index, step))]
    last = math.ceil(num / 512) + 4
    trained: dict[int, list[int]] = {}
    for group in range(num // GROUP_SIZE):
        trained.setdefault(math.ceil(group * GROUP_SIZE / 512) + 4, []).append(group)
    events += [(float(step), 4, step) for step in range(1, last + 1) if step in trained]
    events += [(step + 0.95, 6, step) for step in range(1, last + 1) if step in trained]
    with Journal(folder, clock=lambda: 1e9 + clock_s) as journal:
        for time_s, kind, about in sorted(events, key=lambda event: event[:2]):
            clock_s = time_s
            if kind == 4:
                journal.taken(trained[about])
            elif kind == 6:
                journal.stepped(version=about)
            else:
                group, index, step = about
                id = f"{group}.{index}"
                if kind == 0:
                    journal.record(id, SampleState.QUEUED, prompt=f"p{group}", domain="sums", version=max(0, step - 4))
                elif kind == 1:
                    journal.record(id, SampleState.GENERATING)
                elif kind == 2:
                    journal.record(id, SampleState.SCORING, tokens=100)
                elif kind == 3:
                    journal.ended(id, Trajectory(id=id, turns=(turn,), status=Status.COMPLETED, reward=float(index % 2)))
                else:
                    journal.record(id, SampleState.TRAINED, version=step)


async def frames_of(num: int) -> list[float]:
    """Milliseconds that each frame of the Time view took to draw, of a run of so many samples."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        write_lives(folder / "journal", num)
        with PageServer(RunData(folder), port=0) as server, server.in_background():
            async with opened("about:blank", Path(scratch) / "browser") as tab:
                await tab.call("Page.addScriptToEvaluateOnNewDocument", source=TIMED_FRAMES)
                await tab.call("Page.navigate", url=f"{server.url}#time")
                await tab.until(f"document.querySelector('.timeline .grow')?.textContent.startsWith('{_short(num)} samples')")
                return await _moved(tab)


async def _moved(tab: Tab) -> list[float]:
    times = await tab.evaluate(MOVE % NUM_FRAMES)
    assert tab.complaints == []
    return [float(one) for one in times[5:]]  # Compiled by then.


def _short(num: int) -> str:
    return f"{num / 1000:g}k" if num >= 10_000 else str(num)


def measure_cost(*, rounds: int, steps: int) -> list[dict[str, Any]]:
    found: dict[str, list[Cost]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, num_tabs in KINDS.items():
            found[kind].append(cost_of(num_tabs, steps=steps))
    bare = found["no page"]
    rows = []
    for kind, measured in found.items():
        added = [(cost, cost.cpu_s - base.cpu_s) for cost, base in zip(measured, bare, strict=True)]
        row = {
            "kind": kind,
            "controller_ms_per_step": 1000 * median(cost.cpu_s for cost in measured),
            "over_no_page": median(cost.cpu_s / base.cpu_s for cost, base in zip(measured, bare, strict=True)),
            "added_percent_of_a_core": 100 * median(more / cost.wall_s for cost, more in added),
            "looks_per_s": median(cost.looks / cost.wall_s for cost in measured),
            "added_ms_per_look": 1000 * median(more / cost.looks if cost.looks else 0.0 for cost, more in added),
            "step_ms": 1000 * median(cost.wall_s for cost in measured),
        }
        rows.append(row)
    return rows


def measure_frames() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for num in (1_000, 10_000, 100_000):
        times = sorted(asyncio.run(frames_of(num)))
        middle = median(times)
        row = {"samples": num, "frame_ms": middle, "p95_ms": times[int(0.95 * len(times))], "least_ms": times[0]}
        rows.append({**row, "over_1000_samples": middle / rows[0]["frame_ms"] if rows else 1.0})
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", choices=("cost", "frames"))
    for name in ("--run", "--tabs", "--url"):  # What the processes that it starts are told.
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_in(Path(args.run), steps=args.steps, has_page=args.page)
    if args.tabs:
        return asyncio.run(look(args.url, int(args.tabs)))
    load = {"load_at_start": os.getloadavg()[0], "cores": os.cpu_count()}
    if args.only != "frames":
        rows = measure_cost(rounds=args.rounds, steps=args.steps)
        note = "time of the run's own process on a core; read the ratios, each to the run without a page of its round"
        report("page_cost", rows, title="the live page beside a run", save=args.save, note=note, facts=load)
    if args.only != "cost":
        assert CHROMIUM is not None, "no Chromium is installed: scripts/setup_browser.sh installs one"
        note = "the callback that draws, in Chromium without a GPU"
        report("page_frames", measure_frames(), title="a frame of the Time view", save=args.save, note=note, facts=load)
    return None


if __name__ == "__main__":
    main()
