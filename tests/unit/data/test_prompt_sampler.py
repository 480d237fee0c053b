"""Domains, sources and curricula in one walk: shares hold, and a restored walk goes on as if it had never stopped."""

import json
import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from reroll.config.data import CurriculumConfig
from reroll.data.prompts import PromptSampler, PromptSource
from reroll.errors import DataError
from reroll.types import Prompt

CURRICULA = [
    None,
    {"kind": "filter", "retry_epochs": 2},
    {"kind": "target", "width": 0.1},
    {"kind": "ladder", "groups": 2, "opens_at": 0.5},
]
MIX = [("math", 2.0, 5, 0), ("math", 1.0, 3, 1), ("code", 1.5, 4, 0), ("code", 0.5, 1, 2), ("logic", 1.0, 7, 0)]


def make(mix=MIX, *, seed=0, curriculum=None):
    counts = Counter()
    sources = []
    for domain, weight, size, level in mix:
        ids = [f"{domain}/{counts[domain] + index}" for index in range(size)]
        counts[domain] += size
        prompts = [Prompt(id=id, messages=(), domain=domain) for id in ids]
        sources.append(PromptSource(prompts=prompts, domain=domain, weight=weight, level=level))
    config = curriculum and TypeAdapter(CurriculumConfig).validate_python(curriculum)
    return PromptSampler(sources, seed=seed, shuffle=True, curriculum=config)


def live(sampler, rng, num):
    """Draw, now and then out of turn, and tell of some groups, as a run does. Returns the prompts drawn."""
    drawn = []
    for _ in range(num):
        domain = sampler.next_domain() if rng.random() < 0.8 else rng.choice(list(sampler.shares))
        drawn.append(sampler.next(domain))
        assert drawn[-1].domain == domain
        if rng.random() < 0.7:
            sampler.record_rewards(drawn[-1], [float(rng.random() < 0.6) for _ in range(4)])
    return [prompt.id for prompt in drawn]


@settings(max_examples=60)
@given(st.sampled_from(CURRICULA), st.integers(0, 3), st.integers(0, 80))
def test_a_restored_sampler_goes_on_as_if_it_had_never_stopped(curriculum, seed, num_before):
    whole = make(seed=seed, curriculum=curriculum)
    live(whole, random.Random(seed), num_before)
    resumed = make(seed=seed, curriculum=curriculum)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert live(resumed, random.Random(9), 60) == live(whole, random.Random(9), 60)


def test_a_domains_share_is_that_of_its_sources_and_holds_at_every_turn():
    sampler = make()
    assert sampler.shares == {"math": 3.0, "code": 2.0, "logic": 1.0}
    counts = Counter()
    for num in range(1, 200):
        counts[sampler.next_domain()] += 1
        for domain, share in sampler.shares.items():
            assert abs(counts[domain] - Fraction(num * int(share), 6)) < 1


def test_weights_add_up_as_the_decimals_they_are_written_as():
    sampler = make([("a", 0.1, 1, 0), ("a", 0.2, 1, 0), ("b", 0.3, 1, 0)])
    turns = [sampler.next_domain() for _ in range(1000)]
    assert all(turns[: 2 * num].count("a") == num for num in range(500))


def test_drawing_out_of_turn_does_not_change_whose_turn_it_is():
    steady, busy = make(), make()
    for _ in range(50):
        assert steady.next_domain() == busy.next_domain()
        busy.next("logic")


def test_inside_a_domain_its_sources_are_mixed_by_weight():
    sampler = make()
    drawn = Counter(int(sampler.next("math").id.split("/")[1]) < 5 for _ in range(30))
    assert drawn == {True: 20, False: 10}


def test_a_ladder_leaves_the_shares_of_domains_alone_and_mixes_open_levels_by_weight():
    sampler = make(curriculum={"kind": "ladder", "groups": 2, "opens_at": 0.5})
    easy = {f"math/{index}" for index in range(5)}
    assert all(sampler.next("math").id in easy for _ in range(20))
    for _ in range(2):
        sampler.record_rewards(sampler.next("math"), [1.0, 0.0])
    drawn = Counter(sampler.next("math").id in easy for _ in range(30))
    assert drawn == {True: 20, False: 10}, "the level that opened does not catch up on what it missed"
    assert all(sampler.next("code").id != "code/4" for _ in range(20)), "each domain climbs by itself"
    assert Counter(sampler.next_domain() for _ in range(60)) == {"math": 30, "code": 20, "logic": 10}
    assert sampler.stats().values_by_name() == {"data/math/level": 1, "data/code/level": 0, "data/logic/level": 0}


@pytest.mark.parametrize(
    "other",
    [
        make(MIX[:-1]),
        make(seed=1),
        make(curriculum={"kind": "filter"}),
        make([(*MIX[0][:3], 4), *MIX[1:]]),
        make([("algebra", *MIX[0][1:]), *MIX[1:]]),
    ],
)
def test_a_state_of_other_data_or_another_curriculum_is_refused(other):
    with pytest.raises(DataError, match="differ from those of the checkpoint"):
        make().restore(other.state())


def test_a_group_of_which_no_sample_was_usable_tells_nothing():
    sampler = make(curriculum={"kind": "filter"})
    sampler.record_rewards(sampler.next("math"), [])
    assert "data/tried_prompts" not in sampler.stats()
