"""Every metric that a run writes, by name: what it tells, in which unit, and how its parts merge.

`metrics.jsonl`, the trackers, the live view and the curve use these names. `docs/metrics.md` is written from here, and a test
holds the runs of all pipelines to it: a metric that is not listed here fails it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from reroll.observe.metrics import Last, Max, Mean, Metric, Sum

Merge = Literal["mean", "sum", "max", "last"]
MERGES: Mapping[Merge, type[Metric]] = {"mean": Mean, "sum": Sum, "max": Max, "last": Last}
"""How what micro-batches, ranks and workers report of a step becomes one number."""


class MetricDoc(NamedTuple):
    """One metric, or several that differ in what stands in angle brackets."""

    name: str
    merge: Merge | None
    """None for evaluations, which are made in one piece."""
    unit: str
    """Empty for a plain number."""
    what: str

    def covers(self, name: str) -> bool:
        """Whether it is what is written under this name."""
        return _pattern(self.name).fullmatch(name) is not None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name)))


def doc_of(name: str) -> MetricDoc | None:
    """What a metric tells; None if nobody has written it down."""
    exact = (doc for docs in CATALOGUE.values() for doc in docs if doc.name == name)
    covering = (doc for docs in CATALOGUE.values() for doc in docs if doc.covers(name))
    return next(exact, None) or next(covering, None)


def _docs(*rows: tuple[str, Merge | None, str, str]) -> tuple[MetricDoc, ...]:
    return tuple(MetricDoc(*row) for row in rows)


_OF_PREFERENCES = {
    "accuracy": "share",
    "margin": "",
    "chosen_reward": "",
    "rejected_reward": "",
    "chosen_logp": "nats",
    "rejected_logp": "nats",
    "preference_loss": "",
    "sft_loss": "nats a token",
    "good_reward": "",
    "bad_reward": "",
    "reference_point": "",
}

CATALOGUE: dict[str, tuple[MetricDoc, ...]] = {
    "Every step": _docs(
        ("tokens", "sum", "tokens", "In RL, tokens that the policy wrote; elsewhere, tokens of the rows trained on."),
        ("throughput/tokens_per_s", "last", "tokens/s", "`tokens` over `time/step_s`."),
        ("machine/core_wait", "last", "share", "Of its time, what the worst-off thread waited for a core that others had."),
        ("machine/cores", "last", "cores", "That the controller's process may use."),
        ("machine/threads", "last", "threads", "That an operation of PyTorch may use in the controller's process."),
        ("run/restarts", "last", "", "How often the run was started anew by itself, since the user started or resumed it."),
    ),
    "Time": _docs(
        ("time/step_s", "last", "s", "The whole step."),
        ("time/wait_s", "last", "s", "RL: until enough groups were finished."),
        ("time/train_s", "last", "s", "The policy's update."),
        (
            "time/streamed_s",
            "last",
            "s",
            "With `train.stream`: of that, while samples of the step were being written.",
        ),
        ("time/critic_s", "last", "s", "The update of a critic that is a model of its own."),
        ("time/push_s", "last", "s", "Until the engines had the new weights."),
        ("time/gather_s", "last", "s", "Of that, collecting them from the trainer's ranks; between processes."),
        ("time/swap_s", "last", "s", "Models moved on and off devices that they share."),
        ("time/checkpoint_s", "last", "s", "The run stood still to take a checkpoint; it is written in the background."),
        ("time/checkpoint_wait_s", "last", "s", "The run waited for the checkpoint before to be written."),
        ("time/queue_s", "mean", "s", "A sample, from admission until it began."),
        ("time/generate_s", "mean", "s", "A sample's episode, with the engine's queue and the environment."),
        ("time/score_s", "mean", "s", "A sample's reward."),
        ("time/ready_s", "mean", "s", "A finished group, until it was taken."),
        *(
            (f"time/{name}_s_max", "max", "s", f"The longest `time/{name}_s`.")
            for name in ("queue", "generate", "score", "ready")
        ),
    ),
    "Rewards": _docs(
        ("reward/mean", "mean", "", "Of the samples trained on."),
        ("reward/std", "last", "", "Their standard deviation."),
        ("reward/<domain>", "mean", "", "`reward/mean` of one domain, where there are several."),
        ("reward/<domain>/<part>", "mean", "", "A part of the domain's reward, or what was measured beside it, by name."),
        ("judging/<domain>/scored", "sum", "samples", "Judged."),
        ("judging/<domain>/failed", "sum", "samples", "Left without a score: the sample fails with the reason."),
        ("judging/<domain>/raised", "sum", "samples", "Of those, the ones whose reward raised what it did not mean to."),
        ("judging/<domain>/lost", "sum", "samples", "Whose judge was lost; another one judged them."),
        ("judging/<domain>/latency_s", "mean", "s", "From the question to the score."),
        ("judging/<domain>/latency_max_s", "max", "s", "The longest."),
        ("judging/<domain>/wait_s", "mean", "s", "Of that, waiting for a process."),
        ("reward/judge/<name>/requests", "sum", "", "Questions to a judging model."),
        ("reward/judge/<name>/retries", "sum", "", "Further tries of a question."),
        ("reward/judge/<name>/failures", "sum", "", "Questions without a reply."),
        ("reward/judge/<name>/unparseable", "sum", "", "Replies without a score."),
        ("reward/judge/<name>/cache_hits", "sum", "", "Questions that had been answered before."),
        ("reward/judge/<name>/prompt_tokens", "sum", "tokens", "Read by the judge."),
        ("reward/judge/<name>/completion_tokens", "sum", "tokens", "Written by the judge."),
        ("reward/judge/<name>/latency_s", "mean", "s", "Of a question, retries included."),
        ("reward/judge/<name>/latency_max_s", "max", "s", "The longest."),
        ("reward/judge/<name>/cost", "sum", "as priced", "By the prices of the config."),
    ),
    "Samples": _docs(
        ("rollout/completion_tokens", "mean", "tokens", "That the policy wrote, a sample."),
        ("rollout/truncated", "mean", "share", "Of the samples: stopped by a limit."),
        ("rollout/groups_with_signal", "mean", "share", "Of the groups: their rewards differ."),
        ("rollout/staleness", "mean", "versions", "Of the weights, between a group's admission and its training."),
        ("rollout/staleness_max", "max", "versions", "The largest; at most `rollout.max_staleness`."),
        ("rollout/trained_samples", "sum", "samples", "Trained on."),
        ("rollout/filtered_samples", "sum", "samples", "Fine by themselves, but their group was dropped."),
        ("rollout/aborted_samples", "sum", "samples", "Stopped by the scheduler."),
        ("rollout/failed_samples", "sum", "samples", "Given up, with a reason in the journal."),
        ("rollout/failed_fraction", "mean", "share", "`failed_samples` of all that ended."),
        ("rollout/replayed_samples", "sum", "samples", "Episodes whose place was lost, played again: no failures."),
        (
            "rollout/recalled_samples",
            "sum",
            "samples",
            "Had ended before the run was interrupted, or their group sent back: not drawn again.",
        ),
        (
            "rollout/deferred_groups",
            "last",
            "groups",
            "Prompts that wait for a step of their own (`rollout.long_rounds`). Where they are fewer than before, it was one.",
        ),
        (
            "rollout/continued_tokens",
            "sum",
            "tokens",
            "Written by then of samples that had not ended: those went on.",
        ),
        (
            "rollout/discarded_tokens",
            "sum",
            "tokens",
            "Written by then and drawn anew: the weights that wrote them are too old, or were lost.",
        ),
        ("rollout/<domain>/trained_groups", "sum", "groups", "Of one domain, where there are several."),
        ("rollout/<domain>/dropped_groups", "sum", "groups", "Dropped, for want of a signal or of samples."),
        ("rollout/<domain>/ceded_groups", "sum", "groups", "That the domain owed a step and others gave instead."),
        ("rollout/early_tokens", "mean", "tokens", "Of the half of each group that ended first (`rollout.redundant`)."),
        ("rollout/late_tokens", "mean", "tokens", "Of the half that ended last: much longer means that long ones are lost."),
        ("rollout/early_reward", "mean", "", "As `early_tokens`."),
        ("rollout/late_reward", "mean", "", "As `late_tokens`."),
        ("data/tried_prompts", "last", "prompts", "With a pass rate of their own, for a curriculum."),
        ("data/pass_rate", "last", "share", "Its mean over them."),
        ("data/resting_prompts", "last", "prompts", "Passed over as too easy or too hard."),
        ("data/<domain>/level", "last", "", "The highest level that a curriculum draws from."),
    ),
    "Environments": _docs(
        ("env/live", "last", "environments", "That exist now."),
        ("env/stuck_threads", "last", "threads", "Held by calls that never returned."),
        ("env/waiting_s", "mean", "s", "An episode, for its turn to have an environment."),
        ("env/<domain>/success", "mean", "share", "Of the episodes, as the environment says at their end."),
        ("env/<domain>/turns", "mean", "turns", "An episode."),
        ("env/<domain>/num_actions", "mean", "actions", "An episode."),
        ("env/<domain>/valid", "mean", "share", "Of the turns: with a valid action."),
        ("env/<domain>/effective", "mean", "share", "Of the turns: that changed something."),
        ("env/<domain>/reset_s", "mean", "s", "A reset."),
        ("env/<domain>/step_s", "mean", "s", "A step."),
        ("env/<domain>/step_max_s", "max", "s", "The longest step."),
        ("env/<domain>/failures", "sum", "episodes", "Failed in the environment."),
        ("env/<domain>/lost", "sum", "episodes", "Whose process or node died; they are played again."),
        ("env/<domain>/<name>", "mean", "", "Whatever else the environment gives in `info`, by turn."),
    ),
    "Engines": _docs(
        ("engine/alive", "last", "engines", "That serve."),
        ("engine/in_flight", "last", "requests", "Asked and not yet answered."),
        ("engine/tokens", "sum", "tokens", "Written since the last step, also of samples that are not finished."),
        ("engine/prefill_tokens", "sum", "tokens", "Read."),
        ("engine/reused_tokens", "sum", "tokens", "Not read again, since their keys and values were at hand."),
        ("engine/gave_way", "sum", "requests", "Running ones that were put back since the cache was full, each time."),
        ("engine/drafted_tokens", "sum", "tokens", "Guesses at tokens to come that a step read along (`engine.draft`)."),
        ("engine/accepted_tokens", "sum", "tokens", "Those of them that were drawn: each saved a sequence a step."),
        ("engine/busy_s", "sum", "s", "Time with work, all engines together."),
        ("engine/tokens_per_s", "sum", "tokens/s", "While at work, all engines together."),
        ("engine/occupancy", "mean", "share", "Of `engine.max_running` sequences, how many ran in a step."),
        ("push/bytes", "last", "bytes", "Of weights, in one push."),
        ("push/tries", "last", "", "1 unless a push between processes broke off."),
    ),
    "Advantages and KL": _docs(
        ("advantage/mean", "last", "", "Over the tokens in the loss."),
        ("advantage/std", "last", "", "Its standard deviation."),
        ("advantage/max", "last", "", "The largest without its sign."),
        ("kl/coef", "last", "", "The coefficient, which moves if it is adaptive."),
        ("kl/reference", "last", "nats a token", "From the policy that drew the samples to the reference (k3)."),
    ),
    "Training": _docs(
        ("train/loss", "mean", "", "Over the optimizer steps."),
        ("train/grad_norm", "last", "", "Before it is clipped, of the last optimizer step."),
        ("train/grad_norm_max", "max", "", "Of all of them."),
        ("train/lr", "last", "", "The learning rate."),
        ("train/tokens", "sum", "tokens", "Through the model, prompts included, all epochs."),
        ("train/loss_tokens", "sum", "tokens", "Of those, in the loss."),
        ("train/tokens_per_s", "mean", "tokens/s", "`train/tokens` over `time/train_s`."),
        ("train/padding_avoided", "mean", "share", "Of a padded batch, what would have been padding."),
        ("train/ratio", "mean", "", "Of the policy to the old one, a token."),
        ("train/ratio_max", "max", "", "The largest."),
        ("train/kl_old", "mean", "nats a token", "From the old policy (k3)."),
        ("train/clip_fraction", "mean", "share", "Of the tokens: held back by the loss, so that they have no gradient."),
        ("train/entropy", "mean", "nats", "Minus the log-prob of the sampled tokens: an estimate."),
        ("train/full_entropy", "mean", "nats", "Of the whole distribution, where `entropy_coef` is set."),
        ("train/sampler_gap", "mean", "nats", "Between the trainer's and the engine's log-prob of a token, without sign."),
        ("train/sampler_gap_max", "max", "nats", "The largest."),
        ("train/sampler_gap_current", "mean", "nats", "The same, of tokens that the weights of the moment wrote (`guard`)."),
        ("train/sampler_gap_stale", "mean", "nats", "The same, of tokens of older weights."),
        ("train/routes_differ", "mean", "share", "Of layers: where a token would have gone to other experts (docs/moe.md)."),
        ("train/kl_ref", "mean", "nats a token", "The KL penalty in the loss, by `kl.estimator`."),
        ("train/teacher_divergence", "mean", "nats a token", "From the teachers' distributions (`distill`)."),
        ("train/correction_<kind>_weight", "mean", "", "Importance weights by level and mode, before their bound."),
        ("train/correction_<kind>_weight_max", "max", "", "The largest."),
        ("train/correction_<kind>_bounded", "mean", "share", "Beyond the bound."),
        ("train/correction_<kind>_effective", "mean", "share", "The effective sample size that the weights leave."),
        ("train/correction_<kind>_kl", "mean", "nats a token", "From the sampler to the trainer's policy (k3)."),
        ("train/rejection_<kind>_distance", "mean", "", "By level, what is taken and of which distance."),
        ("train/rejection_<kind>_rejected", "mean", "share", "Of the tokens: rejected."),
    ),
    "Critic": _docs(
        ("critic/loss", "mean", "", "As `train/loss`."),
        ("critic/error", "mean", "", "Squared, of the value that was foretold."),
        ("critic/mean", "mean", "", "Value that was foretold."),
        ("critic/grad_norm", "last", "", "As the policy's, and so are the following."),
        ("critic/grad_norm_max", "max", "", "As `train/grad_norm_max`."),
        ("critic/lr", "last", "", "As `train/lr`."),
        ("critic/tokens", "sum", "tokens", "As `train/tokens`."),
        ("critic/loss_tokens", "sum", "tokens", "As `train/loss_tokens`."),
        ("critic/tokens_per_s", "mean", "tokens/s", "As `train/tokens_per_s`."),
        ("critic/padding_avoided", "mean", "share", "As `train/padding_avoided`."),
        ("train/value_loss", "mean", "", "Of a critic that shares the policy's trunk, before its weight."),
        ("train/value_error", "mean", "", "As `critic/error`."),
        ("train/value_mean", "mean", "", "As `critic/mean`."),
    ),
    "Learning from preferences and teachers": _docs(
        (
            "train/accuracy",
            "mean",
            "share",
            "Pairs whose chosen answer has the larger reward; KTO: answers on their right side.",
        ),
        ("train/margin", "mean", "", "Reward of the chosen answer above the rejected one."),
        ("train/chosen_reward", "mean", "", "Implicit in DPO: beta × log ratio to the reference; the score of a reward model."),
        ("train/rejected_reward", "mean", "", "As `chosen_reward`."),
        ("train/chosen_logp", "mean", "nats", "Of a whole answer: it may fall while the margin grows."),
        ("train/rejected_logp", "mean", "nats", "As `chosen_logp`."),
        ("train/preference_loss", "mean", "", "Without the SFT term, where there is one."),
        ("train/sft_loss", "mean", "nats a token", "The SFT term, before its weight."),
        ("train/good_reward", "mean", "", "KTO: of the answers that are good."),
        ("train/bad_reward", "mean", "", "KTO: of those that are bad."),
        ("train/reference_point", "last", "", "KTO: how far the policy is from the reference."),
        ("train/divergence", "mean", "nats a token", "`pipeline: distill`: from the teacher."),
        ("train/cross_entropy", "mean", "nats a token", "`pipeline: distill`: of the rows, where `sft_weight` is set."),
    ),
    "Held-out data": _docs(
        ("eval/reward", None, "", "The mean over samples."),
        ("eval/pass@<k>", None, "share", "A prompt is passed by at least one of k samples; an unbiased estimate."),
        ("eval/avg@<k>", None, "share", "pass@1, under the number of its samples."),
        ("eval/maj@<k>", None, "share", "The most frequent of k answers is right."),
        ("eval/pass@1_low", None, "share", "The 95 % interval of pass@1, over prompts."),
        ("eval/pass@1_high", None, "share", "Its upper end."),
        ("eval/average", None, "share", "pass@1 with every domain counting alike, where there are several."),
        ("eval/average_low", None, "share", "Its 95 % interval."),
        ("eval/average_high", None, "share", "Its upper end."),
        ("eval/<domain>/<name>", None, "", "pass@k, avg@k, maj@k and the interval of one domain."),
        ("eval/completion_tokens", None, "tokens", "That the policy wrote, a sample."),
        ("eval/turns", None, "turns", "An episode."),
        ("eval/failed", None, "share", "Of the samples."),
        ("eval/loss", None, "", "The loss on held-out rows; SFT and distillation: nats a token."),
        ("eval/divergence", None, "nats a token", "`pipeline: distill`: from the teacher."),
        *((f"eval/{name}", None, unit, f"As `train/{name}`, of held-out rows.") for name, unit in _OF_PREFERENCES.items()),
    ),
    "Replays": _docs(
        ("replay/drawn_tokens", "sum", "tokens", "`reroll replay --draw`: drawn again by the weights that wrote them."),
        ("replay/differing_tokens", "sum", "tokens", "Of these, from the first of a completion that came out otherwise on."),
        (
            "replay/logp_gap_max",
            "max",
            "nats",
            "How far log-probs are apart, then and now, at most.",
        ),
    ),
}
"""By what one looks for."""
