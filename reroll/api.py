"""The front door: runs that start from Python, with objects in the place of YAML. `reroll` exports all of it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from reroll.config.base import Node
from reroll.config.host import model_folder
from reroll.config.imports import ObjectPath
from reroll.config.load import config_class_of, load_config, parse_config
from reroll.config.parts import RunConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.registry import entry_names, load_entry
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError, RerollError, Violation

if TYPE_CHECKING:
    from reroll.pipeline.base import Outcome, Pipeline
    from reroll.pipeline.build import RlvrComponents
    from reroll.pipeline.evaluate import EvalResult

Section = Node | Mapping[str, Any]
"""A part of the config: the class of its fields, or a dict of them."""
Data = Iterable[Mapping[str, Any]] | str | Path | Section | Callable[..., Any]
"""Rows (dicts, a `datasets.Dataset`, a data frame), a file or a data set of the hub by name, or a source of the config."""


class ConfigSections(TypedDict, total=False):
    """The other sections of a config, which `docs/config.md` describes field by field."""

    run: Section
    runtime: Section
    cluster: Section | None
    policy: Section
    checkpoint: Section
    engine: Section
    rewards: Mapping[str, Any]
    reward_workers: Section
    envs: Mapping[str, Any]
    env_workers: Section
    agents: Mapping[str, Any]
    endpoint: Section
    rollout: Section
    shaping: Section
    aggregation: str
    masks: Section
    kl: Section
    reference: Section
    entropy_coef: float
    old_policy: str
    corrections: Sequence[Section]
    rejections: Sequence[Section]
    critic: Section | None
    value_loss: Section
    teachers: Mapping[str, Section]
    distill: Section | None
    distill_only: bool
    train: Section
    guard: Section
    weights: Section
    recorded: Section | None
    eval: Section
    # Of pipelines that learn from rows.
    rows_per_step: int
    eval_every: int


def helper(name: str) -> Callable[..., Any]:
    """What a package registered in the group `reroll.helpers`: `chat`, a conversation with a model, and `rows`, which makes a
    source of data that Python hands over."""
    found: Callable[..., Any] | None = load_entry("reroll.helpers", name)
    if found is None:
        raise RerollError(f"this needs {name} of reroll.helpers, which no package brings: install reroll_zoo")
    return found


@dataclass(repr=False)
class Run:
    """A run that has ended, and what can be asked of it."""

    config: PipelineConfig
    folder: Path
    """All it left behind: metrics, samples, checkpoints."""
    checkpoint: Path
    """Its last one: a Hugging Face folder."""
    num_steps: int
    seconds: float
    interrupted: bool
    evals: dict[int, dict[str, float]] = field(default_factory=dict)
    """Held-out metrics by number of finished steps."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What was logged, a row a step; `pandas.DataFrame(run.metrics)` makes it a table."""
        from reroll.observe.files import read_jsonl

        return read_jsonl(self.folder / "metrics.jsonl")

    def curve(self) -> Path:
        """The learning curve: shown in a notebook; the picture's path."""
        from reroll.observe.progress import in_notebook

        path = self.folder / "curve.png"
        if in_notebook():
            from IPython.display import Image, display

            display(Image(filename=str(path)))  # type: ignore[no-untyped-call]
        return path

    def generate(self, prompt: str, *, max_tokens: int | None = None, temperature: float = 0.0, seed: int = 0) -> str:
        """What the trained policy answers, in the chat format it was trained in; greedy unless a temperature is given."""
        from reroll.types import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens or self._max_tokens, temperature=temperature, seed=seed)
        answer: str = self._chat.answer(prompt, sampling=sampling)
        return answer

    @cached_property
    def _chat(self) -> Any:
        from reroll.types import SamplingParams

        systems = [source.system for source in self.config.data.train] if isinstance(self.config, RlvrConfig) else []
        system = systems[0] if len(set(systems)) == 1 else None
        return helper("chat")(str(self.checkpoint), sampling=SamplingParams(max_tokens=self._max_tokens), system=system)

    @property
    def _max_tokens(self) -> int:
        return self.config.rollout.max_tokens if isinstance(self.config, RlvrConfig) else 256

    def __repr__(self) -> str:
        how = "interrupted" if self.interrupted else "finished"
        return f"<Run {self.folder}: {how} after {self.num_steps} steps, {self.seconds:.0f} s>"


