import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.data.sampler import Sampler
from reroll.errors import DataError

weights = st.one_of(st.integers(1, 9).map(float), st.floats(0.01, 10))
mixes = st.lists(st.tuples(st.integers(1, 7), weights), min_size=1, max_size=5)


def make(mix: list[tuple[int, float]], *, seed: int = 0, shuffle: bool = True) -> Sampler[str]:
    sources = [([f"{source}/{item}" for item in range(size)], weight) for source, (size, weight) in enumerate(mix)]
    return Sampler(sources, seed=seed, shuffle=shuffle)


@settings(deadline=None)
@given(mixes, st.integers(0, 5), st.booleans(), st.integers(0, 40))
def test_a_restored_sampler_gives_the_same_sequence(mix, seed, shuffle, num_before):
    whole = make(mix, seed=seed, shuffle=shuffle)
    for _ in range(num_before):
        whole.next()
    resumed = make(mix, seed=seed, shuffle=shuffle)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert [resumed.next() for _ in range(40)] == [whole.next() for _ in range(40)]


@settings(deadline=None)
@given(mixes, st.integers(1, 300))
def test_no_source_ever_gets_a_whole_item_more_than_its_share(mix, num_draws):
    sampler = make(mix)
    total = sum(weight for _, weight in mix)
    drawn = Counter()
    for num_so_far in range(1, num_draws + 1):
        drawn[int(sampler.next().split("/")[0])] += 1
        for source, (_, weight) in enumerate(mix):
            ahead = drawn[source] - num_so_far * weight / total
            assert -len(mix) + 1 - 1e-6 <= ahead < 1


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_every_epoch_holds_every_item_once(size, seed, shuffle):
    sampler = make([(size, 1.0)], seed=seed, shuffle=shuffle)
    for _ in range(3):
        assert len({sampler.next() for _ in range(size)}) == size


def test_each_epoch_each_source_and_each_seed_has_its_own_order():
    def items(sampler: Sampler[str], num: int) -> list[str]:
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


def test_weights_hold_within_one_step():
    sampler = make([(100, 0.4), (100, 0.6)])
    assert Counter(sampler.next()[0] for _ in range(10)) == {"0": 4, "1": 6}


@pytest.mark.parametrize("other", [make([(3, 1.0)]), make([(2, 2.0)]), make([(2, 1.0)], seed=1), make([(2, 1.0), (2, 1.0)])])
def test_a_state_of_other_data_is_refused(other):
    with pytest.raises(DataError, match="differ from those of the checkpoint"):
        make([(2, 1.0)]).restore(other.state())


def test_a_source_without_items_or_weight_is_refused():
    with pytest.raises(ValueError, match="source 1 is empty"):
        Sampler([(["a"], 1.0), ([], 1.0)], seed=0, shuffle=True)
    with pytest.raises(ValueError, match="weights must be above 0"):
        Sampler([(["a"], 0.0)], seed=0, shuffle=True)
