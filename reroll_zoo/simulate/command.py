"""`reroll simulate`: what a config would do, told in seconds by the scheduler that would run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from reroll.errors import ConfigError, Violation

if TYPE_CHECKING:
    from reroll.config.tree import RlvrConfig
    from reroll_zoo.plan.cluster import ClusterConfig
    from reroll_zoo.simulate.compare import Case, Compared
    from reroll_zoo.simulate.recorded import RecordedRun
    from reroll_zoo.simulate.run import System
    from reroll_zoo.simulate.workload import Workload


KNOWN_OF_A_RUN = ("rollout.", "train.stream", "engine.num_workers", "engine.max_running")
"""Keys whose effect can be told from a run with another value."""
EXIT_INTERRUPTED = 130


def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML config.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps to simulate.")] = 24,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="A run's folder: lengths, latencies, failures and times as they were."),
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V1,V2", help="Compare these values; several --vary are combined.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Find the settings with the least cost per trained sample.")] = False,
    lengths: Annotated[
        str | None, typer.Option(help="Of completions: 256, uniform:64,512, lognormal:MEAN,SIGMA, pareto:LEAST,ALPHA.")
    ] = None,
    turns: Annotated[str | None, typer.Option(help="Of an episode, likewise.")] = None,
    env_s: Annotated[str | None, typer.Option("--env-s", help="Seconds of an environment's step, likewise.")] = None,
    score_s: Annotated[str | None, typer.Option("--score-s", help="Seconds of a reward, likewise.")] = None,
    lose: Annotated[
        str | None, typer.Option(metavar="SECOND[:NODE]", help="Lose the engines of a node (default: the last) at this time.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="h100, h200, a100, l40s, rtx4090 or cpu; default: the config's.")] = None,
    num: Annotated[int | None, typer.Option(min=1, help="Devices of one node.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes.")] = None,
    machines: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="As `reroll plan --calibrate … --save FILE` wrote it.")
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as one HTML page.")] = None,
) -> None:
    """Run the real scheduler on a virtual clock: step time and what bounds it, idle time, staleness, waste.

    Engines, trainer, environments and rewards are modelled; their times come from the planner (`reroll plan`), from the
    options below, or from a run that was made (--from). No model is loaded and no device is touched.
    """
    from reroll_zoo.simulate.compare import SEARCHED, cheapest, combinations, run_case
    from reroll_zoo.simulate.report import print_outcomes, write_page

    console = Console(highlight=False)
    asked = {"device": device, "num": num, "nodes": nodes}
    given = [*(overrides or ()), *(f"cluster.{key}={value}" for key, value in asked.items() if value is not None)]
    if machines is not None:
        from reroll_zoo.plan.calibrate import as_override

        given = [as_override(machines), *given]
    varied = _parse_varied(vary or ())
    if search and not varied:
        varied = {key: list(values) for key, values in SEARCHED.items()}
    if page is not None and not page.resolve().parent.is_dir():
        raise ConfigError([Violation("--page", f"{page.parent} is no folder", "give a file in a folder that exists")])
    maker = _Cases(file, given, source, {"lengths": lengths, "turns": turns, "env_s": env_s, "score_s": score_s}, lose)
    outcomes: list[Compared] = []

    def run_all(choices: Sequence[list[str]]) -> None:
        cases = [maker.case(changes) for changes in choices]
        for number, case in enumerate(cases, start=1):
            with console.status(f"simulating {number} of {len(cases)}: {escape(case.label)}"):
                outcomes.append(run_case(case, num_steps=steps))

    is_interrupted = False
    try:
        if search and (maps := maker.open_maps()):  # First where, then how: together they would be hundreds.
            run_all(maps)
            maker.fix(maps[outcomes.index(cheapest(outcomes))])
        run_all(list(combinations(varied)))
    except KeyboardInterrupt:
        is_interrupted = True
        console.print(f"[yellow]interrupted[/] after {len(outcomes)} settings")
        if not outcomes:
            raise typer.Exit(EXIT_INTERRUPTED) from None
    for note in maker.notes:
        console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    print_outcomes(console, outcomes, title=f"{file}: {steps} simulated steps")
    if search:
        console.print(f"[green]cheapest[/] {escape(cheapest(outcomes).label)}", soft_wrap=True)
    if page is not None:
        write_page(page, outcomes, title=f"{file.name}: {steps} simulated steps", notes=maker.notes)
        console.print(f"[green]wrote[/] {page}", soft_wrap=True)
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _parse_varied(texts: Sequence[str]) -> dict[str, list[str]]:
    varied: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        if not key or not values or key in varied:
            problem = f"{key} is varied twice" if key in varied else f"{text!r} names no values"
            fix = "write each key once, with its values, e.g. --vary rollout.max_staleness=0,1,2,4"
            raise ConfigError([Violation("--vary", problem, fix)])
        varied[key] = values.split(",")
    return varied


_LIMITS: dict[str, dict[str, float]] = {"lengths": {"reaches": 1}, "turns": {"reaches": 1, "limit": 1000}}


class _Cases:
    """Makes settings of a run out of overrides."""

    def __init__(
        self, file: Path, given: list[str], source: Path | None, drawn: dict[str, str | None], lose: str | None
    ) -> None:
        self._file, self._given, self._drawn, self._lose = file, given, drawn, lose
        self.notes: list[str] = []
        self._label: list[str] = []
        self._recorded = self._calibrate(source) if source is not None else None

    def open_maps(self) -> list[list[str]]:
        """As overrides, the planner's fastest maps, if the config leaves its devices open."""
        from reroll_zoo.plan.command import chosen
        from reroll_zoo.plan.search import is_open, ranked_plans
        from reroll_zoo.simulate.maps import MAX_MAPS

        config = self._config([])
        if self._recorded is not None or not is_open(config):
            return []
        return [chosen(plan) for plan in ranked_plans(config, _cluster(config))[:MAX_MAPS]]

    def fix(self, changes: list[str]) -> None:
        """All settings that are made from now on have these."""
        self._given, self._label = [*self._given, *changes], [*self._label, *changes]

    def _calibrate(self, source: Path) -> RecordedRun:
        from reroll_zoo.simulate.compare import calibrated
        from reroll_zoo.simulate.recorded import read_run

        run = read_run(source)
        system, factor = calibrated(run)
        self.notes.append(
            f"{source} took {run.step_s:.3g} s a step; its parts are timed {factor:.2f} times as it measured them"
        )
        return replace(run, system=system)

    def case(self, changes: list[str]) -> Case:
        from reroll_zoo.simulate.compare import Case
        from reroll_zoo.simulate.planned import default_workload, planned_system

        config = self._config(changes)
        if self._recorded is not None:
            workload, system = self._recorded.asked(config)
            cluster = None
            self._check_known(changes)
        else:
            cluster = _cluster(config)
            workload = default_workload(config, cluster, lengths=self._drawn["lengths"])
            system, plan = planned_system(config, cluster, workload)
            if not plan.fits:
                self.notes.append(f"{' '.join(changes) or 'this config'} does not fit into memory: see `reroll plan`")
        workload = self._with_drawn(workload)
        if config.envs and self._recorded is None and self._drawn["turns"] is None:
            self.notes.append("episodes are taken to have one turn and a quick environment: say --turns and --env-s")
        return Case(
            " ".join([*self._label, *changes]) or "as configured", config.rollout, workload, self._with_loss(system, cluster)
        )

    def _check_known(self, changes: list[str]) -> None:
        """A run's own times say nothing of what it did not try."""
        unknown = [key for key, _, _ in (change.partition("=") for change in changes) if not key.startswith(KNOWN_OF_A_RUN)]
        if unknown:
            fix = f"vary what begins with {', '.join(KNOWN_OF_A_RUN)}; leave out --from to ask the planner"
            raise ConfigError([Violation("--vary", f"{unknown[0]}: the run's times do not tell what it changes", fix)])

    def _config(self, changes: list[str]) -> RlvrConfig:
        from reroll.config.load import load_config
        from reroll.config.tree import RlvrConfig

        config = load_config(self._file, [*self._given, *changes], runs_here=False)
        if not isinstance(config, RlvrConfig):
            raise ConfigError([Violation("pipeline", "has no rollout to simulate", "give a config with pipeline: rlvr")])
        return config

    def _with_drawn(self, workload: Workload) -> Workload:
        from reroll_zoo.simulate.workload import parse_drawn

        changes: dict[str, Any] = {
            name: parse_drawn(text, salt=salt, name=f"--{name.replace('_', '-')}", **_LIMITS.get(name, {}))
            for salt, (name, text) in enumerate(self._drawn.items(), start=1)
            if text is not None
        }
        return replace(workload, **changes)

    def _with_loss(self, system: System, cluster: ClusterConfig | None) -> System:
        if self._lose is None:
            return system
        at_s, _, node = self._lose.partition(":")
        nodes = [cluster.node_of(seat[0]) if cluster is not None else 0 for seat in system.engine_seats]
        try:
            lost, seconds = int(node) if node else max(nodes), float(at_s)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(seconds)
        except ValueError:
            problem = f"{self._lose!r} is no time"
            raise ConfigError([Violation("--lose", problem, "write e.g. --lose 120 or --lose 120:3")]) from None
        ranks = tuple(rank for rank, place in enumerate(nodes) if place == lost)
        if not ranks or len(ranks) == len(nodes):
            problem = f"node {lost} holds {len(ranks)} of {len(nodes)} engines"
            raise ConfigError([Violation("--lose", problem, "name a node that holds some of the engines, not all")])
        return replace(system, losses=((seconds, ranks),))


def _cluster(config: RlvrConfig) -> ClusterConfig:
    from reroll_zoo.plan.plan import cluster_here

    cluster = cluster_here(config)
    if cluster is None:
        problem = "is not given, and the devices of this config cannot be told from here"
        raise ConfigError([Violation("cluster.device", problem, "say what to simulate, e.g. --device h100 --num 8")])
    return cluster