def train(
    config: PipelineConfig | str | Path | None = None,
    *,
    model: str | None = None,
    data: Data | None = None,
    reward: Any = None,
    env: Any = None,
    agent: Any = None,
    eval_data: Data | None = None,
    algorithm: str | None = None,
    loss: Any = None,
    advantage: Any = None,
    steps: int | None = None,
    lr: float | None = None,
    prompts_per_step: int | None = None,
    group_size: int | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    pipeline: str | type[Pipeline[Any]] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    **settings: Unpack[ConfigSections],
) -> Run:
    """Train, in a script or a notebook, until the last step or Ctrl-C (an interrupted kernel): both save the policy.

    Either a config (or the path of a YAML), or `model`, `data` and `reward` (or `env`, or `agent`); see `make_config`.
    `resume` goes on from the newest checkpoint of the run of this name, `overwrite` starts it anew.
    """
    given = {
        "model": model, "data": data, "reward": reward, "env": env, "agent": agent, "eval_data": eval_data,
        "algorithm": algorithm, "loss": loss, "advantage": advantage, "steps": steps, "lr": lr,
        "prompts_per_step": prompts_per_step, "group_size": group_size, "max_tokens": max_tokens, "seed": seed, "name": name,
    }  # fmt: skip
    code_folder = Path()
    if config is None:
        if resume and name is None and not _has(settings, "run", "name"):
            raise ConfigError([Violation("name", "is missing", "say which run goes on: name=…, a folder in runs/")])
        config = make_config(**given, pipeline=pipeline, **settings)
    else:
        _refuse_both({**given, **settings})
        config, code_folder = _loaded(config)
        config = _run_by(config, pipeline)
    from reroll.pipeline.run import train as run_training

    outcome = run_training(config, resume=resume, overwrite=overwrite, code_folder=code_folder)
    return _ended(config, outcome)


