"""What a config promises beyond its field types: arithmetic that works out, files and devices that exist.

Reads file names and small JSON files only. No model is opened, no device is touched, no package is imported.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from reroll.config.algorithm import OwnCritic
from reroll.config.check_algorithm import algorithm_violations, group_violations
from reroll.config.check_domains import domain_violations
from reroll.config.check_engine import engine_violations
from reroll.config.check_envs import env_violations
from reroll.config.check_rewards import reward_violations
from reroll.config.check_strategy import strategy_violations
from reroll.config.check_weights import weights_violations
from reroll.config.data import DatasetsSource, JsonlSource, ParquetSource, ReasoningGymSource, SourceConfig
from reroll.config.distill import DistillConfig
from reroll.config.host import adapter_base, models_dir, num_visible_gpus, parse_devices
from reroll.config.parts import Devices, DeviceSelection, FixedModel, PooledEngine, RayRuntime, VllmEngine
from reroll.config.preference import DpoConfig, KtoLoss, RewardModelConfig
from reroll.config.reward_judge import HostedJudge, JudgeReward, ModelReward
from reroll.config.rewards import walk
from reroll.config.select import select_gpus
from reroll.config.strategy import TorchStrategy
from reroll.config.tree import AnyConfig, RlvrConfig
from reroll.errors import Violation


def violations_of(config: AnyConfig, *, folder: Path) -> list[Violation]:
    """Everything that would stop this run later, found now. User modules may lie in `folder`."""
    found = [*_models(config), *_sources(config), *_packages(config)]
    if isinstance(config, RlvrConfig):
        found += [*_batch_arithmetic(config), *_token_limits(config), *_evaluation(config)]
        is_there = partial(module_exists, folder=folder)
        found += reward_violations(config, folder=folder, module_exists=is_there)
        found += env_violations(config, module_exists=is_there)
        found += domain_violations(config, rollout_rules=_drawing_rules, eval_rules=_evaluation)
        found += algorithm_violations(config, module_exists=is_there)
        width = config.engine.tensor_parallel if isinstance(config.engine, PooledEngine) else 1
        at_most = config.engine.num_workers * width
        found += [*_devices(config, "engine.devices", config.engine.devices, at_most=at_most), *engine_violations(config)]
        found += weights_violations(config)
    if isinstance(config, DpoConfig | RewardModelConfig):
        found += [*_preferences(config)]
    return found


def _batch_arithmetic(config: RlvrConfig) -> Iterator[Violation]:
    rollout = config.rollout
    rows, parts = rollout.prompts_per_step * rollout.group_size, config.train.mini_batches
    # Where domains have groups of different sizes, so have steps: parts are equal within one row.
    if rows % parts and not any(domain.group_size for domain in rollout.domains.values()):
        legal = [str(n) for n in range(1, rows + 1) if rows % n == 0]
        yield Violation(
            "train.mini_batches",
            f"{rollout.prompts_per_step} prompts × {rollout.group_size} samples = {rows} rows do not divide into {parts}",
            f"set train.mini_batches to one of: {', '.join(legal[:12])}",
        )
    if rollout.window > rollout.max_staleness + 1:
        yield Violation(
            "rollout.window",
            f"{rollout.window} steps' worth of groups are never in flight with max_staleness {rollout.max_staleness}",
            f"set rollout.window to at most {rollout.max_staleness + 1}, or raise rollout.max_staleness",
        )


def _drawing_rules(config: RlvrConfig) -> Iterator[Violation]:
    yield from _token_limits(config)
    yield from group_violations(config)


def _token_limits(config: RlvrConfig) -> Iterator[Violation]:
    rollout, strategy = config.rollout, config.policy.strategy
    total = rollout.max_prompt_tokens + rollout.max_tokens
    if rollout.min_tokens > rollout.max_tokens:
        yield Violation(
            "rollout.min_tokens",
            f"{rollout.min_tokens} is more than rollout.max_tokens {rollout.max_tokens}",
            f"set it to at most {rollout.max_tokens}",
        )
    context = _context_length(config.policy.model)
    if context is not None and total > context:
        yield Violation(
            "rollout.max_tokens",
            f"max_prompt_tokens + max_tokens = {total} exceeds the model's context of {context}",
            f"lower them to {context} together",
        )
    if strategy.micro_batch_tokens < total:
        yield Violation(
            "policy.strategy.micro_batch_tokens",
            f"{strategy.micro_batch_tokens} cannot hold one sequence of up to {total} tokens (max_prompt_tokens + max_tokens)",
            f"set it to at least {total}, or lower the token limits",
        )


def _named_models(config: AnyConfig) -> Iterator[tuple[str, FixedModel | HostedJudge]]:
    """(path, config) of every model of the run."""
    yield "policy", config.policy
    if isinstance(config, DistillConfig):
        yield "teacher", config.teacher
    if isinstance(config, RlvrConfig):
        if isinstance(config.critic, OwnCritic):
            yield "critic", config.critic
        for name, teacher in config.teachers.items():
            yield f"teachers.{name}", teacher
        for name, node in walk(config.rewards):
            if isinstance(node, ModelReward):
                yield f"rewards.{name}", node
            elif isinstance(node, JudgeReward) and isinstance(node.model, HostedJudge):
                yield f"rewards.{name}.model", node.model


def _models(config: AnyConfig) -> Iterator[Violation]:
    num_gpus = _num_gpus(config)
    for where, node in _named_models(config):
        if isinstance(node, HostedJudge):
            yield from _devices(config, f"{where}.devices", node.devices, at_most=node.num_workers)
        else:
            is_alone = isinstance(node.strategy, TorchStrategy)
            yield from _devices(config, f"{where}.devices", node.devices, at_most=1 if is_alone else None)
            yield from strategy_violations(where, node, runtime=config.runtime, num_gpus=num_gpus)
        if node.model is not None:  # A critic without one of its own starts as the policy's.
            yield from _model(f"{where}.model", node.model)


def _model(where: str, name: str) -> Iterator[Violation]:
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file() and not adapter_base(Path(name)):
            yield Violation(where, f"{name} is a folder without config.json", "give a Hugging Face model folder")
    elif (models_dir() / name / "config.json").is_file() or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return  # a fetched model, or a hub id that only the hub can judge
    else:
        yield Violation(
            where,
            f"{name!r} is neither a folder nor a fetched model nor a hub id",
            "give a path or org/name, or run `reroll models fetch smollm2-135m-instruct`",
        )


def _context_length(model: str) -> int | None:
    """The model's context, if its config.json lies on this disk."""
    for folder in (Path(model), models_dir() / model):
        if base := adapter_base(folder):
            return _context_length(base)
        file = folder / "config.json"
        if file.is_file():
            try:
                length = json.loads(file.read_text()).get("max_position_embeddings")
            except (OSError, ValueError):
                return None
            return length if isinstance(length, int) else None
    return None


