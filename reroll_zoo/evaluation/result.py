"""What an evaluation found: how often answers pass, by domain, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reroll.config.parts import EvalConfig
from reroll.observe.metrics import Last, Stats
from reroll.types import Prompt, Status, Trajectory
from reroll_zoo.evaluation import statistics
from reroll_zoo.evaluation.statistics import Estimate


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The policy's trajectories on every held-out prompt, and how often they pass."""

    prompts: tuple[Prompt, ...]
    trajectories: tuple[tuple[Trajectory, ...], ...]
    """For each prompt, its samples."""
    settings: EvalConfig

    @property
    def domains(self) -> list[str]:
        return sorted({prompt.domain for prompt in self.prompts})

    def estimates(self, domain: str | None = None) -> dict[str, Estimate]:
        """Metrics of a domain's prompts, or of all, with 95 % intervals over prompts: pass@1, 2, 4, … and n; of several
        samples also avg@n, which is pass@1 under the name of its sample count, and maj@k where the reward says what was
        answered. Over several domains, k goes as far as every domain has samples; avg@n needs that all have n."""
        domains = self.domains if domain is None else [domain]
        rows = [
            ([sample.answer for sample in samples], [self._passes(prompt, sample) for sample in samples])
            for prompt, samples in zip(self.prompts, self.trajectories, strict=True)
            if prompt.domain in domains
        ]
        num, most = (choose(len(passed) for _, passed in rows) for choose in (min, max))
        found = {}
        for k in _powers_of_two(num):
            rates = [statistics.pass_at_k(num_samples=len(passed), num_passed=sum(passed), k=k) for _, passed in rows]
            found[f"pass@{k}"] = statistics.mean_over_prompts(rates, num_draws=num // k)
        if num == most > 1:
            found[f"avg@{num}"] = found["pass@1"]
        if num > 1 and all(map(self._has_answers, domains)):
            for k in _powers_of_two(num)[1:]:
                rates = [statistics.maj_at_k(answers, passed, k=k) for answers, passed in rows]
                found[f"maj@{k}"] = statistics.mean_over_prompts(rates, num_draws=num // k)
        return found

    @property
    def pass_rate(self) -> float:
        """pass@1 of all prompts."""
        return self.estimates()["pass@1"].value

    def average(self) -> Estimate:
        """pass@1, every domain counting alike."""
        return statistics.average([self.estimates(domain)["pass@1"] for domain in self.domains])

    def stats(self) -> Stats:
        """The estimates and the interval of pass@1, of all and, where there are several, of each domain; mean reward and
        length, failures."""
        named, values = {"": self.estimates()}, self.means()
        if len(self.domains) > 1:
            named |= {f"{domain}/": self.estimates(domain) for domain in self.domains}
            values |= {"eval/average": self.average().value, **_bounds("eval/average", self.average())}
        for prefix, found in named.items():
            values |= {f"eval/{prefix}{name}": estimate.value for name, estimate in found.items()}
            values |= _bounds(f"eval/{prefix}pass@1", found["pass@1"])
        return Stats({name: Last(value) for name, value in values.items()})

    def as_dict(self) -> dict[str, Any]:
        """Numbers and every completion, for a JSON file."""
        rows = [
            {
                "prompt": prompt.id,
                "domain": prompt.domain,
                "question": prompt.messages[-1]["content"] if prompt.messages else dict(prompt.extra),
                "answer": prompt.answer,
                "samples": [self._as_row(prompt, sample) for sample in samples],
            }
            for prompt, samples in zip(self.prompts, self.trajectories, strict=True)
        ]
        return {
            "settings": self.settings.model_dump(mode="json"),
            "metrics": self.stats().values_by_name(),
            "all": _plain(self.estimates()),
            "average": _plain({"pass@1": self.average()}),
            "domains": {domain: _plain(self.estimates(domain)) for domain in self.domains},
            "prompts": rows,
        }

    def _as_row(self, prompt: Prompt, sample: Trajectory) -> dict[str, Any]:
        return {
            "text": sample.text,
            "answer": sample.answer,
            "reward": sample.reward,
            "passed": self._passes(prompt, sample),
            "status": str(sample.status),
            "reason": sample.reason,
        }

    def _has_answers(self, domain: str) -> bool:
        return any(
            sample.answer is not None
            for prompt, samples in zip(self.prompts, self.trajectories, strict=True)
            if prompt.domain == domain
            for sample in samples
        )

    def means(self) -> dict[str, float]:
        """Means over all samples."""
        everything = [sample for samples in self.trajectories for sample in samples]
        totals = {
            "eval/reward": sum(sample.reward for sample in everything),
            "eval/completion_tokens": sum(sample.num_completion_tokens for sample in everything),
            "eval/turns": sum(len(sample.turns) for sample in everything),
            "eval/failed": sum(sample.status is Status.FAILED for sample in everything),
        }
        return {name: total / len(everything) for name, total in totals.items()}

    def _passes(self, prompt: Prompt, sample: Trajectory) -> bool:
        """An environment that tells success has the say; elsewhere the reward has."""
        success, threshold = sample.score.named.get("success"), self.settings.of(prompt.domain).threshold
        return sample.is_usable and (sample.reward >= threshold if success is None else success >= 1)


def _plain(estimates: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    return {name: {"value": one.value, "low": one.low, "high": one.high} for name, one in estimates.items()}


def _bounds(name: str, estimate: Estimate) -> dict[str, float]:
    return {f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _powers_of_two(limit: int) -> list[int]:
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
    return powers if powers[-1] == limit else [*powers, limit]
