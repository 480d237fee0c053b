"""An evaluation reports each domain by its own settings; a failing reward is a failed sample, not a failed evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from reroll.config.parts import DomainEvalConfig, EvalConfig
from reroll.errors import RewardError
from reroll.pipeline.evaluate import EvalResult, evaluate, num_episodes
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn
from reroll_zoo.evaluation.command import how_drawn
from reroll_zoo.evaluation.result import Evaluation

COMPLETION = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))


def prompts_of(*domains: str, num: int = 3) -> list[Prompt]:
    messages = ({"role": "user", "content": "?"},)
    return [
        Prompt(id=f"{domain}/{i}", messages=messages, domain=domain, answer=str(i)) for domain in domains for i in range(num)
    ]


async def episode(prompt: Prompt, id: str, seed: int) -> Trajectory:
    turn = Turn(prompt_ids=(0,), completion=COMPLETION, text=f"{seed}")
    return Trajectory(id=id, turns=(turn,), status=Status.COMPLETED)


def voting(answers: Sequence[str | None], *, right: str) -> object:
    """Sample s answers answers[s]."""

    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        answer = answers[int(trajectory.id.rsplit("/")[-1])]
        return Score(value=float(answer == right), answer=answer)

    return score


async def play(prompts: Sequence[Prompt], score: object, **settings: object) -> EvalResult:
    return await evaluate(prompts, episode, score, settings=EvalConfig(**settings), seed=5)  # type: ignore[arg-type]


async def test_an_evaluation_reports_each_domain_and_survives_failing_rewards() -> None:
    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        if prompt.id == "words/0":
            raise RewardError("broken")
        return Score(value=float(prompt.domain == "sums"))

    result = await play(prompts_of("sums", "words"), score, samples=2)
    values = result.stats().values_by_name()
    assert values["eval/sums/pass@1"] == 1.0
    assert values["eval/words/pass@1"] == 0.0
    assert values["eval/pass@2"] == 0.5
    assert values["eval/failed"] == pytest.approx(1 / 6)
    texts = [sample.text for samples in result.trajectories for sample in samples]
    assert len(set(texts)) == len(texts), "every sample draws with its own seed"
    assert result.as_dict()["prompts"][3]["samples"][0]["reason"] == "broken"


async def test_a_majority_may_be_right_more_often_than_its_samples_and_rarer_than_the_best_of_them() -> None:
    result = await play(prompts_of("sums"), voting(["4", "4", "5", None], right="4"), samples=4)
    values = result.stats().values_by_name()
    assert values["eval/pass@1"] == values["eval/avg@4"] == 0.5
    assert values["eval/maj@4"] == 1.0
    assert values["eval/maj@2"] == pytest.approx((1 + 0.5 + 0.5 + 1 + 1 + 0) / 6)
    assert values["eval/pass@4"] == 1.0
    assert result.as_dict()["prompts"][0]["samples"][2]["answer"] == "5"


async def test_without_answers_there_is_no_majority_to_report() -> None:
    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        return Score(value=1.0, answer="1" if prompt.domain == "sums" else None)

    values = (await play(prompts_of("sums", "words"), score, samples=2)).stats()
    assert "eval/sums/maj@2" in values
    assert "eval/words/maj@2" not in values
    assert "eval/maj@2" not in values, "over all prompts it would be that of a part of them"


async def test_one_sample_has_neither_a_majority_nor_an_average() -> None:
    names = (await play(prompts_of("sums"), voting(["4"], right="4"))).stats()
    assert {"eval/pass@1", "eval/pass@1_low", "eval/pass@1_high"} == {name for name in names if "@" in name}


async def test_each_domain_has_the_samples_and_the_threshold_of_its_own_settings() -> None:
    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        return Score(value=0.5)

    settings = {"samples": 1, "domains": {"words": {"samples": 4, "threshold": 0.5}}}
    prompts = prompts_of("sums", "words")
    assert num_episodes(prompts, EvalConfig(**settings)) == 3 * 1 + 3 * 4  # type: ignore[arg-type]
    result = await play(prompts, score, **settings)
    assert [len(samples) for samples in result.trajectories] == [1, 1, 1, 4, 4, 4]
    values = result.stats().values_by_name()
    assert (values["eval/sums/pass@1"], values["eval/words/pass@4"]) == (0.0, 1.0)
    assert "eval/pass@2" not in values, "one domain has no two samples"
    assert "eval/words/avg@4" in values
    assert not any(name.startswith("eval/avg") for name in values), "no one number of samples holds for all"
    texts = [sample.text for samples in result.trajectories for sample in samples]
    assert texts == [str(seed) for seed in range(5, 20)]


async def test_the_average_counts_every_domain_alike_however_many_prompts_it_has() -> None:
    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        return Score(value=float(prompt.domain == "sums"))

    result = await play([*prompts_of("sums", num=9), *prompts_of("words", num=1)], score)
    values = result.stats().values_by_name()
    assert (values["eval/pass@1"], values["eval/average"]) == (0.9, 0.5)
    assert values["eval/average_low"] < 0.5 < values["eval/average_high"]
    told = result.as_dict()
    assert told["average"]["pass@1"]["value"] == 0.5
    assert set(told["domains"]) == {"sums", "words"}


async def test_an_environment_that_tells_success_has_the_say() -> None:
    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        return Score(value=5.0, parts={"success": 0.0})

    assert (await play(prompts_of("maze"), score)).estimates()["pass@1"].value == 0.0


def test_the_report_says_how_the_samples_were_drawn() -> None:
    prompts = (Prompt(id="a", messages=(), domain="math"), Prompt(id="b", messages=(), domain="code"))
    greedy = Evaluation(prompts, ((), ()), EvalConfig())
    assert how_drawn(greedy) == "2 prompts, greedy"
    mixed = EvalConfig(samples=4, temperature=0.6, domains={"code": DomainEvalConfig(samples=1, temperature=0.0)})
    assert how_drawn(Evaluation(prompts, ((), ()), mixed)) == "2 prompts, code greedy, math 4 samples each at temperature 0.6"
