from __future__ import annotations

import math

import pytest

from reroll.observe.metrics import Last, Max, Mean, Stats, Sum

FIRST = {"mean": Mean(6.0, 2.0), "sum": Sum(1.0), "max": Max(5.0), "last": Last(1.0), "mine": Sum(7.0)}
SECOND = {"mean": Mean(1.0, 2.0), "sum": Sum(2.0), "max": Max(3.0), "last": Last(2.0), "yours": Sum(8.0)}
MERGED = {"mean": 1.75, "sum": 3.0, "max": 5.0, "last": 2.0, "mine": 7.0, "yours": 8.0}


def test_a_sum_merges_by_name_and_leaves_both_as_they_were() -> None:
    first, second = Stats(FIRST), Stats(SECOND)
    assert (first + second).values_by_name() == MERGED
    assert dict(first) == FIRST
    assert dict(second) == SECOND


def test_adding_in_place_gives_the_same_and_leaves_the_other_side_as_it_was() -> None:
    stats, second = Stats(FIRST), Stats(SECOND)
    same = stats
    stats += second
    assert same is stats
    assert stats.values_by_name() == MERGED
    assert dict(second) == SECOND
    assert FIRST["sum"].value == 1.0, "what it was made of is a copy"


def test_one_by_one_is_as_all_together() -> None:
    stats = Stats()
    for metrics in (FIRST, SECOND):
        for name, metric in metrics.items():
            stats.add(name, metric)
    assert dict(stats) == dict(Stats(FIRST) + Stats(SECOND))


def test_a_name_keeps_its_kind() -> None:
    with pytest.raises(TypeError, match="metric sum is Sum here and Mean there"):
        Stats(FIRST) + Stats({"sum": Mean(1.0)})
    with pytest.raises(TypeError, match="metric max is Max here and Last there"):
        Stats(FIRST).add("max", Last(1.0))


def test_prefixes_name_the_same_metrics_and_a_mean_of_nothing_is_no_number() -> None:
    assert Stats({"a": Sum(1.0)}).prefixed("train/").values_by_name() == {"train/a": 1.0}
    assert math.isnan(Mean(0.0, 0.0).value)
