"""What a config promises beyond its field types: arithmetic that works out, files and devices that exist.

Reads file names and small JSON files only. No model is opened, no device is touched, no package is imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from reroll.config.algorithm import OwnCriticConfig
from reroll.config.base import NotKnown
from reroll.config.check_algorithm import algorithm_violations, group_violations
from reroll.config.check_domains import domain_violations
from reroll.config.check_engine import engine_violations, exact_violations, weights_violations
from reroll.config.check_envs import env_violations
from reroll.config.check_rewards import reward_violations
from reroll.config.check_strategy import strategy_violations
from reroll.config.data import ImportSourceConfig
from reroll.config.elastic import elastic_violations
from reroll.config.host import adapter_base, is_path, model_card, model_folder, num_visible_gpus, parse_devices
from reroll.config.imports import ObjectPath
from reroll.config.parts import ELASTIC, Devices, DeviceSelectionConfig, ModelConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.registry import load_entry, package_violations
from reroll.config.reward_hosted import HostedJudgeConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


def violations_of(config: PipelineConfig, *, folder: Path) -> list[Violation]:
    """Everything that would stop this run later, found now. User modules may lie in `folder`.

    Where the config has fields that are not known, rules that ask for one of them say nothing more.
    """
    found = []
    for rule in _rules(config, folder):
        with suppress(NotKnown):
            for violation in rule(config):
                found.append(violation)  # What a rule found before it met a field that is not known stands.
    return found


def notes_of(config: PipelineConfig) -> Iterator[str]:
    """What runs, and is hardly what was meant."""
    per_step = config.train.epochs * config.train.mini_batches if isinstance(config, RlvrConfig) else 1
    trained: dict[str, ModelConfig] = {"policy": config.policy}
    if isinstance(config, RlvrConfig) and isinstance(config.critic, OwnCriticConfig):
        trained["critic"] = config.critic
    for name, model in trained.items():
        warmup, total = model.optim.warmup_steps, config.run.steps * per_step
        if warmup >= total:
            highest = f"{model.optim.lr * total / (warmup + 1):.2g}"
            yield f"{name}.optim.warmup_steps is {warmup} and the run has {total}: the learning rate comes to {highest} at most"


def _rules(config: PipelineConfig, folder: Path) -> list[Callable[[Any], Iterable[Violation]]]:
    is_there = partial(module_exists, folder=folder)
    rules: list[Callable[[Any], Iterable[Violation]]] = [
        _models,
        partial(_sources, module_exists=is_there),
        _packages,
        exact_violations,
    ]
    if isinstance(config, RlvrConfig):
        rules += [
            _batch_arithmetic,
            _token_limits,
            _evaluation,
            partial(reward_violations, folder=folder, module_exists=is_there),
            partial(env_violations, module_exists=is_there),
            partial(domain_violations, rollout_rules=_drawing_rules, eval_rules=_evaluation),
            partial(algorithm_violations, module_exists=is_there),
            _engine_devices,
            elastic_violations,
            engine_violations,
            weights_violations,
        ]
    return [*rules, type(config).violations]


def _engine_devices(config: RlvrConfig) -> Iterator[Violation]:
    if config.engine.devices == ELASTIC:
        return
    num_gpus = config.engine.num_workers * config.engine.gpus_per_worker
    yield from _devices(config, "engine.devices", config.engine.devices, at_most=num_gpus)


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
    if rollout.take_window > rollout.max_staleness + 1:
        yield Violation(
            "rollout.take_window",
            f"{rollout.take_window} steps' worth of groups are never in flight with max_staleness {rollout.max_staleness}",
            f"set rollout.take_window to at most {rollout.max_staleness + 1}, or raise rollout.max_staleness",
        )
    if rollout.long_rounds and (rollout.max_staleness or rollout.oversample == 1 or rollout.max_tries == 1):
        problem = "puts off the surplus of synchronous steps, and there is none that could be"
        fix = "set rollout.oversample to 1.25, max_tries to at least 2 and max_staleness to 0 (or use a budget and take_window)"
        yield Violation("rollout.long_rounds", problem, fix)


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
    if strategy.pass_tokens < total:
        num_sharing = strategy.pass_tokens // strategy.micro_batch_tokens
        by = f" on {num_sharing} ranks" if num_sharing > 1 else ""
        yield Violation(
            "policy.strategy.micro_batch_tokens",
            f"{strategy.micro_batch_tokens}{by} cannot hold one sequence of up to {total} tokens "
            "(max_prompt_tokens + max_tokens)",
            f"set it to at least {-(-total // num_sharing)}, or lower the token limits",
        )


def _models(config: PipelineConfig) -> Iterator[Violation]:
    num_gpus = _num_gpus(config)
    for where, node in config.named_models():
        if isinstance(node, HostedJudgeConfig):
            yield from _devices(config, f"{where}.devices", node.devices, at_most=node.num_workers)
        else:
            is_alone = isinstance(node.strategy, TorchStrategyConfig)
            yield from _devices(config, f"{where}.devices", node.devices, at_most=1 if is_alone else None)
            yield from strategy_violations(where, node, runtime=config.runtime, num_gpus=num_gpus)
        if isinstance(config, RlvrConfig) and where == "policy" and config.reference.model is not None:
            yield from _model("reference.model", config.reference.model)
        if node.model is not None:  # A critic without one of its own starts as the policy's.
            yield from _model(f"{where}.model", node.model)


def _model(where: str, name: str) -> Iterator[Violation]:
    if model_folder(name) is not None:
        return
    if Path(name).expanduser().is_dir():
        yield Violation(where, f"{name} is a folder without config.json", "give a Hugging Face model folder")
    elif is_path(name):
        fix = f"check the path; relative ones are taken from the working directory, {Path.cwd()}"
        yield Violation(where, f"there is no folder {name}", fix)
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name):  # a hub id only the hub can judge
        yield Violation(
            where,
            f"{name!r} is neither a folder nor a fetched model nor a hub id",
            "give a path or org/name; `reroll models fetch --help` names those that can be fetched",
        )


def _context_length(model: str) -> int | None:
    """The model's context, if its config.json lies on this disk."""
    length = (model_card(model) or {}).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def _sources(config: PipelineConfig, *, module_exists: Callable[[str], bool]) -> Iterator[Violation]:
    for where, source in config.data.named():
        if isinstance(source, ImportSourceConfig) and not module_exists(source.path):
            problem = f"no module {source.path.partition(':')[0]!r} beside the YAML, in the working directory or installed"
            yield Violation(f"{where}.path", problem, "give it as module:name")
        for fault in source.violations():
            yield Violation(f"{where}.{fault.path}", fault.problem, fault.fix)


