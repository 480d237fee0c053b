"""Which prompts a curriculum lets through, by how often they passed."""

import random
from collections import Counter

import pytest

from reroll.data.curriculum import Level
from reroll.data.prompts import PromptSampler, PromptSource
from reroll.types import Prompt
from reroll_zoo.curriculum.config import FilterCurriculumConfig, LadderCurriculumConfig, TargetCurriculumConfig
from reroll_zoo.curriculum.curricula import Filter, Ladder, Target, pass_rate


def prompt(number, domain="math"):
    return Prompt(id=f"{domain}/{number}", messages=(), domain=domain)


def sampler_over(num, curriculum, *, shuffle=True):
    source = PromptSource(prompts=[prompt(number) for number in range(num)], domain="math")
    return PromptSampler([source], seed=0, shuffle=shuffle, curriculum=curriculum)


def epoch(sampler, num):
    return [sampler.next("math").id for _ in range(num)]


def test_a_pass_is_a_reward_that_reaches_the_threshold():
    assert pass_rate([0.0, 0.5, 1.0, 2.0], threshold=1.0) == 0.5
    assert pass_rate([0.0, 0.5, 1.0, 2.0], threshold=0.5) == 0.75


def test_a_prompts_rate_is_an_exponential_mean_over_its_groups():
    curriculum = Target(TargetCurriculumConfig(kind="target", ema_weight=0.25, target=0.0, width=1.0))
    for rewards in ([1.0, 1.0], [0.0, 0.0], [0.0, 1.0]):
        curriculum.record_rewards(prompt(0), rewards)
    assert curriculum.state()["rates"]["math/0"] == pytest.approx(0.75 * 0.75 + 0.25 * 0.5)


def test_a_filter_passes_over_what_is_too_easy_or_too_hard_and_tries_it_again():
    sampler = sampler_over(4, FilterCurriculumConfig(kind="filter", low=0.2, high=0.8, retry_epochs=3), shuffle=False)
    rewards = {"math/0": [0.0, 0.0], "math/1": [0.0, 1.0], "math/2": [1.0, 1.0], "math/3": [0.0, 1.0]}
    for _ in range(4):
        one = sampler.next("math")
        sampler.record_rewards(one, rewards[one.id])
    assert epoch(sampler, 4) == ["math/1", "math/3", "math/1", "math/3"], "two epochs without the others"
    assert sampler.stats().values_by_name()["data/resting_prompts"] == 2
    assert epoch(sampler, 4) == ["math/0", "math/1", "math/2", "math/3"], "the third tries them again"
    assert epoch(sampler, 2) == ["math/1", "math/3"]


def test_a_prompt_that_became_learnable_comes_back_for_good():
    sampler = sampler_over(2, FilterCurriculumConfig(kind="filter", retry_epochs=2, ema_weight=1.0), shuffle=False)
    sampler.record_rewards(sampler.next("math"), [0.0, 0.0])
    assert epoch(sampler, 3) == ["math/1", "math/1", "math/0"]
    sampler.record_rewards(prompt(0), [0.0, 1.0])
    assert epoch(sampler, 4) == ["math/1", "math/0", "math/1", "math/0"]


def test_a_source_of_which_nothing_fits_still_gives_prompts():
    sampler = sampler_over(3, FilterCurriculumConfig(kind="filter", retry_epochs=1000))
    for number in range(3):
        sampler.record_rewards(prompt(number), [0.0])
    assert len(epoch(sampler, 10)) == 10


def test_a_target_draws_prompts_in_proportion_to_their_chance():
    config = TargetCurriculumConfig(kind="target", target=0.5, width=0.25, floor=0.05)
    sampler, curriculum = sampler_over(3, config), Target(config)
    for number, rewards in enumerate([[0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0]]):
        sampler.record_rewards(prompt(number), rewards)
        curriculum.record_rewards(prompt(number), rewards)
    chances = [curriculum.chance(prompt(number)) for number in range(3)]
    assert chances == pytest.approx([1.0, 0.60653, 0.13534], abs=1e-4)
    counts = Counter(epoch(sampler, 6000))
    for number, chance in enumerate(chances):
        assert counts[f"math/{number}"] / 6000 == pytest.approx(chance / sum(chances), abs=0.02)


def test_a_target_never_gives_a_prompt_up_and_tries_new_ones_at_once():
    config = TargetCurriculumConfig(kind="target", target=0.5, width=0.01, floor=0.1)
    curriculum = Target(config)
    curriculum.record_rewards(prompt(0), [0.0])
    assert curriculum.chance(prompt(0)) == 0.1
    assert curriculum.chance(prompt(1)) == 1.0


def ladder(**options):
    levels = [Level(domain="math", number=number, prompts=[prompt(number)]) for number in (3, 1, 7)]
    levels.append(Level(domain="code", number=5, prompts=[prompt(0, "code")]))
    return Ladder(LadderCurriculumConfig(kind="ladder", **{"groups": 3, "opens_at": 0.5, **options}), levels)


def test_a_ladder_opens_the_next_level_when_enough_groups_of_the_highest_open_one_went_well():
    curriculum = ladder()
    assert [curriculum.is_open("math", level) for level in (1, 3, 7)] == [True, False, False]
    assert curriculum.is_open("code", 5), "the lowest level of a domain is open, whatever its number"
    for rewards in ([1.0, 1.0], [0.0, 1.0]):
        curriculum.record_rewards(prompt(1), rewards)
    assert not curriculum.is_open("math", 3), "two groups are too few to tell"
    curriculum.record_rewards(prompt(1), [0.0, 0.0])
    assert [curriculum.is_open("math", level) for level in (1, 3, 7)] == [True, True, False]


def test_a_ladder_goes_by_the_latest_groups_of_the_highest_open_level_alone():
    curriculum = ladder()
    for rewards in ([0.0], [0.0], [0.0], [1.0], [0.0], [1.0]):
        curriculum.record_rewards(prompt(1), rewards)
    assert curriculum.is_open("math", 3)
    for _ in range(5):
        curriculum.record_rewards(prompt(1), [1.0])
    assert not curriculum.is_open("math", 7), "groups of the level below prove nothing about this one"
    for _ in range(3):
        curriculum.record_rewards(prompt(3), [1.0])
    assert curriculum.is_open("math", 7)
    for _ in range(9):
        curriculum.record_rewards(prompt(7), [1.0])
    assert curriculum.stats().values_by_name()["data/math/level"] == 7


def test_the_order_of_feedback_inside_a_step_does_not_matter_where_each_prompt_is_told_of_once():
    rewards = {number: [float(random.Random(number).random() < 0.5) for _ in range(4)] for number in range(9)}
    states = []
    for order in (range(9), reversed(range(9))):
        curriculum = Filter(FilterCurriculumConfig(kind="filter"))
        for number in order:
            curriculum.record_rewards(prompt(number), rewards[number])
        states.append(curriculum.state())
    assert states[0] == states[1]