def _named_sources(config: AnyConfig) -> Iterator[tuple[str, SourceConfig]]:
    for part, sources in (("train", config.data.train), ("eval", config.data.eval)):
        for index, source in enumerate(sources):
            yield f"data.{part}.{index}", source


def _sources(config: AnyConfig) -> Iterator[Violation]:
    for where, source in _named_sources(config):
        if isinstance(source, JsonlSource | ParquetSource) and not source.path.is_file():
            yield Violation(f"{where}.path", f"{source.path} does not exist", "paths are taken from the working directory")
        elif isinstance(source, DatasetsSource) and not source.path.is_dir():
            yield Violation(f"{where}.path", f"{source.path} is no folder", "give a folder written by save_to_disk")


def _packages(config: AnyConfig) -> Iterator[Violation]:
    """Optional packages that the config asks for and this Python does not have."""
    wanted: list[tuple[str, str, str]] = [("run.trackers", tracker, "trackers") for tracker in config.run.trackers]
    if isinstance(config.runtime, RayRuntime):
        wanted.append(("runtime.kind", "ray", "ray"))
    if isinstance(config, RlvrConfig) and isinstance(config.engine, VllmEngine):
        wanted.append(("engine.kind", "vllm", "vllm"))
    if config.policy.lora or adapter_base(Path(config.policy.model)):
        wanted.append(("policy.lora" if config.policy.lora else "policy.model", "peft", "lora"))
    if isinstance(config, RlvrConfig) and isinstance(config.critic, OwnCritic) and config.critic.lora:
        wanted.append(("critic.lora", "peft", "lora"))
    for where, source in _named_sources(config):
        package = {"parquet": "pyarrow", "datasets": "datasets", "reasoning_gym": "reasoning_gym"}.get(source.kind)
        if package:
            wanted.append((f"{where}.kind", package, "data"))
    for where, package, extra in wanted:
        if importlib.util.find_spec(package) is None:
            yield Violation(where, f"needs the package {package}", f"pip install 'reroll[{extra}]'")


