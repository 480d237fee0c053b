"""An index of token sequences that finds the longest common prefix."""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

TOKEN_BYTES = struct.calcsize("i")


class PrefixIndex(Generic[T]):
    """A bounded map from token sequences to values, asked for the longest common prefix.

    Keys are kept sorted as bytes, which compare fast: in that order, the longest common prefix is with a neighbour.
    When there are too many entries or tokens, the least recently used go.
    """

    def __init__(self, *, max_entries: int, max_tokens: int, entry_tokens: int = 0) -> None:
        """An entry counts as `entry_tokens` more than it has."""
        self._max_entries, self._entry_bytes = max_entries, entry_tokens * TOKEN_BYTES
        self._max_bytes = max_tokens * TOKEN_BYTES
        self._values: OrderedDict[bytes, T] = OrderedDict()  # Least recently used first.
        self._sorted: list[bytes] = []
        self._num_bytes = 0
        self._last: tuple[tuple[int, ...], bytes] = (), b""

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_tokens(self) -> int:
        return self._num_bytes // TOKEN_BYTES

    def keep(self, tokens: tuple[int, ...], value: T) -> None:
        """Remember `value` under `tokens`, in place of an entry that they extend. An entry that extends them stays instead."""
        key = self._key(tokens)
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

    def find(self, tokens: tuple[int, ...]) -> tuple[int, T] | None:
        """How many tokens the longest common prefix with a kept sequence has, and that one's value. It counts as used."""
        key = self._key(tokens)
        place = bisect_left(self._sorted, key)
        neighbours = self._sorted[max(place - 1, 0) : place + 1]
        if neighbours and neighbours[-1].startswith(key):  # A sibling's, or of the same conversation.
            num_common, nearest = len(key) // TOKEN_BYTES, neighbours[-1]
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

    def _key(self, tokens: tuple[int, ...]) -> bytes:
        """Siblings ask one after the other, with the very same tuple: to pack a long one takes most of the time."""
        if tokens is not self._last[0]:
            self._last = tokens, struct.pack(f"{len(tokens)}i", *tokens)  # Several times as fast as `array`.
        return self._last[1]

    def _drop(self, key: bytes) -> None:
        del self._values[key]
        del self._sorted[bisect_left(self._sorted, key)]
        self._num_bytes -= len(key) + self._entry_bytes


def _num_common(a: bytes, b: bytes) -> int:
    """Leading tokens that both have."""
    length = min(len(a), len(b)) // TOKEN_BYTES
    differ = np.frombuffer(a, np.intc, length) != np.frombuffer(b, np.intc, length)
    return int(differ.argmax()) if differ.any() else length
