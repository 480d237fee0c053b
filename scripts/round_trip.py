"""The files that a token passes on its way round: sampled, judged, trained on, and back as the weights that sample the next.

    .venv/bin/python scripts/round_trip.py            # the files, how many functions of each ran, and what runs beside them

A run of the plainest kind (embedded engine, one process, the numeric reward, GRPO, a tiny model) is traced in all its threads
while its second and third steps last. A file of `reroll/` counts if a function of it ran then, unless `BESIDE` has it: each
file there has a reason, and could be taken out with the token none the wiser. What the zoo brings (the reward, kernels of a
CPU) is listed and not counted.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import reroll
from reroll.observe.metrics import Stats
from reroll.pipeline.rlvr import RlvrPipeline
from reroll_zoo.tiny_models import make_tiny

ROOT = Path(reroll.__file__).parents[1]

BESIDE = {
    "reroll/config/": "what was asked for: read, never changed",
    "reroll/types.py": "the nouns that travel",
    "reroll/errors.py": "what is raised, and how it reads",
    "reroll/observe/": "metrics, journal, run folder and live view: they look on",
    "reroll/rollout/meter.py": "counts what the scheduler did",
    "reroll/rewards/meter.py": "counts what rewards did",
    "reroll/pipeline/guard.py": "compares log-probs of sampler and trainer, and ends the run if they differ",
    "reroll/pipeline/checkpoints.py": "saves what was trained",
    "reroll/pipeline/resume.py": "notes where the run stands, to go on from there",
    "reroll/pipeline/evaluate.py": "asks the policy on held-out rows",
    "reroll/pipeline/controls.py": "pause, stop and changes from outside",
    "reroll/pipeline/restarts.py": "how often the run was started anew",
    "reroll/runtime/cpu.py": "how the threads of a process wait, and whether they get their cores",
    "reroll/runtime/watchdog.py": "ends a worker that hangs",
    "reroll/runtime/failures.py": "how a worker's exception is told",
    "reroll/runtime/foreground.py": "Ctrl-C",
}
"""What runs while a token is on its way, and why it is none of the way: by file or folder."""
FIRST_STEP, LAST_STEP = 2, 3


class Tracer:
    """Notes every function of this repository that is called in any thread, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self._seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_on and event == "call":
            self._seen.add(frame.f_code)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In this thread, and in all that start from now on."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # None takes it away.

    def functions(self) -> dict[str, list[str]]:
        """By file: the functions that ran. The body of a module or a class is none."""
        found: dict[str, set[str]] = defaultdict(set)
        for code in self._seen:
            path = Path(code.co_filename)
            if code.co_flags & inspect.CO_OPTIMIZED and path.is_relative_to(ROOT):
                found[path.relative_to(ROOT).as_posix()].add(code.co_qualname)
        return {path: sorted(names) for path, names in sorted(found.items()) if path.startswith(("reroll/", "reroll_zoo/"))}


def trace_run(folder: Path) -> dict[str, list[str]]:
    """The functions that ran in the steps of a run, by file."""
    tracer = Tracer()
    config = reroll.make_config(
        model=str(make_tiny(folder / "tiny")),
        data=[{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(8)],
        reward={"kind": "numeric"},
        algorithm="grpo",
        steps=LAST_STEP,
        group_size=2,
        run={"name": "traced", "runs_dir": str(folder / "runs"), "trackers": [], "seed": 1},
        runtime={"kind": "local"},
        policy={"devices": "cpu"},
        engine={"kind": "embedded", "devices": "cpu"},
        rollout={"prompts_per_step": 2, "max_tokens": 6},
    )
    with tracer.installed(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        reroll.train(config=config, pipeline=traced_pipeline(tracer))
    return tracer.functions()


def traced_pipeline(tracer: Tracer) -> type[RlvrPipeline]:
    """The pipeline itself, which switches the tracer on for the steps that are looked at."""

    class TracedPipeline(RlvrPipeline):
        async def step(self, step: int) -> Stats:
            tracer.is_on = FIRST_STEP <= step + 1 <= LAST_STEP
            try:
                return await super().step(step)
            finally:
                tracer.is_on = FIRST_STEP <= step + 1 < LAST_STEP

    return TracedPipeline


def reason_beside(path: str) -> str | None:
    """Why a file is none of a token's way; None if it is part of it."""
    return next((reason for part, reason in BESIDE.items() if path.startswith(part)), None)


def files_of_a_token(functions: dict[str, list[str]]) -> list[str]:
    """The files of the core that a token passes."""
    return [path for path in functions if path.startswith("reroll/") and reason_beside(path) is None]


def main(write: Callable[[str], Any] = print) -> None:
    """Print the way."""
    with tempfile.TemporaryDirectory() as folder:
        functions = trace_run(Path(folder))
    path = files_of_a_token(functions)
    write(f"{len(path)} files of a token's round trip (functions that ran):")
    for file in path:
        write(f"  {file} ({len(functions[file])}): {', '.join(functions[file][:4])}")
    for title, others in (
        ("beside the way", [file for file in functions if file.startswith("reroll/") and file not in path]),
        ("of the zoo", [file for file in functions if file.startswith("reroll_zoo/")]),
    ):
        write(f"{len(others)} {title}:")
        for file in others:
            write(f"  {file} ({len(functions[file])}){': ' + reason if (reason := reason_beside(file)) else ''}")


if __name__ == "__main__":
    main()
