"""An index of token sequences that finds the longest common prefix."""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

_TOKEN_BYTES = struct.calcsize("i")


class PrefixIndex(Generic[T]):
    """A bounded map from token sequences to values, asked for the longest common prefix.

    Keys are kept sorted as bytes, which compare fast: in that order, the longest common prefix is with a neighbour.
    When there are too many entries or tokens, the least recently used go.
    """

    def __init__(self, *, max_entries: int, max_tokens: int, entry_tokens: int = 0) -> None:
        """An entry counts as `entry_tokens` more than it has."""
        self._max_entries, self._entry_bytes = max_entries, entry_tokens * _TOKEN_BYTES
        self._max_bytes = max_tokens * _TOKEN_BYTES
        self._values: OrderedDict[bytes, T] = OrderedDict()  # Least recently used first.
        self._sorted: list[bytes] = []
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_tokens(self) -> int:
        return self._num_bytes // _TOKEN_BYTES

    def keep(self, tokens: Sequence[int], value: T) -> None:
        """Remember `value` under `tokens`, in place of an entry that they extend. An entry that extends them stays instead."""
        key = _key(tokens)
        place = bisect_left(self._sorted, key)
        following = self._sorted[place] if place < len(self._sorted) else b""
        if len(following) > len(key) and following.startswith(key):
            self._values.move_to_end(following)
            return
        if place and key.startswith(before := self._sorted[place - 1]):
            self._drop(before)
        self._put(key, value)

    def _put(self, key: bytes, value: T) -> None:
        if key not in self._values:
            insort(self._sorted, key)
            self._num_bytes += len(key) + self._entry_bytes
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._max_entries or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._values)))

    def find(self, tokens: Sequence[int]) -> tuple[int, T] | None:
        """How many tokens the longest common prefix with a kept sequence has, and that one's value. It counts as used."""
        key = _key(tokens)
        place = bisect_left(self._sorted, key)
        neighbours = self._sorted[max(place - 1, 0) : place + 1]
        if neighbours and neighbours[-1].startswith(key):  # A sibling's, or of the same conversation.
            num_common, nearest = len(key) // _TOKEN_BYTES, neighbours[-1]
        else:
            num_common, nearest = max(((_num_common(key, other), other) for other in neighbours), default=(0, b""))
        if not num_common:
            return None
        self._values.move_to_end(nearest)
        return num_common, self._values[nearest]

    def drop_oldest(self) -> bool:
        """Forget the least recently used; False if there is none."""
        if not self._values:
            return False
        self._drop(next(iter(self._values)))
        return True

    def clear(self) -> None:
        self._values.clear()
        self._sorted.clear()
        self._num_bytes = 0

    def _drop(self, key: bytes) -> None:
        del self._values[key]
        del self._sorted[bisect_left(self._sorted, key)]
        self._num_bytes -= len(key) + self._entry_bytes


class WholePrefixIndex(PrefixIndex[T]):
    """The same for values that stand for all of their tokens and for no fewer."""

    def keep(self, tokens: Sequence[int], value: T) -> None:
        """Remember `value` under `tokens`. Entries that they extend stay too: nothing else can stand for those."""
        self._put(_key(tokens), value)

    def find(self, tokens: Sequence[int]) -> tuple[int, T] | None:
        """The longest kept sequence that `tokens` begin with and go on from: its length and its value. It counts as used."""
        key = _key(tokens)
        for length in sorted({len(other) for other in self._values if len(other) < len(key)}, reverse=True):
            if (found := key[:length]) in self._values:
                self._values.move_to_end(found)
                return length // _TOKEN_BYTES, self._values[found]
        return None


def _key(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"{len(tokens)}i", *tokens)  # Several times as fast as `array`.


def _num_common(a: bytes, b: bytes) -> int:
    """Leading tokens that both have."""
    length = min(len(a), len(b)) // _TOKEN_BYTES
    differ = np.frombuffer(a, np.intc, length) != np.frombuffer(b, np.intc, length)
    return int(differ.argmax()) if differ.any() else length
