"""The KV cache behind the embedded engine, together with the forward pass that fills it and samples from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from reroll.infer.embedded.sampler import RowSampling
from reroll.infer.prefixes import PrefixIndex

K = TypeVar("K")
"""A saved prefix: keys and values that outlive their slot."""


class PendingTokens(Protocol):
    """The tokens of a step that the device may still be working on."""

    def result(self) -> tuple[list[int], list[float]]:
        """Wait for the step: one token and its log-prob per row."""


def sampled_places(lengths: Sequence[int], leaders: Sequence[int], num_drafted: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each row of a step (see `CacheBackend.forward_and_sample`) its slot, and which new token of that predicts it."""
    if not num_drafted:
        slots = [*range(len(lengths)), *leaders]
        return slots, [lengths[slot] - 1 for slot in slots]
    slots = [slot for slot, num in enumerate(num_drafted) for _ in range(num + 1)]
    return slots, [length - 1 - back for length, num in zip(lengths, num_drafted, strict=True) for back in range(num, -1, -1)]


class CacheBackend(ABC, Generic[K]):
    """The keys and values of the running sequences, and where they are noted the experts that computed them. Sequence i of n
    lives in slot i; slots n and up are free."""

    saves_in_place: bool = False
    """Whether saved prefixes take room that slots could have."""
    foreseen: Sequence[int] = ()
    """Tokens that each slot, and what is saved, may come to hold: who asks for memory had better ask for all of it."""
    bytes_per_state: int = 0
    """What a slot, and a saved prefix, holds beside its tokens: a state, which stands for all of them and cannot be cut back to
    fewer. 0: there is none."""
    prefix_index: type[PrefixIndex[Any]] = PrefixIndex
    """How what is saved is found again."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int: ...

    @abstractmethod
    def surely_has_room(self, *, num_slots: int, num_new: int, num_newcomers: int = 0) -> bool:
        """Whether slots in use and to come have room for `num_new` more tokens in all, told at once. False: ask `has_room`."""

    @abstractmethod
    def has_room(self, ends: Sequence[int], newcomers: Sequence[tuple[int, int]] = ()) -> bool:
        """Whether slot i can hold `ends[i]` tokens, and beside those in use others can be filled: (tokens, how many of them it
        shares with what is there)."""

    @abstractmethod
    def forward_and_sample(
        self,
        starts: Sequence[int],
        uncached: Sequence[Sequence[int]],
        *,
        leaders: Sequence[int],
        rows: Sequence[RowSampling],
        num_drafted: Sequence[int] = (),
    ) -> PendingTokens:
        """Run the model on `uncached[i]` in slot i, which holds `starts[i]` tokens; then sample one token per row.

        The first rows belong to those slots. The remaining rows are siblings that share a prompt and are not run
        themselves: each samples from the prediction of its slot in `leaders`. A token's position in its sequence, which
        its random number depends on, follows from the lengths.

        A slot has one row, for its last token; or, if its last `num_drafted[i]` tokens are guesses, one for each of them more,
        in order: what is drawn after the token before the first guess, after the first guess, and so on.
        """

    def forward_next(
        self, previous: PendingTokens, source_rows: Sequence[int], starts: Sequence[int], *, rows: Sequence[RowSampling]
    ) -> PendingTokens | None:
        """Start the next decoding step before the tokens of the `previous` one have reached the host.

        As `forward_and_sample` with one token per slot: slot i takes the token in row `source_rows[i]` of `previous`.
        None if this backend cannot, because the tokens must pass through the host.
        """
        return None

    @abstractmethod
    def routes(self, slot: int, start: int, end: int) -> NDArray[Any] | None:
        """The experts that these tokens of a slot went to when they were read, [end - start, layers, top_k]; None where they
        are not noted."""

    @abstractmethod
    def copy(self, source: int, target: int, *, length: int) -> None:
        """Give the free slot `target` the first `length` tokens of slot `source`."""

    @abstractmethod
    def save_prefix(self, slot: int, *, length: int) -> K:
        """The first `length` tokens of a slot, in a form that outlives the slot."""

    @abstractmethod
    def restore_prefix(self, slot: int, saved: K, *, length: int) -> None:
        """Give a free slot the first `length` tokens of a saved prefix."""

    @abstractmethod
    def free_slot(self, slot: int, last: int, *, length: int) -> None:
        """Empty a slot. The last slot in use, which holds `length` tokens, moves into it so that slots stay contiguous."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back; the content of every slot is lost."""