def evaluate(
    config: PipelineConfig | str | Path | None = None,
    *,
    model: str | None = None,
    data: Data | None = None,
    reward: Any = None,
    env: Any = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    **settings: Unpack[ConfigSections],
) -> EvalResult:
    """Play held-out prompts and have the answers judged: those of a config's `data.eval`, or `data`.

    One greedy answer a prompt, or `samples` of them, at temperature 1 unless another is given.
    """
    code_folder = Path()
    if config is None:
        samples = samples or 1
        drawn = {"samples": samples, "temperature": temperature if temperature is not None else float(samples > 1)}
        merged: Any = {**settings, "eval": {**_plain(settings.get("eval", {})), **drawn}}
        config = make_config(
            model=model, data=data, eval_data=data, reward=reward, env=env, max_tokens=max_tokens, seed=seed, **merged
        )
    else:
        drawing = {"samples": samples, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        _refuse_both({"model": model, "data": data, "reward": reward, "env": env, **drawing, **settings})
        config, code_folder = _loaded(config)
    from reroll.pipeline.run import evaluate as run_evaluation

    return run_evaluation(config, code_folder=code_folder)


@asynccontextmanager
async def build(config: PipelineConfig | str | Path, *, folder: Path | str | None = None) -> AsyncIterator[RlvrComponents]:
    """The components of an RL run, for a loop of your own: rollouts, policy, engine, weights, devices and the rest.

    What happens to the samples is written into `folder`, or nowhere that stays. `examples/own_loop.py` shows the loop.
    """
    config, code_folder = _loaded(config)
    if not isinstance(config, RlvrConfig):
        raise ConfigError([Violation("pipeline", f"is {config.pipeline}", "give an rlvr config")])
    from reroll.pipeline.build import build_rlvr
    from reroll.pipeline.preflight import preflight

    rows = preflight(config, code_folder=code_folder).rows
    with tempfile.TemporaryDirectory(prefix="reroll-") as scratch:
        place = Path(folder) if folder is not None else Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        async with build_rlvr(config, folder=place, code_folder=code_folder, rows=rows) as parts:
            yield parts


def make_config(
    *,
    model: str | None = None,
    data: Data | None = None,
    reward: Any = None,
    env: Any = None,
    agent: Any = None,
    eval_data: Data | None = None,
    algorithm: str | None = None,
    loss: Any = None,
    advantage: Any = None,
    steps: int | None = None,
    lr: float | None = None,
    prompts_per_step: int | None = None,
    group_size: int | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    pipeline: str | type[Pipeline[Any]] | None = None,
    **settings: Unpack[ConfigSections],
) -> PipelineConfig:
    """A checked config from Python objects. Raises ConfigError with everything that is wrong.

    - `model`: a folder, a name of the hub, or of `reroll models fetch`, which is fetched if it is not there.
    - `data`, `eval_data`: rows with `prompt` (or `messages`) and `answer`: dicts, a `datasets.Dataset`, a data frame, a path,
      a name of the hub, or a source of the config with its `kind`.
    - `reward`: a function `(prompt, trajectory) -> float`, the `kind` of a bundled one, a section of the config, or a dict of
      those by domain. It runs in processes of its own.
    - `env`: a class with `reset`, `step`, `close`, or a bundled `kind`; `agent`: a function that talks to the policy.
    - `loss`, `advantage`: a function, or a section of the config; the rest of the algorithm is the preset `algorithm`.
    - `pipeline`: rlvr, sft, dpo, reward_model, distill, or a class of your own.
    """
    tree: dict[str, Any] = {key: _plain(value) for key, value in settings.items()}
    tree["pipeline"], is_rl = pipeline or "rlvr", True
    with suppress(ConfigError):  # An unknown pipeline is told with all the rest, which is looked at as RL.
        is_rl = issubclass(config_class_of(tree, folder=Path()), RlvrConfig)
    runs_dir = Path(_get(tree, "run", "runs_dir") or RunConfig().runs_dir)
    fields: dict[str, Any] = {
        "algorithm": algorithm, "loss": _section(loss), "advantage": _section(advantage), "policy.model": _model(model),
        "policy.optim.lr": lr, "run.steps": steps, "run.seed": seed, "run.name": name,
        "rollout.prompts_per_step": prompts_per_step, "rollout.group_size": group_size,
        ("rollout.max_tokens" if is_rl else "max_tokens"): max_tokens,
    }  # fmt: skip
    for path, value in fields.items():
        if value is not None:
            _put(tree, path.split("."), value)
    if name is None and _get(tree, "run", "name") is None:
        _put(tree, ["run", "name"], _free_name(tree, runs_dir))
    _add_play(tree, reward, env, agent)
    _add_data(tree, data, eval_data, env=env, agent=agent, folder=runs_dir)
    return parse_config(tree)


def _add_play(tree: dict[str, Any], reward: Any, env: Any, agent: Any) -> None:
    """Who plays and who judges."""
    if reward is not None:
        is_by_domain = isinstance(reward, Mapping) and "kind" not in reward
        rewards = dict(reward) if is_by_domain else {"default": reward}
        _put(tree, ["rewards"], {domain: _section(node) for domain, node in rewards.items()})
    if env is not None:
        _put(tree, ["envs"], {"env": {"env": _section(env)}})
    if agent is not None:
        _put(tree, ["agents"], {"agent": agent})


def _add_data(tree: dict[str, Any], data: Any, eval_data: Any, *, env: Any, agent: Any, folder: Path) -> None:
    if isinstance(data, Node | Mapping) and "train" in (fields := _plain(data)):  # The whole section.
        _put(tree, ["data"], fields)
        data = None
    elif data is None and env is not None:
        data = {"kind": "env", "domain": "env"}
    for part, given in (("train", data), ("eval", eval_data)):
        if given is not None:
            source = helper("rows")(given, folder=folder)
            if agent is not None and isinstance(source, dict):
                source.setdefault("domain", "agent")
            _put(tree, ["data", part], [source])


def _section(value: Any) -> Any:
    """The `kind` of a bundled one as a section of the config."""
    return {"kind": value} if isinstance(value, str) and ":" not in value else value


def _model(name: str | None) -> str | None:
    """Have a model that a package can bring, and that is not here yet, fetched."""
    if name is None or "/" in name or model_folder(name) is not None:
        return name
    if name in entry_names("reroll.models"):
        load_entry("reroll.models", name)(name)
    return name


def _free_name(tree: Mapping[str, Any], runs_dir: Path) -> str:
    """A name that no run has, so that a cell that is run again loses nothing."""
    model = Path(str(_get(tree, "policy", "model") or "model")).name
    kind = str(tree.get("algorithm") or "grpo") if tree["pipeline"] in ("rlvr", "agentic") else _short(tree["pipeline"])
    return next(name for number in count(1) if not (runs_dir / (name := f"{kind}-{model}-{number}")).exists())


def _short(pipeline: Any) -> str:
    return pipeline.__name__ if isinstance(pipeline, type) else str(pipeline).rpartition(":")[2]


def _loaded(config: PipelineConfig | str | Path) -> tuple[PipelineConfig, Path]:
    """The config, and the folder where its modules may lie."""
    if isinstance(config, PipelineConfig):
        return config, Path()
    return load_config(Path(config)), Path(config).parent


def _run_by(config: PipelineConfig, pipeline: str | type[Pipeline[Any]] | None) -> PipelineConfig:
    """The config with another pipeline of the same kind."""
    if pipeline is None:
        return config
    if isinstance(pipeline, str):
        raise ConfigError([Violation("pipeline", "is the config's to say", "set it there, or hand over the class itself")])
    if not isinstance(config, pipeline.config_class):
        problem = f"{pipeline.__name__} runs a {pipeline.config_class.__name__}, and this is a {type(config).__name__}"
        raise ConfigError([Violation("pipeline", problem, "give a config of that class")])
    return config.model_copy(update={"pipeline": ObjectPath(pipeline, travels=False)})


def _ended(config: PipelineConfig, outcome: Outcome) -> Run:
    return Run(
        config=config,
        folder=outcome.folder,
        checkpoint=outcome.checkpoint,
        num_steps=outcome.num_steps,
        seconds=outcome.seconds,
        interrupted=outcome.interrupted,
        evals=outcome.evals,
    )


def _refuse_both(given: Mapping[str, Any]) -> None:
    if named := [name for name, value in given.items() if value is not None]:
        fix = "put it into the config (reroll.load_config takes overrides), or leave the config out"
        raise ConfigError([Violation(name, "is given beside a config", fix) for name in named])


def _plain(value: Any) -> Any:
    """A section as a dict of what was set in it."""
    if isinstance(value, Node):
        return value.given()
    return dict(value) if isinstance(value, Mapping) else value


def _get(tree: Mapping[str, Any], section: str, key: str) -> Any:
    node = tree.get(section)
    return node.get(key) if isinstance(node, Mapping) else None


def _has(settings: Mapping[str, Any], section: str, key: str) -> bool:
    return _get({section: _plain(settings.get(section, {}))}, section, key) is not None


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value that is not set yet. Raises ConfigError for one that is."""
    node = tree
    for key in path[:-1]:
        node[key] = _plain(node.get(key) or {})
        node = node[key]
    if path[-1] in node:
        raise ConfigError([Violation(".".join(path), "is given twice", "leave one of them out")])
    node[path[-1]] = value
