"""What must hold where domains have settings of their own, and for a curriculum over their sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from reroll.config.tree import RlvrConfig
from reroll.errors import Violation

Rule = Callable[[RlvrConfig], Iterable[Violation]]


def domain_violations(config: RlvrConfig, *, rollout_rules: Rule, eval_rules: Rule) -> list[Violation]:
    """Settings of unknown domains, and of known ones that break the rules which `rollout` and `eval` keep."""
    return [
        *_unknown(config),
        *_broken(config, "rollout", config.rollout.domains, rollout_rules),
        *_broken(config, "eval", config.eval.domains, eval_rules),
        *_curriculum(config),
    ]


def _unknown(config: RlvrConfig) -> Iterator[Violation]:
    held_out = {source.domain for source in config.data.eval}
    known = {source.domain for source in config.data.train} | held_out
    for where, settings, domains in (("rollout", config.rollout.domains, known), ("eval", config.eval.domains, held_out)):
        data = "data" if where == "rollout" else "data.eval"
        for name in settings.keys() - domains:
            fix = f"choose among: {', '.join(sorted(domains))}" if domains else f"add prompts under {data}, or remove it"
            yield Violation(f"{where}.domains.{name}", f"no source of {data} has this domain", fix)


def _broken(config: RlvrConfig, where: str, domains: Iterable[str], rules: Rule) -> Iterator[Violation]:
    """What only shows with a domain's own settings in place."""
    known = list(rules(config))
    for name in domains:
        part = config.rollout.of(name) if where == "rollout" else config.eval.of(name)
        for violation in rules(config.model_copy(update={where: part})):
            if violation not in known:
                path = violation.path
                if path.startswith(f"{where}."):
                    path = path.replace(where, f"{where}.domains.{name}", 1)
                yield Violation(path, f"{violation.problem} (domain {name})", violation.fix)


def _curriculum(config: RlvrConfig) -> Iterator[Violation]:
    curriculum, sources = config.data.curriculum, config.data.train
    if curriculum is None or not curriculum.uses_levels:
        for index, source in enumerate(sources):
            if source.level:
                yield Violation(
                    f"data.train.{index}.level",
                    f"is {source.level}, but nothing goes by levels",
                    "set data.curriculum to {kind: ladder}, or remove it",
                )
    elif all(source.level == other.level for source in sources for other in sources if source.domain == other.domain):
        problem = f"is {curriculum.kind}, but no domain has sources of different levels"
        yield Violation("data.curriculum.kind", problem, "set level of the harder ones")
    for fault in curriculum.violations() if curriculum else ():
        yield Violation(f"data.curriculum.{fault.path}", fault.problem, fault.fix)
