"""What must hold between domains and their rewards, and inside of rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from reroll.config.data import EnvSourceConfig, SourceConfig
from reroll.config.registry import package_violations
from reroll.config.rewards import EnvRewardConfig, ImportRewardConfig, RewardConfig, walk
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


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
        yield from package_violations(where, node)
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


def _other_rows(where: str, source: SourceConfig, reward: RewardConfig) -> Iterator[Violation]:
    """Rows that a part of the reward cannot judge."""
    picky = {node.kind for _, node in walk({"": reward}) if node.only_rows_of not in (None, source.kind)}
    if picky:
        problem = f"is {source.kind}, but its reward is {', '.join(sorted(picky))}"
        yield Violation(f"{where}.kind", problem, "use another reward kind for this domain")
