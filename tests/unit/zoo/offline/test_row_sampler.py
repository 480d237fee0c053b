import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.errors import DataError
from reroll_zoo.offline.sampler import RowSampler

weights = st.one_of(st.integers(1, 9).map(float), st.floats(0.01, 10))
mixes = st.lists(st.tuples(st.integers(1, 7), weights), min_size=1, max_size=5)


def make(mix: list[tuple[int, float]], *, seed: int = 0, shuffle: bool = True) -> RowSampler[str]:
    sources = [([f"{source}/{item}" for item in range(size)], weight) for source, (size, weight) in enumerate(mix)]
    return RowSampler(sources, seed=seed, shuffle=shuffle)


@given(mixes, st.integers(0, 5), st.booleans(), st.integers(0, 40))
def test_a_restored_sampler_gives_the_same_sequence(mix, seed, shuffle, num_before):
    whole = make(mix, seed=seed, shuffle=shuffle)
    for _ in range(num_before):
        whole.next()
    resumed = make(mix, seed=seed, shuffle=shuffle)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert [resumed.next() for _ in range(40)] == [whole.next() for _ in range(40)]


@given(mixes, st.integers(1, 300))
def test_at_any_time_every_source_is_within_one_item_of_its_share(mix, num_draws):
    sampler = make(mix)
    shares = [Fraction(str(weight)) for _, weight in mix]
    drawn = Counter()
    for num_so_far in range(1, num_draws + 1):
        drawn[int(sampler.next().split("/")[0])] += 1
        for source, share in enumerate(shares):
            assert abs(drawn[source] - num_so_far * share / sum(shares)) < 1


@given(st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_every_epoch_holds_every_item_once(size, seed, shuffle):
    sampler = make([(size, 1.0)], seed=seed, shuffle=shuffle)
    for _ in range(3):
        assert len({sampler.next() for _ in range(size)}) == size


def test_each_epoch_each_source_and_each_seed_has_its_own_order():
    def items(sampler: RowSampler[str], num: int) -> list[str]:
        return [sampler.next() for _ in range(num)]

    first, second = (lambda drawn: (drawn[:30], drawn[30:]))(items(make([(30, 1.0)]), 60))
    assert first != second
    assert first != items(make([(30, 1.0)], seed=1), 30)
    both = items(make([(30, 1.0), (30, 1.0)]), 60)
    numbers = [[item.split("/")[1] for item in both if item.startswith(f"{source}/")] for source in (0, 1)]
    assert numbers[0] != numbers[1]


def test_without_shuffling_items_come_in_file_order():
    sampler = make([(3, 1.0)], shuffle=False)
    assert [sampler.next() for _ in range(4)] == ["0/0", "0/1", "0/2", "0/0"]


@settings(max_examples=50)
@given(weights, weights, st.integers(0, 60), st.integers(1, 60))
def test_over_any_stretch_two_sources_are_within_one_item_of_their_shares(one, other, num_before, num_draws):
    sampler = make([(3, one), (3, other)])
    drawn = [int(sampler.next()[0]) for _ in range(num_before + num_draws)][num_before:]
    share = Fraction(str(one)) / (Fraction(str(one)) + Fraction(str(other)))
    assert abs(drawn.count(0) - num_draws * share) < 1


@pytest.mark.parametrize("mix", [[1, 2, 5], [3, 3, 1, 1], [0.1, 0.2, 0.3, 0.4]])
def test_where_shares_are_whole_numbers_of_a_step_every_step_holds_them_exactly(mix):
    sampler = make([(7, weight) for weight in mix])
    num = round(sum(mix) / min(mix))
    for _ in range(20):
        counts = Counter(int(sampler.next()[0]) for _ in range(num))
        assert [counts[source] for source in range(len(mix))] == [round(weight / min(mix)) for weight in mix]


def test_weights_hold_within_one_step():
    sampler = make([(100, 0.4), (100, 0.6)])
    assert Counter(sampler.next()[0] for _ in range(10)) == {"0": 4, "1": 6}


@pytest.mark.parametrize("other", [make([(3, 1.0)]), make([(2, 2.0)]), make([(2, 1.0)], seed=1), make([(2, 1.0), (2, 1.0)])])
def test_a_state_of_other_data_is_refused(other):
    with pytest.raises(DataError, match="differ from those of the checkpoint"):
        make([(2, 1.0)]).restore(other.state())


def test_a_source_without_items_or_weight_is_refused():
    with pytest.raises(ValueError, match="source 1 is empty"):
        RowSampler([(["a"], 1.0), ([], 1.0)], seed=0, shuffle=True)
    with pytest.raises(ValueError, match="weights must be above 0"):
        RowSampler([(["a"], 0.0)], seed=0, shuffle=True)
