"""What must hold between an algorithm's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from reroll.config.advantages import GaeAdvantage, ImportAdvantage, NormalisedAdvantage, PassAtKAdvantage, TurnReturnsAdvantage
from reroll.config.losses import ImportLoss
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation

_COMPARES_SIBLINGS = {"opo", "gpg", "gdpo", "optimal_token_baseline", "gigpo"}


def algorithm_violations(config: RlvrConfig, *, module_exists: Callable[[str], bool]) -> list[Violation]:
    """Combinations that would do nothing, or not what they say."""
    return [
        *group_violations(config),
        *_critic(config),
        *_policies(config),
        *_kl(config),
        *_teachers(config),
        *_imports(config, module_exists),
    ]


def group_violations(config: RlvrConfig) -> Iterator[Violation]:
    """Groups too small for what is made of them."""
    advantage, size = config.advantage, config.rollout.group_size
    compares = advantage.kind in _COMPARES_SIBLINGS
    if isinstance(advantage, NormalisedAdvantage):
        compares = advantage.mean in ("group", "leave_one_out") or advantage.std == "group"
    if isinstance(advantage, TurnReturnsAdvantage):
        compares = "group" in (advantage.mean, advantage.std)
    if compares and size < 2 and not config.distill_only:
        yield Violation(
            "rollout.group_size",
            f"must be at least 2 for advantage {advantage.kind}, got {size}",
            "a group of one has no baseline: set rollout.group_size to 2 or more",
        )
    if isinstance(advantage, PassAtKAdvantage) and advantage.k >= size:
        yield Violation(
            "advantage.k",
            f"{advantage.k} of {size} siblings: every set would be nearly the whole group",
            f"set it below rollout.group_size, which is {size}",
        )


def _critic(config: RlvrConfig) -> Iterator[Violation]:
    needs_critic = isinstance(config.advantage, GaeAdvantage)
    if needs_critic and config.critic is None:
        yield Violation(
            "critic", "is missing, but advantage gae needs one", "add critic: {kind: own}, or critic: {kind: shared}"
        )
    if config.critic is not None and not needs_critic:
        yield Violation(
            "critic", f"is there, but advantage {config.advantage.kind} asks none", "remove it, or set advantage.kind to gae"
        )


def _policies(config: RlvrConfig) -> Iterator[Violation]:
    several = config.train.mini_batches > 1 or config.train.epochs > 1
    if config.loss.kind == "reinforce" and several:
        yield Violation(
            "loss.kind",
            "reinforce has no ratio, so a second optimizer step on the same samples is biased",
            "set train.epochs and train.mini_batches to 1, or use loss ppo",
        )
    against_sampler = config.old_policy == "sampler" or (config.old_policy == "auto" and config.rollout.max_staleness)
    if config.corrections and against_sampler:
        yield Violation(
            "corrections",
            "have no effect: the ratio is taken against the sampler already",
            "set old_policy to trainer, or remove them",
        )


def _kl(config: RlvrConfig) -> Iterator[Violation]:
    kl = config.kl
    if kl.estimator == "full" and kl.place == "reward":
        yield Violation("kl.place", "is reward, but estimator full is a term of the loss only", "use place loss, or k1 to k3")
    if kl.adaptive and not kl.coef:
        yield Violation("kl.coef", "is 0, which adapting never changes", "start from e.g. 0.01")
    if kl.top_k and kl.estimator != "full":
        yield Violation("kl.top_k", f"has no effect on estimator {kl.estimator}", "remove it, or set kl.estimator to full")


def _teachers(config: RlvrConfig) -> Iterator[Violation]:
    if config.distill_only and not config.teachers:
        yield Violation("teachers", "is empty, and distill_only learns from nothing else", "add teachers: {name: {model: …}}")
    domains = {source.domain for source in config.data.train}
    for name, teacher in config.teachers.items():
        unknown = sorted(set(teacher.domains or ()) - domains)
        if unknown:
            yield Violation(
                f"teachers.{name}.domains",
                f"no training data of domain {', '.join(unknown)}",
                f"choose among: {', '.join(sorted(domains))}",
            )


def _imports(config: RlvrConfig, module_exists: Callable[[str], bool]) -> Iterator[Violation]:
    for where, node in (("advantage", config.advantage), ("loss", config.loss)):
        if isinstance(node, ImportAdvantage | ImportLoss) and not module_exists(node.path.partition(":")[0]):
            yield Violation(
                f"{where}.path",
                f"no module {node.path.partition(':')[0]!r} beside the YAML, in the working directory or installed",
                "give it as module:function",
            )
