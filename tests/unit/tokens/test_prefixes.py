import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.tokens.packing import shared_prefixes

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


def pack_rows(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([0, *map(len, rows)])
    return torch.tensor([token for row in rows for token in row]), lengths.cumsum(0)


def prefixes_of(rows: list[list[int]]) -> list[tuple[int, ...]]:
    """For each token of the pack, the tokens of its sequence up to and including it."""
    return [tuple(row[: place + 1]) for row in rows for place in range(len(row))]


@settings(max_examples=200)
@given(ROWS)
def test_two_tokens_are_one_exactly_when_they_follow_the_same_prefix(rows: list[list[int]]) -> None:
    shared = shared_prefixes(*pack_rows(rows))
    prefixes = prefixes_of(rows)
    assert len(shared.first) == len(set(prefixes))
    for token, distinct in enumerate(shared.index.tolist()):
        assert prefixes[int(shared.first[distinct])] == prefixes[token]


def test_siblings_share_their_prompt() -> None:
    shared = shared_prefixes(*pack_rows([[7, 8, 1, 2], [7, 8, 3], [9, 4]]))
    assert len(shared.first) == 7
    assert shared.index[0:2].tolist() == shared.index[4:6].tolist()


def test_sequences_that_share_nothing_keep_every_token() -> None:
    assert sorted(shared_prefixes(*pack_rows([[1, 2], [2, 2], [3]])).first.tolist()) == [0, 1, 2, 3, 4]
