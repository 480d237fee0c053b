"""pass@k is the unbiased estimator, and a failing reward is a failed sample, not a failed evaluation."""

from __future__ import annotations

import itertools

import pytest

from reroll.errors import RewardError
from reroll.pipeline.evaluate import evaluate, pass_at_k
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn


@pytest.mark.parametrize(("num_samples", "num_passed", "k"), list(itertools.product([6], range(7), range(1, 7))))
def test_pass_at_k_counts_the_subsets_that_hold_a_pass(num_samples: int, num_passed: int, k: int) -> None:
    outcomes = [True] * num_passed + [False] * (num_samples - num_passed)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(num_samples=num_samples, num_passed=num_passed, k=k) == pytest.approx(
        sum(any(subset) for subset in subsets) / len(subsets)
    )


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="1 to 3"):
        pass_at_k(num_samples=3, num_passed=1, k=4)


async def test_an_evaluation_reports_each_domain_and_survives_failing_rewards() -> None:
    prompts = [
        Prompt(id=f"{domain}/{i}", messages=({"role": "user", "content": "?"},), domain=domain, answer=str(i))
        for domain in ("sums", "words")
        for i in range(3)
    ]
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))

    async def episode(prompt: Prompt, id: str, seed: int) -> Trajectory:
        turn = Turn(prompt_ids=(0,), completion=completion, text=f"{seed}")
        return Trajectory(id=id, turns=(turn,), status=Status.COMPLETED)

    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        if prompt.id == "words/0":
            raise RewardError("broken")
        return Score(value=float(prompt.domain == "sums"))

    result = await evaluate(prompts, episode, score, samples=2, threshold=1.0, seed=5)
    values = result.stats().values_by_name()
    assert values["eval/sums/pass@1"] == 1.0
    assert values["eval/words/pass@1"] == 0.0
    assert values["eval/pass@2"] == 0.5
    assert values["eval/failed"] == pytest.approx(1 / 6)
    texts = [sample.text for samples in result.trajectories for sample in samples]
    assert len(set(texts)) == len(texts), "every sample draws with its own seed"
    assert result.as_dict()["prompts"][3]["samples"][0]["reason"] == "broken"
