"""What must hold between an algorithm's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from reroll.config.advantages import GaeAdvantageConfig, ImportAdvantageConfig
from reroll.config.losses import ImportLossConfig
from reroll.config.registry import load_entry
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


def algorithm_violations(config: RlvrConfig, *, module_exists: Callable[[str], bool]) -> list[Violation]:
    """Combinations that would do nothing, or not what they say."""
    return [
        *group_violations(config),
        *_critic(config),
        *_policies(config),
        *_kl(config),
        *_reference(config),
        *_shaping(config),
        *_teachers(config),
        *_imports(config, module_exists),
        *_stream(config),
    ]


def group_violations(config: RlvrConfig) -> Iterator[Violation]:
    """Groups too small for what is made of them."""
    advantage, size = config.advantage, config.rollout.group_size
    if advantage.compares_siblings and size < 2 and not config.distill_only:
        yield Violation(
            "rollout.group_size",
            f"must be at least 2 for advantage {advantage.kind}, got {size}",
            "a group of one has no baseline: set rollout.group_size to 2 or more",
        )
    yield from advantage.violations(config)


def _critic(config: RlvrConfig) -> Iterator[Violation]:
    needs_critic = isinstance(config.advantage, GaeAdvantageConfig)
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
    has_ratio = config.loss.has_ratio
    if not config.learns_from_advantages:
        return  # The distributions of teachers are followed wherever the samples come from.
    if not has_ratio and several:
        yield Violation(
            "loss.kind",
            f"{config.loss.kind} has no ratio, so a second optimizer step on the same samples is biased",
            "set train.epochs and train.mini_batches to 1, or use loss ppo",
        )
    if not has_ratio and config.rollout.max_staleness and not config.corrections:
        yield Violation(
            "loss.kind",
            f"{config.loss.kind} has no ratio, so a step on samples of an older policy is biased",
            "add corrections: [{level: token, mode: truncate}], use loss ppo, or set rollout.max_staleness to 0",
        )
    if config.corrections and config.ratio_to_sampler:
        yield Violation(
            "corrections",
            "have no effect: "
            + ("the ratio is taken against the sampler already" if has_ratio else "they weigh old_policy against the sampler"),
            "set old_policy to trainer, or remove them; rejections work with either",
        )


def _kl(config: RlvrConfig) -> Iterator[Violation]:
    kl = config.kl
    if kl.estimator == "full" and kl.apply_to == "reward":
        yield Violation(
            "kl.apply_to", "is reward, but estimator full is a term of the loss only", "use apply_to loss, or k1 to k3"
        )
    if kl.adaptive and not kl.coef:
        yield Violation("kl.coef", "is 0, which adapting never changes", "start from e.g. 0.01")
    if kl.top_k and kl.estimator != "full":
        yield Violation("kl.top_k", f"has no effect on estimator {kl.estimator}", "remove it, or set kl.estimator to full")
    if kl.coef and kl.estimator == "k1" and kl.apply_to == "loss" and not kl.times_ratio:
        yield Violation(
            "kl.estimator",
            "is k1, whose gradient in the loss is zero on average: it would hold nothing back",
            "use k2 or k3, set kl.times_ratio to true, or kl.apply_to to reward",
        )
    if kl.times_ratio and (kl.apply_to == "reward" or kl.estimator == "full"):
        unweighted = "a penalty in the reward" if kl.apply_to == "reward" else "estimator full, which does not sample tokens"
        yield Violation("kl.times_ratio", f"has no effect on {unweighted}", "remove it, or use apply_to loss with k1 to k3")
    if kl.coef and kl.apply_to == "reward" and (reason := _unheard(config)):
        yield Violation("kl.apply_to", f"is reward, which nothing would notice: {reason}", "set kl.apply_to to loss")


def _reference(config: RlvrConfig) -> Iterator[Violation]:
    reference = config.reference
    if not config.kl.coef and (reference.model or reference.sync_every):
        yield Violation("reference", "is set, but kl.coef is 0: nobody asks it", "set kl.coef, or remove it")
    if not reference.sync_every:
        if reference.mix != 1:
            yield Violation(
                "reference.mix", "has no effect on a reference that stays", "set reference.sync_every, or remove it"
            )
        return
    if config.policy.lora:
        yield Violation(
            "reference.sync_every",
            "is set, and policy.lora trains an adapter, whose reference is the policy without it",
            "set it to 0, or train every weight (policy.lora: null)",
        )
    if not config.policy.strategy.can_follow:
        kind, fix = config.policy.strategy.kind, "use strategy torch or fsdp2, or set it to 0"
        yield Violation("reference.sync_every", f"is set, and strategy {kind} cannot move a model that it only holds", fix)


def _shaping(config: RlvrConfig) -> Iterator[Violation]:
    shaping, reason = config.shaping, _unheard(config)
    given = [f"shaping.rewards.{name}" for name, value in shaping.rewards if value is not None]
    if shaping.domains == "normalised" and (config.distill_only or config.advantage.reads_parts):
        given.append("shaping.domains")
    if config.distill_only:
        given += [f"shaping.advantages.{name}" for name, value in shaping.advantages if value not in (None, False)]
    if reason:
        yield from (Violation(where, f"has no effect: {reason}", "remove it, or choose another advantage") for where in given)
    if config.advantage.greedy_baseline and shaping.rewards.length is not None:
        yield Violation(
            "shaping.rewards.length",
            f"would weigh the samples and not the greedy answer that {config.advantage.kind} compares them with",
            "remove it, or choose another advantage",
        )


def _unheard(config: RlvrConfig) -> str | None:
    """Why what is done to rewards after they were given would change no advantage; None where it does."""
    return "distill_only learns from the teachers alone" if config.distill_only else config.advantage.deaf_to


def _teachers(config: RlvrConfig) -> Iterator[Violation]:
    if (config.distill_only or config.distill) and not config.teachers:
        problem = "and distill_only learns from nothing else" if config.distill_only else "and distill needs one to follow"
        yield Violation("teachers", f"is empty, {problem}", "add teachers: {name: {model: …}}")
    yield from _distill(config)
    domains = {source.domain for source in config.data.train}
    for name, teacher in config.teachers.items():
        unknown = sorted(set(teacher.domains or ()) - domains)
        if unknown:
            yield Violation(
                f"teachers.{name}.domains",
                f"no training data of domain {', '.join(unknown)}",
                f"choose among: {', '.join(sorted(domains))}",
            )


def _distill(config: RlvrConfig) -> Iterator[Violation]:
    """Distributions of teachers as a term of the loss."""
    if config.distill is None:
        return
    if config.kl.coef and config.kl.estimator == "full":
        yield Violation("kl.estimator", "is full, and a batch holds one distribution: the teacher's", "use k2 or k3")
    if config.masks.zero_advantage:
        problem = "takes tokens without an advantage out of what teachers say about them too"
        yield Violation("masks.zero_advantage", problem, "remove it")
    for domain in sorted({source.domain for source in config.data.train}):
        names = [name for name, teacher in config.teachers.items() if teacher.domains is None or domain in teacher.domains]
        if len(names) > 1:
            yield Violation(
                f"teachers.{names[1]}.domains",
                f"{' and '.join(names)} both teach {domain}, and with distill a token comes closer to one distribution",
                "give each teacher domains of its own, or remove distill: their log-probs then add up",
            )
    if not config.learns_from_advantages:
        idle = {
            "corrections": config.corrections,
            "rejections": config.rejections,
            "masks.top_entropy": config.masks.top_entropy,
        }
        fix = "remove it, or set distill_only to false"
        yield from (
            Violation(at, "has no effect: nothing is learned from advantages", fix) for at, value in idle.items() if value
        )


def _stream(config: RlvrConfig) -> Iterable[Violation]:
    violations = load_entry("reroll.updates", "violations") if config.train.stream else None
    return violations(config) if violations else ()


def _imports(config: RlvrConfig, module_exists: Callable[[str], bool]) -> Iterator[Violation]:
    for where, node in (("advantage", config.advantage), ("loss", config.loss)):
        if isinstance(node, ImportAdvantageConfig | ImportLossConfig) and not module_exists(node.path):
            yield Violation(
                f"{where}.path",
                f"no module {node.path.partition(':')[0]!r} beside the YAML, in the working directory or installed",
                "give it as module:function",
            )
