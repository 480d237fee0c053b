"""A soak of random faults: whole runs whose processes and nodes are killed and stopped, whose disk is slow or full, whose link
between two nodes is lossy, narrow or cut, whose judge talks nonsense.

Each run must get to its end by itself (after a full disk, by --resume), with nothing lost and nothing trained twice, and, where
it is synchronous, with the weights of the run that nobody disturbed, bit for bit. (Where a reward or an environment hangs, the
sample that it hangs over fails, and the run learns from others: there the journal alone is asked.)
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
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from chaos_disk import Disk, own_disk
from chaos_faults import DISK, FULL, HANG, JUDGE, KILL, LINK, LONG_STOP, NODE, SLOW, STOP, Judge, below, strike, workers_of
from chaos_nodes import HEAD, NO_OTHER_FAULTS, TROUBLES, TwoNodes, two_nodes, why_not
from chaos_use import UseLog, use_over_time
from report import arguments, report

from reroll.errors import RunFolderError
from reroll.observe.files import append_jsonl, read_jsonl
from reroll.observe.run_folder import RunFolder
from reroll_zoo.audit.run_audit import audit_run
from reroll_zoo.tiny_models import make_tiny

STEPS_PER_FAULT = 3
"""How long a run is."""
STEPS_PER_LINK_FAULT = 12
"""Longer where most faults do not keep it from going on."""
WATCHDOG_S = {"processes": 6.0, "ray": 30.0}
"""Ray's actors are watched from the start of their worker on, which loads torch: on busy cores that takes seconds."""
ENV_TIMEOUT_S = 20.0
"""Longer than anything but a hang takes."""
DEADLINE_S = 600.0
"""For a run to get further after a fault, and to end: long, since a restart on busy cores takes minutes."""
MARK = "REROLL_CHAOS"
"""In the environment of all that a run starts."""
REWARD = "def digits(prompt, trajectory):\n    return sum(map(str.isdigit, trajectory.text)) / 6\n"
SPARE_AT_ONCE = "from reroll_zoo import supervisor; supervisor.SPARE_AFTER_S = 0; from reroll.cli import main; main()"
"""These runs are short, and a spare is one of those that are struck."""
NOTICED = re.compile(r"goes on by itself|is gone|hangs|started anew|No space left")


@dataclass(frozen=True)
class Scenario:
    """A kind of run, and what can be done to it."""

    runtime: str
    max_staleness: int = 0
    num_ranks: int = 1
    on_other_node: str = ""
    """`engines` or `environments`: who sits on a second node, alone."""

    @property
    def name(self) -> str:
        ranks = f", {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        nodes = f", {self.on_other_node} on a second node" if self.on_other_node else ""
        return f"{self.runtime}, {'asynchronous' if self.max_staleness else 'synchronous'}{ranks}{nodes}"

    @property
    def num_engines(self) -> int:
        return 1 if self.runtime == "local" else 3 if self.on_other_node == "engines" else 2

    @property
    def faults(self) -> list[tuple[str, str]]:
        """(kind, role), some likelier than others."""
        if self.on_other_node:
            links = [(LINK, how) for how in TROUBLES]
            return [*links, *links, (NODE, ""), (NODE, ""), (KILL, "actor"), (STOP, "actor"), (KILL, "controller")]
        models = {"local": [], "processes": ["policy", "engine"], "ray": ["actor"]}[self.runtime]
        found = [(kind, role) for kind in (KILL, STOP) for role in ("controller", "env", self._reward, *models, *models)]
        found += [(LONG_STOP, role) for role in ("controller", *models)]
        found += [(HANG, role) for role in ("env", self._reward, *models)]
        return [*found, (KILL, "spare"), (HANG, "spare"), (JUDGE, ""), (DISK, FULL), (DISK, SLOW)]

    @property
    def _reward(self) -> str:
        return "code" if self.runtime == "ray" else "reward"

    def changes_samples(self, kind: str, role: str) -> bool:
        """A reward or an environment that hangs over a sample: the sample is to blame, and fails."""
        return kind == HANG and role in ("env", self._reward)


SCENARIOS = {
    "local": Scenario("local"),
    "local-async": Scenario("local", max_staleness=2),
    "processes": Scenario("processes"),
    "processes-async": Scenario("processes", max_staleness=2),
    "ranks": Scenario("processes", num_ranks=2),
    "ray": Scenario("ray"),
    "ray-async": Scenario("ray", max_staleness=2),
    "nodes-engines": Scenario("ray", on_other_node="engines"),
    "nodes-envs": Scenario("ray", on_other_node="environments"),
    "nodes-async": Scenario("ray", max_staleness=2, on_other_node="engines"),
}

CPUS = {"engines": (6, 5), "environments": (4, 4)}
"""Of the head and of the second node. Ray gives a role to the node with the most CPUs left, and to the head where they are
equal: first a reward worker, then environments (one, or three), then engines (three, or two), then the policy."""


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
    uses: list[list[tuple[float, int, float, int]]] = field(default_factory=list)
    """Of each controller: seconds since its first finished step, finished steps, memory in MB, open handles."""
    left_behind: list[str] = field(default_factory=list)


