from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reroll_zoo.code.sandboxed.wire import MAX_DEPTH, MAX_SAME_HASH, decode, encode
from reroll_zoo.code.values import Equality, Opaque, as_reply, read_replies, same_output

LOOSE = Equality(tolerance=1e-6, loose=True)
STRICT = Equality(tolerance=0.0, loose=False)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner) | st.frozensets(KEYS),
    max_leaves=20,
)


def travel(value: Any) -> Any:
    """Out of the sandbox and through JSON."""
    return as_reply(json.loads(json.dumps({"value": encode(value, lambda _: {"opaque": "?"}), "true": bool(value)}))).value


@given(VALUES)
def test_a_value_of_plain_types_arrives_as_it_left(value: Any) -> None:
    arrived = travel(value)
    assert type(arrived) is type(value)
    assert arrived == value
    assert STRICT.same(value, arrived)


def test_large_numbers_complex_ones_and_kinds_of_plain_types_arrive() -> None:
    class Name(str):
        def __str__(self) -> str:
            return "forged"

    assert travel(-(7**9000)) == -(7**9000)
    assert travel(2 - 3j) == 2 - 3j
    assert travel(bytearray(b"a")) == b"a"
    assert travel(Name("true")) == "true"
    assert math.isnan(travel(math.nan))
    assert travel(Decimal("0.10")) == Decimal("0.1")
    assert isinstance(travel(Decimal("NaN")), Opaque)


def test_other_objects_arrive_as_something_equal_to_nothing() -> None:
    assert isinstance(travel(object()), Opaque)
    assert not LOOSE.same([object()], travel([object()]))
    circle: list[Any] = []
    circle.append(circle)
    assert not LOOSE.same(circle[:0], travel(circle))


def test_values_that_are_too_deep_do_not_travel() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert travel(value) == value
    assert travel([value]) != [value]


FORGED = [
    {"a": 1, "b": 2}, {}, {"int": 3}, {"int": "zz"}, {"bytes": [1]}, {"set": [[1]]}, {"dict": [1]}, {"tuple": 3},
    {"complex": [10**400, 1]}, {"decimal": "x"}, {"decimal": "NaN"}, {"decimal": "1" * 1001}, {"decimal": 3},
]  # fmt: skip


@pytest.mark.parametrize("wire", FORGED)
def test_what_no_driver_would_write_is_a_crash(wire: Any) -> None:
    assert as_reply({"value": wire, "true": True}).crashed


def test_numbers_that_were_chosen_for_their_hash_are_a_crash_and_not_a_table() -> None:
    # A table of 40,000 such numbers took twelve seconds to build.
    hostile = [number * (2**61 - 1) for number in range(MAX_SAME_HASH + 1)]
    assert as_reply({"value": {"set": hostile}}).crashed
    assert as_reply({"value": {"dict": [[number, 1] for number in hostile]}}).crashed
    assert as_reply({"value": {"set": [{"tuple": [number]} for number in hostile]}}).crashed
    assert travel(set(hostile[1:])) == set(hostile[1:])
    assert travel(dict.fromkeys(range(-5000, 5000))) == dict.fromkeys(range(-5000, 5000))


def test_forged_depth_is_a_crash_and_not_ours() -> None:
    assert read_replies("[" * 100_000) == []
    deep: Any = 1
    for _ in range(MAX_DEPTH + 5):
        deep = [deep]
    assert as_reply({"value": deep}).crashed
    with pytest.raises(ValueError, match="too deep"):
        decode(deep, lambda *_: None)


def test_lines_are_read_up_to_the_first_that_is_not_the_drivers() -> None:
    assert read_replies('{"ready": true}\n{"value": 1}\nnoise\n{"value": 2}\n') == [{"ready": True}, {"value": 1}]
    assert read_replies('[1]\n{"value": 1}') == []
    assert read_replies('x{"a": 1}\n{"a": 2}\nx{"a": 3}', token="x") == [{"a": 1}]


