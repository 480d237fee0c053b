"""The command line. Each command imports what it needs, so `reroll --help` loads neither torch nor ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from reroll import __version__
from reroll.cli.plug_ins import add_plug_ins
from reroll.config.load import dump_config, load_config
from reroll.config.registry import load_entry
from reroll.errors import ConfigError, RerollError
from reroll.pipeline.controls import Companion
from reroll.pipeline.restarts import Restarts

app = typer.Typer(
    help="RL post-training of language models, from one laptop CPU to a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
add_plug_ins(app)

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML config.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. rollout.group_size=8")]


def main() -> None:
    """Run the command line; errors we raise on purpose end as one clear message, not a traceback."""
    console = Console(stderr=True)
    try:
        app()
    except ConfigError as error:
        _print_violations(console, error)
        raise SystemExit(EXIT_BAD_INPUT) from None
    except RerollError as error:
        console.print(f"[bold red]{type(error).__name__}[/]")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        console.print("[yellow]quit at once[/]: the last checkpoint stands, --resume goes on from it")
        raise SystemExit(EXIT_INTERRUPTED) from None


@app.command()
def train(
    file: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew over an existing run of this name.")] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Serve the run's page beside it, with buttons to pause and save.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0 takes a free one.")] = 7860,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0, help="How often to go on after lost processes or machines; default: run.restarts.", show_default=False
        ),
    ] = None,
) -> None:
    """Train as FILE says, into runs/NAME/. What is lost with a process or a machine is started anew, and the run goes on."""
    counted = Restarts()
    companion: Companion | None = load_entry("reroll.companions", "page")(port=port) if page else None
    if restarts != 0 and (supervise := load_entry("reroll.supervisors", "controller")):
        supervise(counted)
    again = counted.num > 0
    wanted = [] if restarts is None else [f"run.restarts={restarts}"]
    config = load_config(file, [*(overrides or ()), *wanted])
    from reroll.pipeline.run import train as run_training

    outcome = run_training(
        config,
        resume=resume or again,
        overwrite=overwrite and not again,
        code_folder=file.parent,
        restarts=counted,
        companion=companion,
    )
    console = Console(highlight=False, soft_wrap=True)
    if outcome.interrupted:
        console.print(f"[yellow]stopped[/] after {outcome.num_steps} steps, saved in {outcome.checkpoint}: go on with --resume")
        raise typer.Exit(EXIT_INTERRUPTED)
    console.print(f"[green]finished[/] {outcome.num_steps} steps in {outcome.seconds:.0f} s: see {outcome.folder}/curve.png")
    console.print(f"checkpoint: {outcome.checkpoint}")


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A YAML config.", show_default=False)] = None,
    overrides: Overrides = None,
    expand: Annotated[bool, typer.Option("--expand", help="Print the whole config, presets and defaults written out.")] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Explain a field, no FILE needed: rollout.take_window, loss.kind=ppo"),
    ] = None,
) -> None:
    """Find what would stop FILE before its first step, without loading a model: exit code 2 with every problem and its fix.

    The config, the rows of its data, its own functions and classes, whether models, environments and rewards can be opened,
    models of the hub (a note where that cannot be reached), and whether GPUs are large enough.
    """
    if explain is not None:
        load_entry("reroll.reference", "explain")(explain)
        return
    if file is None:
        raise typer.BadParameter("give a FILE, or --explain PATH")
    config = load_config(file, overrides or ())
    from reroll.pipeline.preflight import preflight

    for note in preflight(config, code_folder=file.parent, only_checks=True).notes:
        Console(stderr=True, highlight=False).print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    if expand:
        typer.echo(dump_config(config), nl=False)
    else:
        Console().print(f"[green]ok[/] {file}: {config.summary}", highlight=False)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """RL post-training of language models, from one laptop CPU to a Ray cluster."""
    if show:
        typer.echo(f"reroll {__version__}")
        raise typer.Exit


def _print_violations(console: Console, error: ConfigError) -> None:
    count = len(error.violations)
    console.print(f"[bold red]{count} problem{'s' if count > 1 else ''} in the config[/]")
    for violation in error.violations:
        console.print(f"  [bold]{escape(violation.path)}[/] {escape(violation.problem)}", highlight=False)
        console.print(f"    [green]→[/] {escape(violation.fix)}", highlight=False)
