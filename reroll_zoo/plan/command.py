"""`reroll plan`: what a config would need and how long a step would take, on machines that need not be here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reroll.config.load import load_config
from reroll.config.pipeline import PipelineConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError, Violation
from reroll_zoo.external_engine.config import ExternalEngineConfig
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig

if TYPE_CHECKING:
    from reroll_zoo.plan.cluster import ClusterConfig
    from reroll_zoo.plan.plan import Plan

EXIT_DOES_NOT_FIT = 1
_GIB = 2**30


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML config.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="h100, h200, a100, l40s, rtx4090 or cpu; default: the config's cluster, else this machine."),
    ] = None,
    num: Annotated[int | None, typer.Option(min=1, help="Devices of one node.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the plan: .svg or .png.")] = None,
    machines: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="Of this file, as --save wrote it.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="SOURCE", help="Fit the cluster's efficiency to a run's folder, or to what gpu_parts.py saved."),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="With --calibrate: what is planned of this run, and what it took."),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="With --calibrate: write the cluster as YAML.")] = None,
) -> None:
    """Say which role goes on which devices, what memory each needs and how long a step takes (exit code 1: does not fit).

    Nothing is loaded and no device is touched; a model's config.json is enough. With `devices: auto` the fastest map that
    fits is chosen.
    """
    asked = {"device": device, "num": num, "nodes": nodes}
    extra = [f"cluster.{key}={value}" for key, value in asked.items() if value is not None]
    given = [*(overrides or ()), *extra]
    if machines is not None:
        from reroll_zoo.plan.calibrate import as_override

        given = [as_override(machines), *given]
    if calibrate is None and (against or save):
        problem = "only says something of a calibration"
        raise ConfigError([Violation("--save" if save else "--against", problem, "give --calibrate, too")])
    config = load_config(file, given, runs_here=False)
    cluster = _cluster(config)
    from reroll_zoo.plan.search import best_plan, device_violations, is_open

    console = Console(highlight=False)
    if calibrate is not None:
        cluster = _calibrated(console, config, cluster, calibrate, against or ())
        if save is not None:
            _save(console, save, cluster)
    if isinstance(config, RlvrConfig) and is_open(config):
        from reroll_zoo.simulate.maps import fastest_plan

        found = fastest_plan(config, cluster)
    else:
        found = best_plan(config, cluster)
    print_plan(console, found, was_open=found.config != config)
    if out is not None:
        from reroll_zoo.plan.draw import draw_plan

        draw_plan(found, out, title=f"{config.policy.model} on {_hardware(cluster)}")
        console.print(f"[green]drew[/] {out}", soft_wrap=True)
    violations = device_violations(found)
    for violation in violations:
        console.print(f"[bold red]does not fit[/] {escape(violation.problem)}", soft_wrap=True)
        console.print(f"  [green]→[/] {escape(violation.fix)}", soft_wrap=True)
    if violations:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _calibrated(
    console: Console, config: PipelineConfig, cluster: ClusterConfig, source: Path, against: Sequence[Path]
) -> ClusterConfig:
    """The cluster with what was measured on it. Shows the plan of each measurement beside it."""
    from reroll_zoo.plan.calibrate import fitted, planned_seconds, read_measured

    measured = [read_measured(one, config) for one in (source, *against)]
    efficiency = fitted(measured[0], cluster)
    changed = [key for key, value in efficiency if value != dict(cluster.efficiency)[key]]
    table = Table(title=f"planned beside measured, calibrated on {source}", title_justify="left")
    for column in ("run", "part", "measured", "planned", "off by"):
        table.add_column(column)
    for one in measured:
        own = efficiency.model_copy(update={"length": one.length})  # The same machine; its own samples.
        planned = planned_seconds(one.config, cluster.model_copy(update={"efficiency": own}))
        for part, seconds in one.seconds.items():
            off = f"{planned[part] / seconds - 1:+.1%}" if seconds > 0 else ""
            table.add_row(one.name, part, f"{seconds:.4g} s", f"{planned[part]:.4g} s", off)
    console.print(table)
    fitted_keys = " ".join(f"cluster.efficiency.{key}={dict(efficiency)[key]:.4g}" for key in changed)
    console.print(f"[green]fitted[/] {fitted_keys}", soft_wrap=True)
    return cluster.model_copy(update={"efficiency": efficiency})


def _save(console: Console, file: Path, cluster: ClusterConfig) -> None:
    from reroll_zoo.plan.calibrate import fragment

    try:
        file.write_text(fragment(cluster, cluster.efficiency))
    except OSError as error:
        problem = f"cannot write {file}: {error.strerror}"
        raise ConfigError([Violation("--save", problem, "give a file in a folder that exists")]) from error
    console.print(f"[green]wrote[/] {file}: for --cluster, or to paste into a config", soft_wrap=True)


def print_plan(console: Console, plan: Plan, *, was_open: bool) -> None:
    """Two tables: memory by role and term, seconds by phase."""
    console.print(_memory_table(plan))
    console.print(_time_table(plan))
    for note in plan.notes:
        console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    if was_open:
        console.print("[green]chosen[/] " + escape(" ".join(chosen(plan))), soft_wrap=True)


def chosen(plan: Plan) -> list[str]:
    """The map as overrides that fix it."""
    from reroll_zoo.plan.search import as_devices

    config = plan.config
    found = [f"policy.devices={as_devices(plan.roles[0].devices)}"]
    if isinstance(config.policy.strategy, Fsdp2StrategyConfig):
        found.append(f"policy.strategy.tp={config.policy.strategy.tp}")
    if isinstance(config.policy.strategy, TorchStrategyConfig) and config.policy.strategy.optimizer != "auto":
        found.append(f"policy.strategy.optimizer={config.policy.strategy.optimizer}")
    if isinstance(config, RlvrConfig):
        found += [f"engine.devices={config.engine.devices}", f"engine.num_workers={config.engine.num_workers}"]
        if isinstance(config.engine, ExternalEngineConfig):
            found.append(f"engine.tp={config.engine.tp}")
    return found


def _memory_table(plan: Plan) -> Table:
    from reroll_zoo.plan.draw import lanes_of
    from reroll_zoo.plan.search import as_devices

    title = f"memory of {_hardware(plan.cluster)}, {plan.cluster.efficiency.memory:.0%} of each planned with"
    table = Table(title=title, title_justify="left")
    for column in ("devices", "fullest in", "role", "memory by term, GiB"):
        table.add_column(column, overflow="fold")
    table.add_column("GiB", justify="right")
    table.add_column("fits")
    for lane in lanes_of(plan):
        roles = dict.fromkeys(term.role for term in lane.load.terms)
        for index, role in enumerate(roles):
            terms = [term for term in lane.load.terms if term.role == role]
            text = ", ".join(f"{term.name} {_gib(term.num_bytes)}" for term in terms)
            kind = f" ({plan.cluster.spec_of(lane.devices[0]).name})" if plan.cluster.is_mixed else ""
            first = (f"{as_devices(lane.devices)}{kind}", lane.load.phase) if index == 0 else ("", "")
            table.add_row(*first, role, text, _gib(sum(term.num_bytes for term in terms)), "")
        total = lane.load.num_bytes
        fits = "[bold red]no[/]" if lane.load in plan.overfull else "[green]yes[/]"
        table.add_row("", "", "[bold]all[/]", "", f"[bold]{_gib(total)}[/]", fits, end_section=True)
    return table


def _time_table(plan: Plan) -> Table:
    from reroll_zoo.plan.draw import in_seconds
    from reroll_zoo.plan.search import as_devices

    table = Table(title=f"one step: {in_seconds(plan.step_s)} predicted", title_justify="left")
    for column in ("phase", "role", "devices"):
        table.add_column(column, overflow="fold")
    for column in ("from", "to", "seconds"):
        table.add_column(column, justify="right")
    for bar in plan.bars:
        times = (in_seconds(bar.start_s), in_seconds(bar.end_s), in_seconds(bar.seconds))
        table.add_row(bar.phase, bar.role, str(as_devices(bar.devices)), *times)
    return table


def _cluster(config: PipelineConfig) -> ClusterConfig:
    from reroll_zoo.plan.plan import cluster_here

    cluster = cluster_here(config)
    if cluster is None:
        problem = "is not given, and the devices of this config cannot be told from here"
        raise ConfigError([Violation("cluster.device", problem, "say what to plan for, e.g. --device h100 --num 8")])
    return cluster


def _hardware(cluster: ClusterConfig) -> str:
    if cluster.has_only_cpus:
        return f"this machine's CPU ({cluster.spec.memory_gib:.0f} GiB)"
    kinds = Counter((machine.num, machine.spec) for machine in cluster.machines)
    nodes = [
        f"{f'{count} × ' if count > 1 else ''}{num} × {spec.name} ({spec.memory_gib:g} GiB)"
        for (num, spec), count in kinds.items()
    ]
    return " + ".join(nodes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}" if num_bytes < 10 * _GIB else f"{num_bytes / _GIB:.1f}"