def _packages(config: PipelineConfig) -> Iterator[Violation]:
    """Optional packages that the config asks for and this Python does not have."""
    wanted = [
        ("run.trackers", package, requirement)
        for tracker in config.run.trackers
        for package, requirement in load_entry("reroll.trackers", tracker).packages.items()
    ]
    folder = model_folder(config.policy.model)
    if config.policy.lora or (folder and adapter_base(folder)):
        wanted.append(("policy.lora" if config.policy.lora else "policy.model", "peft", "reroll[lora]"))
    if isinstance(config, RlvrConfig) and isinstance(config.critic, OwnCriticConfig) and config.critic.lora:
        wanted.append(("critic.lora", "peft", "reroll[lora]"))
    for where, node in [("runtime", config.runtime), *config.data.named()]:
        yield from package_violations(where, node)
    for where, package, requirement in wanted:
        if importlib.util.find_spec(package) is None:
            yield Violation(where, f"needs the package {package}", f"pip install '{requirement}'")


def module_exists(path: str, folder: Path) -> bool:
    """Whether the module of `module:name` lies in the folder or the working directory, or is installed. It is not imported."""
    if isinstance(path, ObjectPath):
        return True
    first = path.partition(":")[0].partition(".")[0]
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


def _devices(config: PipelineConfig, where: str, value: Devices, *, at_most: int | None) -> Iterator[Violation]:
    if isinstance(value, DeviceSelectionConfig):
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


def _selection(config: PipelineConfig, where: str, value: DeviceSelectionConfig, *, at_most: int | None) -> Iterator[Violation]:
    if not config.runtime.spans_nodes:
        yield Violation(
            where, f"selects GPUs among nodes, and the {config.runtime.kind} runtime has one", "set runtime: {kind: ray}"
        )
        return
    if at_most is not None and value.gpus > at_most:
        workers = f"{at_most} worker{'s' if at_most > 1 else ''}"
        yield Violation(where, f"selects {value.gpus} GPUs for {workers}", f"set {where}.gpus to {at_most}")
    if config.cluster is not None:
        try:
            config.cluster.gpu_nodes.select(value)
        except ValueError as error:
            yield Violation(where, str(error), "ask for fewer or others, or list the nodes that carry it under cluster.nodes")


def _num_gpus(config: PipelineConfig) -> int | None:
    """GPUs to check against; None when only the cluster knows."""
    return config.runtime.num_gpus_in(config.cluster, here=num_visible_gpus())
