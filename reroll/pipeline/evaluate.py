"""Held-out evaluation: pass@1 and pass@k with the same episodes and rewards that training uses."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reroll.errors import RewardError
from reroll.observe.metrics import Last, Stats
from reroll.rollout.scheduler import Episode, ScoreOne
from reroll.types import Prompt, Status, Trajectory


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What the policy said to every held-out prompt, and how often that passes."""

    prompts: tuple[Prompt, ...]
    trajectories: tuple[tuple[Trajectory, ...], ...]
    """For each prompt, its samples."""
    threshold: float

    @property
    def num_samples(self) -> int:
        return len(self.trajectories[0])

    def pass_at(self, k: int, *, domain: str | None = None) -> float:
        """Chance that at least one of k samples passes: the unbiased estimate from n samples, averaged over prompts."""
        rates = [
            pass_at_k(num_samples=len(samples), num_passed=sum(self._passes(sample) for sample in samples), k=k)
            for prompt, samples in zip(self.prompts, self.trajectories, strict=True)
            if domain in (None, prompt.domain)
        ]
        return sum(rates) / len(rates)

    def stats(self) -> Stats:
        """pass@1, 2, 4, … and n; per domain where there are several; mean reward and length; failures."""
        everything = [sample for samples in self.trajectories for sample in samples]
        values = {f"eval/pass@{k}": self.pass_at(k) for k in _powers_of_two(self.num_samples)}
        domains = sorted({prompt.domain for prompt in self.prompts})
        if len(domains) > 1:
            values |= {f"eval/{domain}/pass@1": self.pass_at(1, domain=domain) for domain in domains}
        values["eval/reward"] = sum(sample.reward for sample in everything) / len(everything)
        values["eval/completion_tokens"] = sum(sample.num_completion_tokens for sample in everything) / len(everything)
        values["eval/turns"] = sum(len(sample.turns) for sample in everything) / len(everything)
        values["eval/failed"] = sum(sample.status is Status.FAILED for sample in everything) / len(everything)
        return Stats({name: Last(value) for name, value in values.items()})

    def as_dict(self) -> dict[str, Any]:
        """Numbers and every completion, for a JSON file."""
        rows = [
            {
                "prompt": prompt.id,
                "domain": prompt.domain,
                "question": prompt.messages[-1]["content"] if prompt.messages else dict(prompt.extra),
                "answer": prompt.answer,
                "samples": [
                    {"text": sample.text, "reward": sample.reward, "status": str(sample.status), "reason": sample.reason}
                    for sample in samples
                ],
            }
            for prompt, samples in zip(self.prompts, self.trajectories, strict=True)
        ]
        return {"metrics": self.stats().values_by_name(), "prompts": rows}

    def _passes(self, sample: Trajectory) -> bool:
        """An environment that tells success has the say; elsewhere the reward has."""
        success = sample.reward_parts.get("success")
        return sample.is_usable and (sample.reward >= self.threshold if success is None else success >= 1)


async def evaluate(
    prompts: Sequence[Prompt],
    episode: Episode,
    score: ScoreOne,
    *,
    samples: int,
    threshold: float,
    seed: int,
    on_done: Callable[[], None] = lambda: None,
) -> EvalResult:
    """Play every prompt `samples` times, all at once: the engine batches them. `on_done` ticks a progress bar."""

    async def one(index: int, prompt: Prompt, sample: int) -> Trajectory:
        trajectory = await episode(prompt, f"{prompt.id}/{sample}", seed + index * samples + sample)
        if trajectory.is_usable:
            try:
                verdict = await score(prompt, trajectory)
                trajectory = replace(trajectory, reward=verdict.value, reward_parts=verdict.parts)
            except RewardError as error:
                trajectory = replace(trajectory, status=Status.FAILED, reason=str(error))
        on_done()
        return trajectory

    async with asyncio.TaskGroup() as group:
        tasks = [[group.create_task(one(i, prompt, s)) for s in range(samples)] for i, prompt in enumerate(prompts)]
    return EvalResult(tuple(prompts), tuple(tuple(task.result() for task in row) for row in tasks), threshold)


def pass_at_k(*, num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of the n samples, drawn without replacement, hold a pass."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be 1 to {num_samples}, got {k}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _powers_of_two(limit: int) -> list[int]:
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
    return powers if powers[-1] == limit else [*powers, limit]