def module_exists(module: str, folder: Path) -> bool:
    """Whether a module lies in the folder or the working directory, or is installed. It is not imported."""
    first = module.partition(".")[0]
    beside = any((root / f"{first}.py").is_file() or (root / first).is_dir() for root in (folder, Path.cwd()))
    return beside or importlib.util.find_spec(first) is not None


def _evaluation(config: RlvrConfig) -> Iterator[Violation]:
    if config.eval.every and not config.data.eval:
        yield Violation("eval.every", "is set, but data.eval is empty", "add held-out prompts under data.eval, or set it to 0")
    if config.eval.samples > 1 and config.eval.temperature == 0:
        yield Violation(
            "eval.samples",
            f"{config.eval.samples} greedy samples of one prompt are all the same",
            "set eval.temperature above 0, or eval.samples to 1",
        )


def _preferences(config: DpoConfig | RewardModelConfig) -> Iterator[Violation]:
    for where, source in _named_sources(config):
        if isinstance(source, ReasoningGymSource):
            yield Violation(
                f"{where}.kind", f"is {source.kind}, whose rows compare no answers", "use jsonl, parquet or datasets"
            )
    if isinstance(config, DpoConfig) and isinstance(config.loss, KtoLoss) and config.rows_per_step < 2:
        yield Violation(
            "rows_per_step", "is 1, but kto also looks at answers to other prompts of the step", "set it to 2 or more"
        )


def _devices(config: AnyConfig, where: str, value: Devices, *, at_most: int | None) -> Iterator[Violation]:
    if isinstance(value, DeviceSelection):
        yield from _selection(config, where, value, at_most=at_most)
        return
    if value == "auto" and config.cluster is not None and config.cluster.is_mixed:
        problem = "is auto, and the cluster has nodes of several kinds"
        yield Violation(where, problem, "say which, e.g. {gpus: 8, label: {pool: train}}")
        return
    try:
        devices = parse_devices(value)
    except ValueError as error:
        yield Violation(where, str(error), "write auto, cpu, a number, a range such as 0-3, a list, or {gpus: 4, label: {…}}")
        return
    if value == "auto" or devices == ("cpu",):
        return
    if at_most is not None and len(devices) > at_most:
        yield Violation(where, f"names {len(devices)} devices for {at_most} worker{'s' if at_most > 1 else ''}", "name fewer")
    available = _num_gpus(config)
    missing = [device for device in devices if available is not None and int(device) >= available]
    if missing:
        yield Violation(
            where,
            f"GPU {', '.join(missing)} does not exist: {available or 'no'} GPU{'s' if available != 1 else ''} here",
            "set it to auto or cpu" if not available else f"use 0 to {available - 1}",
        )


def _selection(config: AnyConfig, where: str, value: DeviceSelection, *, at_most: int | None) -> Iterator[Violation]:
    if not isinstance(config.runtime, RayRuntime):
        yield Violation(where, "selects GPUs among nodes, and the local runtime is one process", "set runtime: {kind: ray}")
        return
    if at_most is not None and value.gpus > at_most:
        workers = f"{at_most} worker{'s' if at_most > 1 else ''}"
        yield Violation(where, f"selects {value.gpus} GPUs for {workers}", f"set {where}.gpus to {at_most}")
    if config.cluster is not None:
        try:
            select_gpus(value, config.cluster.gpu_nodes)
        except ValueError as error:
            yield Violation(where, str(error), "ask for fewer or others, or list the nodes that carry it under cluster.nodes")


def _num_gpus(config: AnyConfig) -> int | None:
    """GPUs to check against; None when only the cluster knows."""
    if isinstance(config.runtime, RayRuntime):
        if config.runtime.num_gpus is not None:
            return config.runtime.num_gpus
        if config.cluster is not None:
            return 0 if config.cluster.has_only_cpus else config.cluster.num_devices
        if config.runtime.address is not None:
            return None
    return num_visible_gpus()
