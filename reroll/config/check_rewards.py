"""What must hold between domains and their rewards, and inside of rewards."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from reroll.config.check_judges import judge_violations
from reroll.config.data import ReasoningGymSource, SourceConfig
from reroll.config.reward_judge import JudgeReward
from reroll.config.reward_penalties import LengthReward, OverlongReward
from reroll.config.rewards import (
    CascadeReward,
    EarnedReward,
    ImportReward,
    ReasoningGymReward,
    RewardConfig,
    StackReward,
    walk,
)
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation

PACKAGES = {"reasoning_gym": ("reasoning_gym", "data"), "math": ("math_verify", "math"), "json_schema": ("jsonschema", "math")}
"""The package that a kind needs, and the extra that brings it."""


def reward_violations(config: RlvrConfig, *, folder: Path, module_exists: Callable[[str], bool]) -> list[Violation]:
    """Domains that nobody judges, rewards made of nothing, limits that contradict each other, code that is not there."""
    within = nodes_violations(config.rewards, folder=folder, module_exists=module_exists)
    return [*_domains(config), *within]


def nodes_violations(
    rewards: Mapping[str, RewardConfig], *, folder: Path, module_exists: Callable[[str], bool]
) -> Iterator[Violation]:
    """What is wrong with rewards, whatever they are for."""
    for name, node in walk(rewards):
        where = f"rewards.{name}"
        yield from (*_combined(where, node), *_lengths(where, node), *_packages(where, node))
        if isinstance(node, ImportReward) and not module_exists(node.path.partition(":")[0]):
            problem = f"no module {node.path.partition(':')[0]!r} beside the YAML, in the working directory or installed"
            yield Violation(f"{where}.path", problem, "give it as module:function")
        if isinstance(node, JudgeReward):
            yield from judge_violations(where, node, folder=folder)


def _domains(config: RlvrConfig) -> Iterator[Violation]:
    domains = {}
    for part, sources in (("train", config.data.train), ("eval", config.data.eval)):
        for index, source in enumerate(sources):
            where, plays = f"data.{part}.{index}", source.domain in config.envs or source.domain in config.agents
            reward = config.rewards.get(source.domain, None if plays else config.rewards.get("default"))
            domains[source.domain] = plays
            if reward is None and not plays:
                fix = f"add rewards.{source.domain}, or rewards.default"
                yield Violation(f"{where}.domain", f"{source.domain!r} has no reward", fix)
            elif reward is not None and _asks_reasoning_gym(reward) and not isinstance(source, ReasoningGymSource):
                yield _not_reasoning_gym(where, source)
    for name, reward in config.rewards.items():
        if not domains.get(name, True) and any(isinstance(node, EarnedReward) for _, node in walk({name: reward})):
            problem = f"holds kind earned, but nothing is earned in {name}: it is neither in envs nor in agents"
            yield Violation(f"rewards.{name}", problem, "use a reward that judges the answer")


def _asks_reasoning_gym(reward: RewardConfig) -> bool:
    return any(isinstance(node, ReasoningGymReward) for _, node in walk({"": reward}))


def _not_reasoning_gym(where: str, source: SourceConfig) -> Violation:
    problem = f"is {source.kind}, but its reward is reasoning_gym"
    return Violation(f"{where}.kind", problem, "use another reward kind for this domain")


def _combined(where: str, node: RewardConfig) -> Iterator[Violation]:
    if isinstance(node, StackReward):
        if not node.parts:
            yield Violation(f"{where}.parts", "is empty", "name at least one reward, e.g. answer: {kind: numeric}")
        for name in node.parts:
            if not name or any(mark in name for mark in "./ "):
                problem, fix = f"{name!r} cannot name a part", "parts are logged by name: use letters, digits, - and _"
                yield Violation(f"{where}.parts", problem, fix)
        if node.clip and node.clip[0] >= node.clip[1]:
            yield Violation(f"{where}.clip", f"{list(node.clip)} leaves no range", "give the lower bound first, e.g. [-1, 1]")
    if isinstance(node, CascadeReward) and len(node.steps) < 2:
        num_steps = "one step" if node.steps else "no steps"
        yield Violation(
            f"{where}.steps", f"a cascade with {num_steps} has nowhere to go", "add a step, or use the reward itself"
        )


def _lengths(where: str, node: RewardConfig) -> Iterator[Violation]:
    if isinstance(node, OverlongReward) and node.buffer_tokens > node.max_tokens:
        problem = f"{node.buffer_tokens} is more than max_tokens {node.max_tokens}"
        yield Violation(f"{where}.buffer_tokens", problem, f"set it to at most {node.max_tokens}")
    if isinstance(node, LengthReward) and node.target_tokens and node.target_tokens >= node.max_tokens:
        problem = f"{node.target_tokens} is not below max_tokens {node.max_tokens}"
        yield Violation(f"{where}.target_tokens", problem, f"set it below {node.max_tokens}, or raise max_tokens")


def _packages(where: str, node: RewardConfig) -> Iterator[Violation]:
    package, extra = PACKAGES.get(node.kind, (None, None))
    if package and importlib.util.find_spec(package) is None:
        yield Violation(f"{where}.kind", f"needs the package {package}", f"pip install 'reroll[{extra}]'")
