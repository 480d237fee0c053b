"""A soak of random faults: whole runs whose processes are killed and stopped, whose disk fills up, whose judge talks nonsense.

Each run must get to its end by itself (after a full disk, by --resume), with nothing lost and nothing trained twice, and, where
it is synchronous, with the weights of the run that nobody disturbed, bit for bit.
Run: python benchmarks/chaos.py --faults 200 [--kinds processes ray] [--seed 0] [--save]
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from chaos_faults import DISK, HANG, JUDGE, KILL, STOP, Judge, below, fill, strike, workers_of
from report import arguments, report

from reroll.models.tiny import make_tiny
from reroll.observe.files import append_jsonl, read_jsonl
from reroll_zoo.audit.audit import Audit, audit

STEPS_PER_FAULT = 3
"""How long a run is."""
WATCHDOG_S = 6.0
DEADLINE_S = 120.0
"""For a run to get further after a fault, and to end."""
MARK = "REROLL_CHAOS"
"""In the environment of all that a run starts."""
REWARD = "def digits(prompt, trajectory):\n    return sum(map(str.isdigit, trajectory.text)) / 6\n"
NOTICED = re.compile(r"goes on by itself|is gone|hangs|started anew|No space left")


@dataclass(frozen=True)
class Scenario:
    """A kind of run, and what can be done to it."""

    runtime: str
    max_staleness: int = 0
    num_ranks: int = 1

    @property
    def name(self) -> str:
        ranks = f", {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return f"{self.runtime}, {'asynchronous' if self.max_staleness else 'synchronous'}{ranks}"

    @property
    def faults(self) -> list[tuple[str, str]]:
        """(kind, role), some likelier than others."""
        models = {"local": [], "processes": ["policy", "engine"], "ray": ["actor"]}[self.runtime]
        found = [(kind, role) for kind in (KILL, STOP) for role in ("controller", "env", *models, *models)]
        if self.runtime != "ray":  # There they are actors like all others.
            found += [(KILL, "reward"), (STOP, "reward")]
        if self.runtime == "processes":  # Ray's are not known to be stopped.
            found += [(HANG, role) for role in models]
        return [*found, (JUDGE, ""), (DISK, "")]


SCENARIOS = {
    "local": Scenario("local"),
    "local-async": Scenario("local", max_staleness=2),
    "processes": Scenario("processes"),
    "processes-async": Scenario("processes", max_staleness=2),
    "ranks": Scenario("processes", num_ranks=2),
    "ray": Scenario("ray"),
    "ray-async": Scenario("ray", max_staleness=2),
}


@dataclass
class Struck:
    """A fault, and what came of it."""

    kind: str
    role: str
    at_step: int
    notice_s: float | None = None
    heal_s: float | None = None


@dataclass
class Verdict:
    """What became of one run."""

    scenario: str
    seed: int
    num_steps: int
    faults: list[Struck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    restarts: int = 0
    num_groups: int = 0
    num_groups_again: int = 0
    memory_mb: tuple[float, float] = (0.0, 0.0)
    """Of the controller after its first step, and at most."""
    handles: tuple[int, int] = (0, 0)
    left_behind: list[str] = field(default_factory=list)


def tree_of(scenario: Scenario, folder: Path, *, model: Path, judge: str, num_steps: int) -> dict[str, Any]:
    """A config with a plain reward, a judge and an environment, all on one tiny model."""
    (folder / "chaos_reward.py").write_text(REWARD)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {digit}", "answer": str(digit)}) + "\n" for digit in range(10)))
    source = {"kind": "jsonl", "path": str(rows)}
    runtime: dict[str, Any] = {"kind": scenario.runtime}
    if scenario.runtime == "processes":
        runtime["watchdog_s"] = WATCHDOG_S
    if scenario.runtime == "ray":
        runtime["num_cpus"] = 8
    ranks = {"strategy": {"kind": "fsdp2", "num_ranks": scenario.num_ranks}} if scenario.num_ranks > 1 else {}
    return {
        "pipeline": "rlvr",
        "run": {"name": "run", "runs_dir": str(folder / "runs"), "steps": num_steps, "seed": 1, "log_samples": 0},
        "runtime": runtime,
        "policy": {"model": str(model), "devices": "cpu", "optim": {"lr": 1e-3}, **ranks},
        "engine": {"devices": "cpu", "num_workers": 1 if scenario.runtime == "local" else 2},
        "data": {"train": [{"domain": "digits", **source}, {"domain": "judged", **source}, {"domain": "lake", "kind": "env"}]},
        "rewards": {
            "digits": {"kind": "import", "path": "chaos_reward:digits"},
            "judged": {
                "kind": "judge",
                "model": {"kind": "endpoint", "url": judge, "model": "chaos", "backoff_s": 0.2, "retries": 10},
            },
        },
        "reward_workers": {"num_processes": 1},
        "envs": {"lake": {"env": {"kind": "frozen_lake"}, "max_turns": 3}},
        "env_workers": {"kind": "processes", "num_workers": 1},
        "rollout": {
            "prompts_per_step": 3,
            "group_size": 2,
            "max_prompt_tokens": 400,
            "max_tokens": 6,
            "max_staleness": scenario.max_staleness,
        },
        "checkpoint": {"every": 4},
    }


class Run:
    """`reroll train` in a folder, watched."""

    def __init__(self, tree: dict[str, Any], folder: Path) -> None:
        self.path = folder / "runs" / "run"
        self._folder = folder
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        (folder / "run.yaml").write_text(yaml.safe_dump(tree))
        self.lines: list[tuple[float, str]] = []
        self.start()

    def start(self, *words: str) -> None:
        command = [sys.executable, "-m", "reroll", "train", "run.yaml", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: self._mark}
        self.process = subprocess.Popen(
            command, cwd=self._folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    @property
    def step(self) -> int:
        """The last that is finished."""
        try:
            lines = (self.path / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        for line in reversed(lines):
            with suppress(ValueError):  # In the midst of being written.
                row = json.loads(line)
                if "reward/mean" in row:
                    return int(row["step"])
        return 0

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def wait(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._reader.join()
        return code

    def controller_use(self) -> tuple[float, int] | None:
        """Memory in MB and open handles."""
        for pid in workers_of(self.process.pid).get("controller", ()):
            with suppress(OSError, StopIteration):
                status = Path(f"/proc/{pid}/status").read_text().splitlines()
                kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
                return kilobytes / 1e3, len(os.listdir(f"/proc/{pid}/fd"))
        return None

    def left_behind(self) -> list[str]:
        """What it has started and not ended, a while after its end. It is ended now."""
        deadline_s, found = time.monotonic() + 20, [0]
        while found and time.monotonic() < deadline_s:
            time.sleep(0.2)
            found = [pid for pid in _all_pids() if f"{MARK}={self._mark}" in _environment(pid)]
        names = [_command(pid) for pid in found]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return names

    def end(self) -> None:
        for pid in [*below(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def play(scenario: Scenario, seed: int, *, num_faults: int, folder: Path, only: list[tuple[str, str]] | None = None) -> Verdict:
    """Run it once in peace and once with so many faults, drawn from `only` or all, one after the other."""
    rng = random.Random(seed)
    num_steps = STEPS_PER_FAULT * num_faults + 2
    verdict, judge = Verdict(scenario.name, seed, num_steps), Judge()
    model = make_tiny(folder / "model", hidden=32, layers=2, heads=4, kv_heads=2, seed=3)
    options: dict[str, Any] = {"model": model, "judge": judge.url, "num_steps": num_steps}
    try:
        with small_disk(folder / "disturbed") as (place, has_disk):
            run = Run(tree_of(scenario, place, **options), place)
            started_s = time.monotonic()
            try:
                faults = [fault for fault in only or scenario.faults if has_disk or fault[0] != DISK]
                Harness(run, judge, verdict, rng).disturb(rng.choices(faults, k=num_faults) if only is None else faults)
            finally:
                run.end()
            verdict.seconds = time.monotonic() - started_s
            verdict.left_behind = run.left_behind()
            look_at(run, scenario, verdict)
            if scenario.max_staleness == 0 and not verdict.problems:
                calm = folder / "calm"
                calm.mkdir()
                compare(run, Run(tree_of(_calm(scenario), calm, **options), calm), verdict)
            if verdict.problems:
                shutil.copytree(place, folder / "failed")
                (folder / "failed" / "output.txt").write_text("\n".join(line for _, line in run.lines))
    finally:
        judge.close()
    return verdict


def _calm(scenario: Scenario) -> Scenario:
    """Ranks divide sums; all else gives the same bits in threads of one process, which start sooner."""
    return scenario if scenario.num_ranks > 1 else Scenario("local")


class Harness:
    """Does one thing after the other to a run, each when it has got over the one before."""

    def __init__(self, run: Run, judge: Judge, verdict: Verdict, rng: random.Random) -> None:
        self._run, self._judge, self._verdict, self._rng = run, judge, verdict, rng

    def disturb(self, faults: list[tuple[str, str]]) -> None:
        self._until_further_than(0)
        first = self._run.controller_use() or (0.0, 0)
        most = first
        for kind, role in faults:
            if self._run.is_over:
                break
            time.sleep(self._rng.uniform(0.0, 0.4))
            struck = Struck(kind, role, self._run.step)
            since_s = time.monotonic()
            if not self._strike(struck):
                continue
            struck.at_step = self._run.step  # What was on its way when it was struck does not count.
            self._verdict.faults.append(struck)
            if not self._until_further_than(struck.at_step):
                return
            struck.heal_s = time.monotonic() - since_s
            struck.notice_s = next(
                (at_s - since_s for at_s, line in self._run.lines if at_s > since_s and NOTICED.search(line)), None
            )
            used = self._run.controller_use() or most
            most = max(most[0], used[0]), max(most[1], used[1])
        try:
            if code := self._run.wait():
                self._problem(f"ended with {code}: {self._last_words()}")
        except subprocess.TimeoutExpired:
            self._problem("did not end")
        self._verdict.memory_mb, self._verdict.handles = (first[0], most[0]), (first[1], most[1])

    def _strike(self, struck: Struck) -> bool:
        """Whether there was anything to strike."""
        if struck.kind == JUDGE:
            struck.role = self._judge.misbehave(self._rng)
        elif struck.kind == DISK:
            self._fill_the_disk()
        else:
            pids = workers_of(self._run.process.pid).get(struck.role, [])
            if not pids:
                return False
            with suppress(ProcessLookupError):
                strike(self._rng.choice(sorted(pids)), struck.kind, self._rng)
        return True

    def _fill_the_disk(self) -> None:
        """The run must end and say why; when there is room it goes on where a person asks for it."""
        filler = fill(self._run.path.parents[1])
        try:
            code = self._run.wait()
        except subprocess.TimeoutExpired:
            self._problem("a full disk did not end it")
            return
        finally:
            filler.unlink(missing_ok=True)
        said = self._last_words()
        if code != 1 or "No space left on device (free some space" not in said:
            self._problem(f"a full disk ended it with {code} and: {said}")
        self._run.start("--resume")

    def _until_further_than(self, step: int) -> bool:
        deadline_s = time.monotonic() + DEADLINE_S
        while self._run.step <= step and not self._run.is_over:
            if time.monotonic() > deadline_s:
                self._problem(f"stuck after step {step}: {self._last_words()}")
                return False
            time.sleep(0.02)
        return True

    def _problem(self, what: str) -> None:
        self._verdict.problems.append(what)

    def _last_words(self) -> str:
        return " / ".join(line for _, line in self._run.lines[-5:])


def look_at(run: Run, scenario: Scenario, verdict: Verdict) -> None:
    """What the run's folder proves."""
    found: Audit = audit(run.path / "journal", max_staleness=scenario.max_staleness)
    verdict.problems += found.violations
    verdict.num_groups, verdict.num_groups_again = found.trained, found.undone
    if found.num_steps != verdict.num_steps:
        verdict.problems.append(f"{found.num_steps} of {verdict.num_steps} steps")
    with suppress(OSError):
        verdict.restarts = json.loads((run.path / "result.json").read_text()).get("restarts", 0)


