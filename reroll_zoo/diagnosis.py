"""Where to look when the engine does not write what is trained: which tokens are furthest apart, and what explains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from reroll.algo.episodes import Episodes
from reroll.algo.segments import segment_sum
from reroll.pipeline.guard import Alarm
from reroll.pipeline.rlvr import RlvrPipeline
from reroll.tokens.batch import Batch
from reroll.training.cluster import TrainCluster
from reroll.types import Group

NUM_SHOWN = 5
EXPLAINS = 0.5
"""What brings the gap below this share of it is taken for its cause."""


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


async def diagnose(
    pipeline: RlvrPipeline, alarm: Alarm, batch: Batch, episodes: Episodes, groups: Sequence[Group], *, version: int
) -> str:
    """Look at the batch again, and say what an alarm is about."""
    evidence = await gather_evidence(pipeline.policy, batch, has_adapter=pipeline.config.policy.lora is not None)
    prompts = [groups[group].prompt.id for group in episodes.group.tolist()]
    rows = episodes.spread(torch.arange(len(prompts)))
    decode = partial(pipeline.parts.episode_runner.renderer.decode, with_special=True)
    return report(alarm, evidence, batch, TokenNames(prompts=prompts, episode=rows, decode=decode), version=version)


async def gather_evidence(policy: TrainCluster, batch: Batch, *, has_adapter: bool) -> Evidence:
    """Ask the policy again, which has made its update in the meantime: a small step beside what gives an alarm."""
    without = {}
    if has_adapter:
        without["adapter"] = await policy.logprobs(batch, adapter=False)
    if isinstance(batch.temperature, Tensor) or batch.temperature != 1:
        without["temperature"] = await policy.logprobs(batch.replace(temperature=1.0))
    return Evidence(logp=await policy.logprobs(batch), without=without)


def report(alarm: Alarm, evidence: Evidence, batch: Batch, names: TokenNames, *, version: int) -> str:
    """The tokens that are furthest apart, and which part of the stack to look at."""
    versions = _version(batch)
    suspects = batch.loss_mask & ((versions < version) if alarm.is_stale else (versions == version)) & (versions >= 0)
    gap = torch.where(suspects, (evidence.logp - batch.logp).abs(), 0.0)
    lines = [
        "Furthest apart:",
        *_furthest(gap, evidence, batch, names),
        f"Look at: {_where_to_look(gap, suspects, evidence, batch, version=version, limit=alarm.limit)}",
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
