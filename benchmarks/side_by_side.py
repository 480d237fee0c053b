"""Runs contestants one after the other, round by round, each in a process and virtual environment of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MODEL = "smollm2-135m-instruct"
SETTLE_S = 10.0
"""Between two contestants: a peer may leave processes that take a while to end."""


@dataclass(frozen=True)
class Contestant:
    name: str
    python: Path
    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    """Variables that it sees beside ours."""


def own_python() -> Path:
    return Path(sys.executable)


def peer_python(peer: str, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is made on first use."""
    print(f"preparing the environment of {peer} in {folder}", flush=True)
    subprocess.run([str(HERE / "peers" / "setup.sh"), peer, str(folder)], check=True)
    return folder / "bin" / "python"


def model_folder() -> str:
    from reroll_zoo.fetch.fetch import fetch

    return str(fetch(MODEL))


def compete(contestants: list[Contestant], *, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds and tokens a second of each. Rounds interleave, so a slow minute of the machine hits all alike."""
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    tokens: dict[str, int] = {}
    for number in range(rounds):
        for contestant in contestants:
            result = run_once(contestant)
            seconds[contestant.name].append(result["seconds"])
            tokens[contestant.name] = int(result["tokens"])
            print(f"round {number + 1}: {contestant.name} {result['seconds']:.2f} s", flush=True)
    return {
        name: {
            "seconds": statistics.median(times),
            "tokens_per_s": tokens[name] / statistics.median(times),
            "fastest_s": min(times),
            "slowest_s": max(times),
        }
        for name, times in seconds.items()
    }


def run_once(contestant: Contestant, *, settle_s: float = SETTLE_S, shows: bool = False) -> dict[str, float]:
    """What the contestant printed after RESULT. It starts when what the last one left behind has settled. If it `shows`, its
    other lines are printed as they come, each with the seconds since it began."""
    time.sleep(settle_s)
    began_s = time.time()
    env = os.environ | dict(contestant.env) | {"REROLL_BEGAN_S": str(began_s)}
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        command = [str(contestant.python), *contestant.command]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
                process.wait()
                return result
            lines.append(line)
            if shows:
                print(f"{time.time() - began_s:7.1f} s {contestant.name}: {line}", end="", flush=True)
        process.wait()
        errors.seek(0)
        raise SystemExit(f"{contestant.name} failed:\n{''.join(lines)[-2000:]}\n{errors.read()[-4000:]}")