def compare(run: Run, calm: Run, verdict: Verdict) -> None:
    """With the undisturbed run, bit for bit."""
    if code := calm.wait():
        verdict.problems.append(f"the undisturbed run ended with {code}: {calm.lines[-3:]}")
        return
    ours, theirs = (path / f"checkpoints/step-{verdict.num_steps:06d}/model.safetensors" for path in (run.path, calm.path))
    if not ours.exists() or ours.read_bytes() != theirs.read_bytes():
        verdict.problems.append("other weights than those of the undisturbed run")


@contextmanager
def small_disk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """A disk of its own, where this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    has_disk = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder, has_disk
    finally:
        if has_disk:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:80]
    except OSError:
        return ""


def by_scenario(verdicts: list[Verdict]) -> Iterator[dict[str, Any]]:
    for name in dict.fromkeys(verdict.scenario for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.scenario == name]
        yield {
            "runs": name,
            "number": len(own),
            "faults": sum(len(verdict.faults) for verdict in own),
            "restarts": sum(verdict.restarts for verdict in own),
            "problems": sum(len(verdict.problems) for verdict in own),
            "groups": sum(verdict.num_groups for verdict in own),
            "trained_again": sum(verdict.num_groups_again for verdict in own),
            "memory_grown_mb": max(verdict.memory_mb[1] - verdict.memory_mb[0] for verdict in own),
            "handles_grown": max(verdict.handles[1] - verdict.handles[0] for verdict in own),
            "left_behind": sum(len(verdict.left_behind) for verdict in own),
        }


def by_fault(verdicts: list[Verdict]) -> Iterator[dict[str, Any]]:
    faults = [fault for verdict in verdicts for fault in verdict.faults]
    for kind, role in sorted({(fault.kind, fault.role) for fault in faults}):
        own = [fault for fault in faults if (fault.kind, fault.role) == (kind, role)]
        noticed = [fault.notice_s for fault in own if fault.notice_s is not None]
        healed = [fault.heal_s for fault in own if fault.heal_s is not None]
        yield {
            "fault": f"{kind} {role}".strip(),
            "number": len(own),
            "healed": len(healed),
            "notice_s_median": round(statistics.median(noticed), 2) if noticed else None,
            "heal_s_median": round(statistics.median(healed), 2) if healed else None,
            "heal_s_max": round(max(healed), 2) if healed else None,
        }


def read_verdicts(file: Path | None) -> list[Verdict]:
    rows = read_jsonl(file) if file and file.exists() else []
    return [Verdict(**{**row, "faults": [Struck(**fault) for fault in row["faults"]]}) for row in rows]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--faults-per-run", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS])
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each that follows has one more")
    parser.add_argument(
        "--verdicts", type=Path, help="a file of what became of earlier runs: theirs count too, and ours are added"
    )
    options = parser.parse_args()
    verdicts = read_verdicts(options.verdicts)
    num_earlier = len(verdicts)
    while sum(len(verdict.faults) for verdict in verdicts[num_earlier:]) < options.faults:
        number = len(verdicts) - num_earlier
        scenario = SCENARIOS[options.kinds[number % len(options.kinds)]]
        folder = Path(tempfile.mkdtemp(prefix="reroll-chaos-"))
        verdict = play(scenario, options.seed + number, num_faults=options.faults_per_run, folder=folder)
        verdicts.append(verdict)
        if options.verdicts:
            append_jsonl(options.verdicts, asdict(verdict))
        told = ", ".join(f"{fault.kind} {fault.role}".strip() for fault in verdict.faults)
        print(f"{scenario.name}, seed {verdict.seed}: {told}: {verdict.problems or 'healed'}", flush=True)
        if verdict.problems:
            print(f"  see {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    report("chaos_faults", list(by_fault(verdicts)), title="time to notice and to get further", save=options.save)
    problems = [f"{verdict.scenario}, seed {verdict.seed}: {found}" for verdict in verdicts for found in verdict.problems]
    facts = {"problems": problems, "steps_per_fault": STEPS_PER_FAULT, "watchdog_s": WATCHDOG_S}
    report("chaos", list(by_scenario(verdicts)), title="random faults", save=options.save, facts=facts)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