def test_loose_equality_is_that_of_json() -> None:
    assert LOOSE.same([1, [2]], (1, (2,)))
    assert LOOSE.same({"1": [2]}, {1: (2,)})
    assert not STRICT.same([1], (1,))
    assert not STRICT.same({"1": 2}, {1: 2})
    assert not LOOSE.same([1, 2], [2, 1])
    assert not LOOSE.same([1], frozenset({1}))
    assert not LOOSE.same({}, [])


def test_only_an_expected_number_that_is_not_whole_has_a_tolerance() -> None:
    assert LOOSE.same(1.5, 1.5000001)
    assert LOOSE.same([1e9 + 0.5], [1e9])
    assert not LOOSE.same(10**9, 10**9 + 1)
    assert not LOOSE.same(3, 3.0000001)
    assert not LOOSE.same(1.5, "1.5")
    assert not LOOSE.same(math.inf, 1e300)
    assert not LOOSE.same(1.5, 10**400)
    assert LOOSE.same({0.5, 1}, frozenset({1, 0.50000001}))
    assert LOOSE.same(0.1, Decimal("0.1"))
    assert not LOOSE.same(0.1, Decimal("0.2"))
    assert LOOSE.same(2, Decimal(2))


def test_members_of_a_set_pair_up_one_to_one() -> None:
    assert not LOOSE.same({1.0, 2.0}, frozenset({1.0, 1.0000001}))
    assert not LOOSE.same({1.5, 2.5}, frozenset({1.5, 1.5000001}))
    assert LOOSE.same({1.5, 2.5, "x"}, frozenset({2.5000001, "x", 1.4999999}))
    assert not LOOSE.same({1.5, "x"}, frozenset({1.5, "y"}))
    assert not LOOSE.same({1.5, "x"}, frozenset({1.5, 2}))
    assert LOOSE.same({math.nan, 1.5}, frozenset({1.5000001, float("nan")}))
    assert not LOOSE.same({math.nan, 1.5}, frozenset({1.5, 2.5}))


def test_keys_that_are_written_alike_are_still_two() -> None:
    assert not LOOSE.same({"1": 2}, {1: 3, "1": 2})
    assert not LOOSE.same({"1": 2}, {"1": 2, 10**5000: 1})
    assert not LOOSE.same({"1": 2}, {10**5000: 2})


def test_a_whole_number_was_not_rounded_to_so_many_places() -> None:
    assert not LOOSE.same(1e-7, 0)
    assert LOOSE.same(1e-7, 0.0)
    assert LOOSE.same(1e-16, 0)
    assert LOOSE.same(5.0, 5)


@pytest.mark.parametrize(
    ("expected", "given", "same"),
    [
        ("6", "6\n", True),
        ("1 2\n3", " 1   2 \r\n3\n\n", True),
        ("\n\n6", "6", True),
        ("0.333333333", "0.3333333", True),
        ("1e-3", "0.001", True),
        ("YES 0.5", "YES 0.50", True),
        ("", " \n", True),
        ("1 2 3", "1 2\n3", False),
        ("1\n\n2", "1\n2", False),
        ("100000000", "100000001", False),
        ("0.5", "0.6", False),
        ("1", "1.0", False),
        ("0.5", "nan", False),
        ("inf", "inf", True),
        ("0.5", "x", False),
        ("YES", "yes", False),
        ("6", "", False),
        ("6", "6 6", False),
        ("0.0000001", "0", False),
        ("0.0000001", "0.000000", True),
        ("1e-16", "0", True),
        ("2.0", "2", True),
        ("0.5", "0", False),
        ("  *\n***", "*\n***", True),  # Spaces never count: many data sets have lost them.
    ],
)
def test_printed_text_is_compared_word_by_word(expected: str, given: str, same: bool) -> None:
    assert same_output(expected, given, tolerance=1e-6) is same


def test_without_tolerance_numbers_may_still_be_written_otherwise() -> None:
    assert same_output("0.5", "0.50", tolerance=0)
    assert not same_output("0.5", "0.5000001", tolerance=0)
