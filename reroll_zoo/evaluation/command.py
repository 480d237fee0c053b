"""`reroll eval`: a checkpoint or a model measured on held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reroll.config.load import load_config
from reroll.config.parts import EvalConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.tree import RlvrConfig

if TYPE_CHECKING:
    from reroll.pipeline.evaluate import EvalResult


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a run's folder or a model's name.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. eval.temperature=0.6")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-c", "--config", metavar="FILE", help="A YAML config; default: the checkpoint's run's."),
    ] = None,
    k: Annotated[
        int,
        typer.Option(
            "-k",
            min=1,
            help="Completions per prompt; pass@k and maj@k up to this k. More than one cannot be greedy: they are drawn at "
            "eval.temperature, or where that is 0 at rollout.temperature, so pass@1 is not that of a greedy evaluation.",
        ),
    ] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the numbers and every completion as JSON.")] = None,
) -> None:
    """Measure a checkpoint or a model on the held-out prompts (data.eval) of FILE: pass@k, avg@k and maj@k by domain.

    Of a run's folder, the newest checkpoint is taken. As the run's own evaluations, it is greedy unless the config or -k say
    otherwise.
    """
    from reroll_zoo.evaluation.newest import newest_model

    model = newest_model(model)
    load = load_config
    if file is None:
        file, load = _config_of(Path(model)), partial(load_config, is_of_run=True)
    config = _config(partial(load, file), [f"policy.model={model}", *(overrides or ())], k)
    from reroll.pipeline.run import evaluate as run_evaluation

    result = run_evaluation(config, code_folder=file.parent)
    print_evaluation(result, model)
    if out is not None:
        out.write_text(json.dumps(result.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(load: Callable[[Sequence[str]], PipelineConfig], overrides: Sequence[str], k: int) -> PipelineConfig:
    """The config with k samples a prompt, drawn at a temperature at which they differ."""
    config = load(overrides)
    if k == 1 or not isinstance(config, RlvrConfig):
        return config
    temperature = config.eval.temperature or config.rollout.temperature
    return load([*overrides, f"eval.samples={k}", f"eval.temperature={temperature}"])


def _config_of(checkpoint: Path) -> Path:
    """The config of the run that wrote a checkpoint: runs/NAME/checkpoints/step-… has its own at runs/NAME/config.yaml."""
    if checkpoint.suffix in (".yaml", ".yml"):
        raise typer.BadParameter(f"{checkpoint} is a config: give the model first, reroll eval MODEL -c {checkpoint}")
    file = checkpoint.absolute().parent.parent / "config.yaml"
    if not file.is_file():
        raise typer.BadParameter(f"{checkpoint} is no checkpoint of a run: say what to measure with -c FILE")
    return file


def print_evaluation(result: EvalResult, model: str) -> None:
    """A row per metric and a column per domain, each with its 95 % interval; means over all samples below."""
    domains = result.domains
    columns = {domain: result.estimates(domain) for domain in domains}
    if len(domains) > 1:
        columns |= {"all prompts": result.estimates(), "mean of domains": {"pass@1": result.average()}}
    table = Table(caption="\\[low, high]: 95 % confidence", caption_justify="left")
    table.add_column("metric")
    for name in columns:
        table.add_column(escape(name), justify="right")
    for metric in dict.fromkeys(metric for found in columns.values() for metric in found):
        cells = [found.get(metric) for found in columns.values()]
        table.add_row(metric, *(f"{one.value:.3f} \\[{one.low:.2f}, {one.high:.2f}]" if one else "" for one in cells))
    console = Console(highlight=False)
    console.print(f"[italic]{escape(model)}[/]: {escape(how_drawn(result))}", soft_wrap=True)
    console.print(table)
    means = {name.removeprefix("eval/"): value for name, value in result.means().items()}
    console.print(", ".join(f"{name} {value:.3f}" for name, value in means.items()))


def how_drawn(result: EvalResult) -> str:
    """How many samples of how many prompts, and whether each is the likeliest or drawn."""
    by_domain = {domain: _drawn(result.settings.of(domain)) for domain in result.domains}
    ways = list(dict.fromkeys(by_domain.values()))
    text = ways[0] if len(ways) == 1 else ", ".join(f"{domain} {way}" for domain, way in by_domain.items())
    return f"{len(result.prompts)} prompts, {text}"


def _drawn(settings: EvalConfig) -> str:
    if settings.temperature == 0:
        return "greedy"
    return f"{settings.samples} sample{'s' if settings.samples > 1 else ''} each at temperature {settings.temperature:g}"
