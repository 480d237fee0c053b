"""What must hold between domains and their rewards, and inside of rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from reroll.config.advantages import GdpoAdvantageConfig
from reroll.config.data import EnvSourceConfig, SourceConfig
from reroll.config.registry import package_violations
from reroll.config.rewards import (
    CascadeRewardConfig,
    EnvRewardConfig,
    ImportRewardConfig,
    RewardConfig,
    StackRewardConfig,
    walk,
)
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


def reward_violations(config: RlvrConfig, *, folder: Path, module_exists: Callable[[str], bool]) -> list[Violation]:
    """Domains that nobody judges, rewards made of nothing, limits that contradict each other, code that is not there."""
    within = nodes_violations(config.rewards, folder=folder, module_exists=module_exists)
    return [*_domains(config), *_parts(config), *within]


def nodes_violations(
    rewards: Mapping[str, RewardConfig], *, folder: Path, module_exists: Callable[[str], bool]
) -> Iterator[Violation]:
    """What is wrong with rewards, whatever they are for."""
    for name, node in walk(rewards):
        where = f"rewards.{name}"
        yield from (*_combined(where, node), *package_violations(where, node))
        for fault in node.violations(folder=folder):
            yield Violation(f"{where}.{fault.path}", fault.problem, fault.fix)
        if isinstance(node, ImportRewardConfig) and not module_exists(node.path):
            problem = f"no module {node.path.partition(':')[0]!r} beside the YAML, in the working directory or installed"
            yield Violation(f"{where}.path", problem, "give it as module:function")


def _domains(config: RlvrConfig) -> Iterator[Violation]:
    domains = {}
    for part, sources in (("train", config.data.train), ("eval", config.data.eval)):
        for index, source in enumerate(sources):
            where, plays = (
                f"data.{part}.{index}",
                isinstance(source, EnvSourceConfig) or source.domain in config.envs | config.agents,
            )
            reward = config.rewards.get(source.domain, None if plays else config.rewards.get("default"))
            domains[source.domain] = plays
            if reward is None and not plays:
                fix = "add " + ", or ".join(dict.fromkeys([f"rewards.{source.domain}", "rewards.default"]))
                yield Violation(f"{where}.domain", f"{source.domain!r} has no reward", fix)
            elif reward is not None:
                yield from _other_rows(where, source, reward)
    for name, reward in config.rewards.items():
        if not domains.get(name, True) and any(isinstance(node, EnvRewardConfig) for _, node in walk({name: reward})):
            problem = f"holds kind env_reward, but nothing is earned in {name}: it is neither in envs nor in agents"
            yield Violation(f"rewards.{name}", problem, "use a reward that judges the answer")


def _parts(config: RlvrConfig) -> Iterator[Violation]:
    """Advantage gdpo normalises the parts of the reward one by one: every domain's must have some."""
    if not isinstance(config.advantage, GdpoAdvantageConfig) or config.distill_only:
        return
    known: set[str] | None = set()
    for domain in dict.fromkeys(source.domain for source in config.data.train):
        plays = domain in config.envs or domain in config.agents
        name = domain if plays or domain in config.rewards else "default"
        names = _part_names(config.rewards.get(name), is_agent=domain in config.agents)
        if names is None:
            known = None
        elif names:
            known = None if known is None else known | names
        elif plays or name in config.rewards:  # A domain without any reward is told of elsewhere.
            fix = "make it {kind: stack, parts: {…}}, or return a Score with parts from a function of yours; or use grpo"
            problem = f"has no parts, which advantage gdpo normalises one by one (domain {domain})"
            yield Violation(f"rewards.{name}", problem, fix)
    if known:
        for name in sorted(config.advantage.weights.keys() - known):
            fix = f"choose among: {', '.join(sorted(known))}"
            yield Violation(f"advantage.weights.{name}", "is no part of any reward", fix)


def _part_names(reward: RewardConfig | None, *, is_agent: bool) -> set[str] | None:
    """What the parts of a reward are called; empty: it has none; None: only your code, or an agent, knows."""
    if isinstance(reward, StackRewardConfig):
        return set(reward.parts)
    is_earned = reward is None or isinstance(reward, EnvRewardConfig)
    return None if isinstance(reward, ImportRewardConfig) or (is_earned and is_agent) else set()


def _other_rows(where: str, source: SourceConfig, reward: RewardConfig) -> Iterator[Violation]:
    """Rows that a part of the reward cannot judge."""
    picky = {node.kind for _, node in walk({"": reward}) if node.only_rows_of not in (None, source.kind)}
    if picky:
        problem = f"is {source.kind}, but its reward is {', '.join(sorted(picky))}"
        yield Violation(f"{where}.kind", problem, "use another reward kind for this domain")


def _combined(where: str, node: RewardConfig) -> Iterator[Violation]:
    if isinstance(node, StackRewardConfig):
        if not node.parts:
            yield Violation(f"{where}.parts", "is empty", "name at least one reward, e.g. answer: {kind: numeric}")
        for name in node.parts:
            if not name or any(mark in name for mark in "./ "):
                problem, fix = f"{name!r} cannot name a part", "parts are logged by name: use letters, digits, - and _"
                yield Violation(f"{where}.parts", problem, fix)
        if node.clip and node.clip[0] >= node.clip[1]:
            yield Violation(f"{where}.clip", f"{list(node.clip)} leaves no range", "give the lower bound first, e.g. [-1, 1]")
    if isinstance(node, CascadeRewardConfig) and len(node.steps) < 2:
        num_steps = "one step" if node.steps else "no steps"
        yield Violation(
            f"{where}.steps", f"a cascade with {num_steps} has nowhere to go", "add a step, or use the reward itself"
        )
