"""What running sequences have read, by slot, and the forward pass that reads on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from reroll.infer.embedded.sampler import Row

K = TypeVar("K")
"""What a memory hands out when a slot's content is to outlive the slot."""


class Drawing(Protocol):
    """A step under way."""

    def wait(self) -> tuple[list[int], list[float]]:
        """A token and its log-prob for every row, when they are known."""


class Memory(ABC, Generic[K]):
    """Keys and values of the running sequences. Sequence i of n lives in slot i; slots n and up are free."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int: ...

    @abstractmethod
    def read(
        self, starts: Sequence[int], unread: Sequence[Sequence[int]], *, leaders: Sequence[int], rows: Sequence[Row]
    ) -> Drawing:
        """Slot i, which holds `starts[i]` tokens, reads `unread[i]`; then a token and its log-prob is drawn for every row.

        The first rows are those slots'. The others are siblings that have read nothing themselves: each draws from what
        the slot in `leaders` predicts. Which token of its sequence is drawn follows from what was read.
        """

    def read_on(
        self, before: Drawing, drawn_as: Sequence[int], starts: Sequence[int], *, rows: Sequence[Row]
    ) -> Drawing | None:
        """As `read`, of slots that each read one token: slot i the one in row `drawn_as[i]` of the step `before`, which
        nobody knows yet.

        None where a device must be waited for anyway.
        """
        return None

    @abstractmethod
    def copy(self, source: int, target: int, *, length: int) -> None:
        """The free slot `target` gets the first `length` places of slot `source`."""

    @abstractmethod
    def take_out(self, slot: int, *, length: int) -> K:
        """The first `length` places of a slot, to be kept after it is emptied."""

    @abstractmethod
    def put_in(self, slot: int, kept: K, *, length: int) -> None:
        """A free slot gets the first `length` places of what `take_out` gave."""

    @abstractmethod
    def close_gap(self, slot: int, last: int, *, length: int) -> None:
        """Empty a slot. The last one in use, which holds `length` tokens, moves in, unless it is that one."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back; every slot is lost."""
