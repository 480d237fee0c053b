"""What must hold between domains, their environments and agents, and the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from reroll.config.data import EnvSourceConfig
from reroll.config.envs import ImportEnvConfig, RayEnvsConfig
from reroll.config.registry import package_violations
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


def env_violations(config: RlvrConfig, *, module_exists: Callable[[str], bool]) -> list[Violation]:
    """Domains that nobody plays or that two would play, held-out instances that are trained on, places that are not there."""
    return [*_domains(config), *_held_out(config), *_limits(config), *_code(config, module_exists)]


def _domains(config: RlvrConfig) -> Iterator[Violation]:
    for part, sources in (("train", config.data.train), ("eval", config.data.eval)):
        for index, source in enumerate(sources):
            where, is_env = f"data.{part}.{index}", isinstance(source, EnvSourceConfig)
            if is_env and source.domain not in config.envs:
                known = f", or use domain {', '.join(config.envs)}" if config.envs else ""
                yield Violation(
                    f"{where}.domain", f"{source.domain!r} has no environment", f"add envs.{source.domain}: {{env: …}}{known}"
                )
            if not is_env and source.domain in config.envs:
                yield Violation(
                    f"{where}.kind", f"is {source.kind}, but envs.{source.domain} makes its own tasks", "set it to env"
                )
    for domain in sorted(config.envs.keys() & config.agents.keys()):
        yield Violation(f"agents.{domain}", "is also in envs: one of them must play it", "remove it from one")


def _held_out(config: RlvrConfig) -> Iterator[Violation]:
    for index, held_out in enumerate(config.data.eval):
        for source in config.data.train:
            if (
                not (isinstance(held_out, EnvSourceConfig) and isinstance(source, EnvSourceConfig))
                or held_out.domain != source.domain
            ):
                continue
            if source.first_seed < held_out.first_seed + held_out.num and held_out.first_seed < source.first_seed + source.num:
                yield Violation(
                    f"data.eval.{index}.first_seed",
                    f"{held_out.first_seed} to {held_out.first_seed + held_out.num - 1} overlap the seeds trained on",
                    "take held-out instances from 1000000 on",
                )


def _limits(config: RlvrConfig) -> Iterator[Violation]:
    room = config.policy.strategy.micro_batch_tokens
    if config.max_total_tokens > room:
        yield Violation(
            "rollout.max_total_tokens",
            f"{config.max_total_tokens} is more than a micro-batch holds ({room})",
            "lower it, or raise policy.strategy.micro_batch_tokens",
        )
    if isinstance(config.env_workers, RayEnvsConfig) and not config.runtime.spans_nodes:
        yield Violation("env_workers.kind", "is ray, but the runtime is not", "set runtime.kind to ray, or use processes")


def _code(config: RlvrConfig, module_exists: Callable[[str], bool]) -> Iterator[Violation]:
    for domain, entry in config.envs.items():
        yield from package_violations(f"envs.{domain}.env", entry.env)
    for domain, agent in config.agents.items():
        yield from package_violations(f"agents.{domain}", agent)
    envs = ((f"envs.{domain}.env", entry.env) for domain, entry in config.envs.items())
    named = [(where, env.path) for where, env in envs if isinstance(env, ImportEnvConfig)]
    named += [(f"agents.{domain}", agent.code) for domain, agent in config.agents.items() if agent.code]
    for where, path in named:
        if not module_exists(path):
            problem = f"no module {path.partition(':')[0]!r} beside the YAML, in the working directory or installed"
            yield Violation(f"{where}.path", problem, "give it as module:name")
