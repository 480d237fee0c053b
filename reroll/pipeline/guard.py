"""The guard: notices that the engine does not write what is trained, and says where to look.

Trainer and engine each compute the log-prob of every token that the engine drew. By the weights that drew it they must say the
same, up to what their precision rounds. If they do not, a push did not arrive, an adapter is missing, a context was mixed up,
and the run would go on learning from what its policy never said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reroll.algo.segments import segment_sum
from reroll.config.parts import EmbeddedEngineConfig
from reroll.config.tree import RlvrConfig
from reroll.observe.metrics import Mean, Stats
from reroll.tokens.batch import Batch
from reroll.training.cluster import TrainCluster

MAX_GAP = {"fp32": 1e-3, "bf16": 0.15}
"""Mean distance in nats. Measured: below 1e-5 in fp32; 0.007 to 0.03 in bf16, where single tokens may be more than 1 apart."""
FOR_OTHER_ENGINES = 2.0
"""So many times as far an engine may be whose kernels are not the trainer's."""
MIN_TOKENS = 32
"""A mean over fewer tells nothing."""
NUM_SHOWN = 5
EXPLAINS = 0.5
"""What brings the gap below this share of it is taken for its cause."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A gap that precision does not explain."""

    gap: float
    limit: float
    num_tokens: int
    is_stale: bool
    """Whether it was found on tokens of older weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The policy's log-probs of the batch, [T] each: as it is, and as it would be if something were missing."""

    logp: Tensor
    without: dict[str, Tensor] = field(default_factory=dict)
    """By what it is that the engine may have left out: `adapter`, `temperature`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNames:
    """How to speak of tokens to a user."""

    prompts: Sequence[str]
    """The prompt of each episode."""
    episode: Tensor
    """[T] which episode wrote the token."""
    decode: Callable[[Sequence[int]], str]


def max_gap(config: RlvrConfig) -> float:
    """What trainer and engine may be apart by: the coarser precision of the two decides."""
    if config.guard.max_gap is not None:
        return config.guard.max_gap
    limit = MAX_GAP[config.policy.strategy.precision]
    if not isinstance(config.engine, EmbeddedEngineConfig):
        return FOR_OTHER_ENGINES * limit
    return limit if config.engine.precision == "same" else max(limit, MAX_GAP[config.engine.precision])


def alarm_of(stats: Stats, config: RlvrConfig) -> Alarm | None:
    """Whether an update reports a gap that cannot be: on tokens of the weights of the moment, or on those of older ones."""
    limits = {"current": max_gap(config), "stale": max(config.guard.max_stale_gap, max_gap(config))}
    for age, limit in limits.items():
        found = stats.get(f"train/sampler_gap_{age}")
        # Not a number is beyond any limit too.
        if config.guard.enabled and isinstance(found, Mean) and found.weight >= MIN_TOKENS and not found.value <= limit:
            return Alarm(found.value, limit, int(found.weight), age == "stale")
    return None


async def gather_evidence(policy: TrainCluster, batch: Batch, *, has_adapter: bool) -> Evidence:
    """Ask the policy again, which has made its update in the meantime: a small step beside what gives an alarm."""
    without = {}
    if has_adapter:
        without["adapter"] = await policy.logprobs(batch, adapter=False)
    if isinstance(batch.temperature, Tensor) or batch.temperature != 1:
        without["temperature"] = await policy.logprobs(batch.replace(temperature=1.0))
    return Evidence(logp=await policy.logprobs(batch), without=without)


def report(alarm: Alarm, evidence: Evidence, batch: Batch, names: TokenNames, *, version: int) -> str:
    """What was found, the tokens that are furthest apart, and which part of the stack to look at."""
    versions = _version(batch)
    suspects = batch.loss_mask & ((versions < version) if alarm.is_stale else (versions == version)) & (versions >= 0)
    gap = torch.where(suspects, (evidence.logp - batch.logp).abs(), 0.0)
    written_by = f"weights older than version {version}" if alarm.is_stale else f"version {version} of the weights"
    lines = [
        f"the engine does not write what is trained: its log-probs of {alarm.num_tokens:,} tokens by {written_by} are "
        f"{alarm.gap:.3g} nats from the trainer's on average, where {alarm.limit:g} is the most that is explained by precision"
        f"{' and age' if alarm.is_stale else ''}. The update of this step is not kept; the last checkpoint is intact.",
        "Furthest apart:",
        *_furthest(gap, evidence, batch, names),
        f"Look at: {_where_to_look(gap, suspects, evidence, batch, version=version, limit=alarm.limit)}",
        "If this is how far the two are meant to be apart, set guard.max_gap (guard.max_stale_gap for older weights), or "
        "guard.enabled=false.",
    ]
    return "\n".join(lines)


def _furthest(gap: Tensor, evidence: Evidence, batch: Batch, names: TokenNames) -> list[str]:
    positions, versions = batch.positions, _version(batch)
    lines = []
    for token in gap.topk(min(NUM_SHOWN, len(gap))).indices.tolist():
        word, prompt = names.decode([int(batch.ids[token])]), names.prompts[int(names.episode[token])]
        lines.append(
            f"  {word!r} (id {int(batch.ids[token])}), token {int(positions[token])} of a row of prompt {prompt}, "
            f"turn {int(batch.turn[token])}, version {int(versions[token])}: "
            f"engine {float(batch.logp[token]):.3f}, trainer {float(evidence.logp[token]):.3f}"
        )
    return lines


def _where_to_look(gap: Tensor, suspects: Tensor, evidence: Evidence, batch: Batch, *, version: int, limit: float) -> str:
    """The part of the stack that such a gap comes from."""
    mean = float(gap[suspects].mean())
    for name, logp in evidence.without.items():
        if float((logp - batch.logp).abs()[suspects].mean()) < EXPLAINS * mean:
            return _LEFT_OUT[name]
    counts = segment_sum(suspects.float(), batch.sequence_index, len(batch))
    is_off = segment_sum(gap, batch.sequence_index, len(batch)) > limit * counts
    num_off, num_rows = int(is_off.sum()), int((counts > 0).sum())
    if 0 < num_off < num_rows / 2:
        far = suspects & (gap > limit)
        which = "all of them in turns after the first" if batch.turn[far].min() > 0 else "first turns among them"
        return (
            f"the contexts of {num_off} of {num_rows} rows, {which}; the other rows agree, so the weights are right. What the "
            "engine had read is not what is trained on: its cached prefixes (infer/), a history that was edited, another "
            "tokenizer or chat template (rollout/)."
        )
    return (
        f"the weights: most rows are off, so the engine holds others than the trainer's version {version}. A push that did not "
        "arrive whole (weights, docs/weights.md), an engine that was started from another model, or one that rounds weights "
        "to fewer bits (engine)."
    )


_LEFT_OUT = {
    "adapter": "the adapter: the engine's log-probs are those of the model without it. It was not pushed, or the engine does "
    "not apply it (weights, engine, docs/weights.md).",
    "temperature": "the temperature: the engine's log-probs are those at temperature 1. The engine must report them at the "
    "temperature it draws at (engine).",
}


def _version(batch: Batch) -> Tensor:
    return torch.full_like(batch.turn, -1) if batch.version is None else batch.version