def tree_of(
    scenario: Scenario, folder: Path, *, model: Path, judge: str, num_steps: int, address: str | None = None
) -> dict[str, Any]:
    """A config with a plain reward, a judge and an environment, all on one tiny model."""
    (folder / "chaos_reward.py").write_text(REWARD)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {digit}", "answer": str(digit)}) + "\n" for digit in range(10)))
    source = {"kind": "jsonl", "path": str(rows)}
    runtime: dict[str, Any] = {"kind": scenario.runtime}
    if scenario.runtime in WATCHDOG_S and not scenario.on_other_node:  # A link that is cut for a while is no hang.
        runtime["watchdog_s"] = WATCHDOG_S[scenario.runtime]
    if scenario.runtime == "ray":
        runtime |= {"address": address} if address else {"num_cpus": 8}
    ranks = {"strategy": {"kind": "fsdp2", "num_ranks": scenario.num_ranks}} if scenario.num_ranks > 1 else {}
    return {
        "pipeline": "rlvr",
        "run": {"name": "run", "runs_dir": str(folder / "runs"), "steps": num_steps, "seed": 1},
        "runtime": runtime,
        "policy": {"model": str(model), "devices": "cpu", "optim": {"lr": 1e-3}, **ranks},
        "engine": {"devices": "cpu", "num_workers": scenario.num_engines},
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
        "env_workers": {
            "kind": "ray" if scenario.on_other_node else "processes",
            "num_workers": 3 if scenario.on_other_node == "environments" else 1,
            "timeout_s": ENV_TIMEOUT_S,
        },
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

    def __init__(self, tree: dict[str, Any], folder: Path, nodes: TwoNodes | None = None) -> None:
        self.path = folder / "runs" / "run"
        self._nodes = nodes
        self._folder = folder
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        (folder / "run.yaml").write_text(yaml.safe_dump(tree))
        self.lines: list[tuple[float, str]] = []
        self.start()

    def start(self, *words: str) -> None:
        command = [sys.executable, "-c", SPARE_AT_ONCE, "train", "run.yaml", *words]
        environment = {**os.environ, **NO_OTHER_FAULTS, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: self._mark}
        if self._nodes:
            command, environment = self._nodes.command(*command), {**environment, **self._nodes.environment}
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

    def workers(self, role: str) -> list[int]:
        """Their processes. With two nodes, the actors of the second."""
        if self._nodes and role == "actor":
            return self._nodes.actors()
        return workers_of(self.process.pid).get(role, [])

    def left_behind(self) -> list[str]:
        """What it has started and not ended, a while after its end. It is ended now."""
        deadline_s, found = time.monotonic() + 20, [0]
        while found and time.monotonic() < deadline_s:
            time.sleep(0.2)
            found = [pid for pid in _all_pids() if f"{MARK}={self._mark}" in _environment(pid)]
            found += self._nodes.all_actors() if self._nodes else []
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
    num_steps = (STEPS_PER_LINK_FAULT if scenario.on_other_node else STEPS_PER_FAULT) * num_faults + 2
    verdict = Verdict(scenario.name, seed, num_steps)
    options: dict[str, Any] = {
        "model": make_tiny(folder / "model", hidden=32, layers=2, heads=4, kv_heads=2, seed=3),
        "num_steps": num_steps,
    }
    with ExitStack() as stack:
        disk = stack.enter_context(own_disk(folder / "disturbed"))
        nodes = stack.enter_context(two_nodes(*CPUS[scenario.on_other_node])) if scenario.on_other_node else None
        judge = nodes.at_head(lambda: Judge(HEAD)) if nodes else Judge()
        stack.callback(judge.close)
        tree = tree_of(scenario, disk.path, judge=judge.url, address=nodes.address if nodes else None, **options)
        run = Run(tree, disk.path, nodes)
        started_s = time.monotonic()
        try:
            faults = [fault for fault in only or scenario.faults if _can_be(fault, disk)]
            chosen = rng.choices(faults, k=num_faults) if only is None else faults
            Harness(run, judge, disk, nodes, verdict, rng).disturb(chosen)
        finally:
            run.end()
        verdict.seconds = time.monotonic() - started_s
        verdict.left_behind = run.left_behind()
        look_at(run, verdict)
        is_other = any(scenario.changes_samples(fault.kind, fault.role) for fault in verdict.faults)
        if not verdict.problems and scenario.max_staleness == 0 and not is_other:
            _compare_with_calm(run, scenario, verdict, folder / "calm", options)
        if verdict.problems:
            shutil.copytree(disk.path, folder / "failed")
            (folder / "failed" / "output.txt").write_text("\n".join(line for _, line in run.lines))
    return verdict


def _can_be(fault: tuple[str, str], disk: Disk) -> bool:
    return fault[0] != DISK or (disk.can_be_slow if fault[1] == SLOW else disk.has_own)


def _compare_with_calm(run: Run, scenario: Scenario, verdict: Verdict, folder: Path, options: dict[str, Any]) -> None:
    folder.mkdir()
    judge = Judge()
    try:
        calm = Run(tree_of(_calm(scenario), folder, judge=judge.url, **options), folder)
        compare(run, calm, verdict)
    finally:
        judge.close()


def _calm(scenario: Scenario) -> Scenario:
    """Ranks divide sums; all else gives the same bits in threads of one process, which start sooner."""
    return scenario if scenario.num_ranks > 1 else Scenario("local")


class Harness:
    """Does one thing after the other to a run, each when it has got over the one before."""

    def __init__(
        self, run: Run, judge: Judge, disk: Disk, nodes: TwoNodes | None, verdict: Verdict, rng: random.Random
    ) -> None:
        self._run, self._judge, self._disk, self._nodes = run, judge, disk, nodes
        self._verdict, self._rng = verdict, rng

    def disturb(self, faults: list[tuple[str, str]]) -> None:
        """Strike again and again, then wait for the run's end."""
        self._until_further_than(0)
        if self._nodes and not self._nodes.actors():
            self._problem("nobody sits on the second node")
        with UseLog(lambda: self._run.workers("controller"), lambda: self._run.step) as log:
            for kind, role in faults:
                if self._run.is_over or not self._get_over(Struck(kind, role, self._run.step)):
                    break
            try:
                if code := self._run.wait():
                    self._problem(f"ended with {code}: {self._last_words()}")
            except subprocess.TimeoutExpired:
                self._problem("did not end")
        self._verdict.uses = log.lives

    def _get_over(self, struck: Struck) -> bool:
        """Strike, and wait until the run is further than before. Whether it got there."""
        time.sleep(self._rng.uniform(0.0, 0.4))
        since_s = time.monotonic()
        if not self.strike(struck):
            return True
        struck.at_step = self._run.step  # What was on its way when it was struck does not count.
        self._verdict.faults.append(struck)
        if not self._until_further_than(struck.at_step):
            return False
        struck.heal_s = time.monotonic() - since_s
        struck.notice_s = next(
            (at_s - since_s for at_s, line in self._run.lines if at_s > since_s and NOTICED.search(line)), None
        )
        return True

    def strike(self, struck: Struck) -> bool:
        """Do it. Returns whether there was anything to strike."""
        if struck.kind == JUDGE:
            struck.role = self._judge.misbehave(self._rng)
        elif struck.kind == DISK and struck.role == FULL:
            self._fill_the_disk()
        elif struck.kind == DISK:
            struck.role = self._disk.be_slow(self._rng)
        elif struck.kind == LINK and self._nodes:
            self._nodes.trouble(self._rng, struck.role)
        elif struck.kind == NODE and self._nodes:
            self._nodes.kill_other()
            self._nodes.start_other()
        else:
            return self._strike_a_process(struck.kind, struck.role)
        return True

    def _strike_a_process(self, kind: str, role: str) -> bool:
        pids = self._run.workers(role)
        if pids:
            with suppress(ProcessLookupError):
                strike(self._rng.choice(sorted(pids)), kind, self._rng)
        return bool(pids)

    def _fill_the_disk(self) -> None:
        """The run must end and say why; when there is room it goes on where a person asks for it."""
        filler = self._disk.fill()
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


def look_at(run: Run, verdict: Verdict) -> None:
    """What the run's folder proves."""
    try:
        found = audit_run(RunFolder(run.path))
    except RunFolderError as error:  # It never got so far as to sample.
        verdict.problems.append(str(error))
        return
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
    folders = [path / f"checkpoints/step-{verdict.num_steps:06d}" for path in (run.path, calm.path)]
    # Ranks write a model together, each a file of its own.
    ours, theirs = ({path.name: path.read_bytes() for path in folder.glob("model*.safetensors")} for folder in folders)
    if not ours or ours != theirs:
        verdict.problems.append("other weights than those of the undisturbed run")


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
            **use_over_time([life for verdict in own for life in verdict.uses]),
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
    parser.add_argument("--name", default="chaos", help="of the files that --save writes")
    options = parser.parse_args()
    kinds = options.kinds
    if any(SCENARIOS[kind].on_other_node for kind in kinds) and (reason := why_not()):
        print(f"without a second node: {reason}")
        kinds = [kind for kind in kinds if not SCENARIOS[kind].on_other_node]
    verdicts = read_verdicts(options.verdicts)
    num_earlier = len(verdicts)
    while sum(len(verdict.faults) for verdict in verdicts[num_earlier:]) < options.faults:
        number = len(verdicts) - num_earlier
        scenario = SCENARIOS[kinds[number % len(kinds)]]
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
    report(f"{options.name}_faults", list(by_fault(verdicts)), title="time to notice and to get further", save=options.save)
    problems = [f"{verdict.scenario}, seed {verdict.seed}: {found}" for verdict in verdicts for found in verdict.problems]
    facts = {"problems": problems, "steps_per_fault": STEPS_PER_FAULT, "watchdog_s": WATCHDOG_S, "deadline_s": DEADLINE_S}
    report(options.name, list(by_scenario(verdicts)), title="random faults", save=options.save, facts=facts)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
