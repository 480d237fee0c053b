import random

from hypothesis import given
from hypothesis import strategies as st

from reroll.infer.prefixes import PrefixIndex

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=30)


def index(*, max_entries=1000, max_tokens=100_000):
    return PrefixIndex(max_entries=max_entries, max_tokens=max_tokens)


def num_common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(kept=SEQUENCES, asked=st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_the_longest_common_prefix_is_found(kept, asked):
    prefixes = index()
    for tokens in kept:
        prefixes.keep(tokens, tuple(tokens))
    longest = max((num_common(tokens, asked) for tokens in kept), default=0)
    match = prefixes.find(asked)
    if longest == 0:
        assert match is None
    else:
        assert match[0] == longest == num_common(match[1], asked)


@given(kept=SEQUENCES)
def test_the_bounds_hold_and_the_count_of_tokens_is_right(kept):
    prefixes = index(max_entries=4, max_tokens=20)
    for tokens in kept:
        prefixes.keep(tokens, None)
        assert len(prefixes) <= 4
        assert prefixes.num_tokens <= 20
    assert prefixes.num_tokens == sum(len(key) for key in prefixes._values) // 4
    assert sorted(prefixes._values) == prefixes._sorted


def test_token_ids_of_several_bytes_are_told_apart():
    prefixes, draw = index(), random.Random(0)
    kept = [[7, 256 * i, draw.randrange(150_000)] for i in range(50)]
    for tokens in kept:
        prefixes.keep(tokens, tokens)
    for tokens in kept:
        assert prefixes.find([*tokens, 5])[1] == tokens
    assert prefixes.find([7, 3])[0] == 1


def test_what_was_used_stays_and_what_was_not_goes():
    prefixes = index(max_entries=2)
    prefixes.keep([1, 1], "a")
    prefixes.keep([2, 2], "b")
    prefixes.find([1, 1, 5])
    prefixes.keep([3, 3], "c")
    assert prefixes.find([2, 2]) is None
    assert prefixes.find([1, 1])[1] == "a"


def test_a_sequence_takes_the_place_of_the_one_it_extends():
    prefixes = index()
    prefixes.keep([1, 2], "turn 1")
    prefixes.keep([1, 2, 3], "turn 2")
    assert len(prefixes) == 1
    assert prefixes.find([1, 2, 9])[1] == "turn 2"


def test_the_beginning_of_a_kept_sequence_is_not_kept_again():
    prefixes = index()
    prefixes.keep([1, 2, 3], "long")
    prefixes.keep([1, 2], "short")
    assert len(prefixes) == 1
    assert prefixes.find([1, 2])[1] == "long"


def test_the_same_tokens_get_the_newer_value():
    prefixes = index()
    prefixes.keep([1, 2], "old")
    prefixes.keep([1, 2], "new")
    assert (len(prefixes), prefixes.num_tokens, prefixes.find([1, 2])[1]) == (1, 2, "new")


def test_a_sequence_larger_than_the_bound_is_not_kept():
    prefixes = index(max_tokens=3)
    prefixes.keep([1, 2, 3, 4], None)
    assert (len(prefixes), prefixes.num_tokens) == (0, 0)


def test_nothing_is_found_after_clearing():
    prefixes = index()
    prefixes.keep([1, 2], None)
    prefixes.clear()
    assert prefixes.find([1, 2]) is None
    assert prefixes.num_tokens == 0


def test_who_asks_again_with_the_very_same_tokens_finds_what_there_is_now():
    prefixes, tokens = index(), (1, 2, 3)
    prefixes.keep(tokens, "a")
    assert prefixes.find(tokens) == (3, "a")
    prefixes.keep((1, 2, 4), "b")
    assert prefixes.find(tokens) == (3, "a")
    prefixes.clear()
    assert prefixes.find(tokens) is None
    prefixes.keep(tokens, "c")
    assert prefixes.find(tokens) == (3, "c")
