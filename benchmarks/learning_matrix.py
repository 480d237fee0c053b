"""Does every algorithm learn? Each preset trains the quickstart's tiny model on the quickstart's task, under three seeds.

All rows of a seed start from the same warmed-up checkpoint, and each cell is a process of its own, on one core. Finished
cells are kept: a second call runs what is missing, has failed, or has other settings now. About 40 minutes on two idle cores.
`python benchmarks/learning_matrix.py --presets grpo,gspo --seeds 0 --steps 20`
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from learning_docs import DOCS, rewritten
from learning_rows import NUM_STEPS, ROWS
from report import RESULTS, machine

from reroll.config.presets import presets
from reroll.observe.progress import progress_bar

Cell = dict[str, Any]
CELL = Path(__file__).resolve().parent / "learning_cell.py"
RESULT_FILE = RESULTS / "learning_matrix.json"
FOLDER = Path("runs/learning-matrix")
TIME_LIMIT_S = 1200
"""A cell that takes longer has failed."""


def main() -> None:
    args = _arguments()
    if not args.docs_only:
        run_matrix(args.presets, seeds=args.seeds, steps=args.steps, jobs=args.jobs, fresh=args.fresh)
    DOCS.write_text(rewritten(DOCS.read_text(), read_cells()))
    print(f"{RESULT_FILE} and {DOCS} are up to date")


def run_matrix(rows: Sequence[str], *, seeds: Sequence[int], steps: int, jobs: int, fresh: bool) -> None:
    """Run the cells that are missing, `jobs` at a time, and write each down as it ends. `fresh`: warm up and run all anew."""
    cells = {_key(cell): cell for cell in read_cells()}
    missing = missing_cells(rows, () if fresh else list(cells.values()), seeds=seeds, steps=steps)
    for seed in seeds if fresh else ():
        shutil.rmtree(_folder(seed), ignore_errors=True)
    pool = ThreadPoolExecutor(jobs)
    try:
        with progress_bar("warming up", len(seeds)) as advance:
            for warmed_up in as_completed([pool.submit(_prepare, seed) for seed in seeds]):
                warmed_up.result()
                advance()
        with progress_bar("training", len(missing)) as advance:
            for finished in as_completed([pool.submit(_run, cell) for cell in missing]):
                cell = finished.result()
                cells[_key(cell)] = cell
                _write_cells(list(cells.values()))
                print(_line(cell))
                advance()
    finally:
        pool.shutdown(cancel_futures=True)


def missing_cells(rows: Sequence[str], done: Sequence[Cell], *, seeds: Sequence[int], steps: int) -> list[Cell]:
    """The cells to run: not done yet, failed, or done with other settings or another preset than the row has now."""
    finished = {_key(cell): cell for cell in done if "failed" not in cell}
    asked = [_asked(row, seed=seed, steps=steps) for seed in seeds for row in rows]
    return [cell for cell in asked if not cell.items() <= finished.get(_key(cell), {}).items()]


def read_cells() -> list[Cell]:
    """What was measured so far."""
    return json.loads(RESULT_FILE.read_text())["cells"] if RESULT_FILE.exists() else []


def _write_cells(cells: list[Cell]) -> None:
    places = {row: place for place, row in enumerate(ROWS)}
    known = [cell for cell in cells if cell["row"] in places]
    known.sort(key=lambda cell: (places[cell["row"]], cell["steps"], cell["seed"]))
    title = "Held-out pass rate before and after training, on the quickstart's task"
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = {"title": title, "when": when, "machine": machine(), "cells": known}
    unfinished = RESULT_FILE.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    unfinished.replace(RESULT_FILE)  # A cell is on disk whole or not at all, whenever the run is stopped.


def _asked(name: str, *, seed: int, steps: int) -> Cell:
    row = ROWS[name]
    return {"row": name, "seed": seed, "steps": steps, "settings": list(row.settings), "preset": presets()[row.preset]}


def _key(cell: Cell) -> tuple[str, int, int]:
    return cell["row"], cell["seed"], cell["steps"]


def _folder(seed: int) -> Path:
    return FOLDER / f"seed-{seed}"


def _prepare(seed: int) -> None:
    done = _process(["prepare", str(seed)], seed=seed)
    if done.returncode:
        raise SystemExit(f"the warm-up of seed {seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _run(asked: Cell) -> Cell:
    """The cell with what came of it. Whatever goes wrong is a result too."""
    try:
        done = _process([asked["row"], str(asked["seed"]), str(asked["steps"])], seed=asked["seed"])
    except subprocess.TimeoutExpired:
        return asked | {"failed": f"took more than {TIME_LIMIT_S} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return asked | json.loads(line.removeprefix("RESULT "))
    reason = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    return asked | {"failed": reason}


def _process(words: list[str], *, seed: int) -> subprocess.CompletedProcess[str]:
    """A cell's process, on one thread: the cells share the cores among them."""
    folder = _folder(seed)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(CELL), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIME_LIMIT_S)


def _line(cell: Cell) -> str:
    told = f"failed: {cell['failed']}" if "failed" in cell else f"{cell['before']:.2f} → {cell['after']:.2f}"
    return f"{cell['row']}, seed {cell['seed']}: {told}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", type=_rows, default=list(ROWS), metavar="A,B", help="rows of the table; default: all")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], metavar="0,1")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--fresh", action="store_true", help="run what is asked for anew, warm-ups included")
    parser.add_argument("--docs-only", action="store_true", help="rewrite the page from what was measured")
    return parser.parse_args()


def _rows(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no row {', '.join(unknown)}: choose among {', '.join(ROWS)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
