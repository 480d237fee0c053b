"""In which order the chunks of a bucket go round the engines. Arithmetic alone: the planner asks it too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Hop(NamedTuple):
    """A chunk of a sender's piece of a bucket, as one engine meets it on its way."""

    sender: int
    """Whose piece it is: a position among the senders."""
    chunk: int
    is_first: bool
    """It comes from its sender, else from the engine before."""
    is_last: bool
    """All have it now, else it goes on to the engine behind."""


@dataclass(frozen=True, slots=True)
class Ring:
    """How pieces get to the engines: in chunks, each of which enters at one of them and is passed on until the last has it.

    So a sender sends what it has once, and an engine takes the model in once and passes it on once, however many there are.
    """

    num_senders: int
    num_engines: int

    @property
    def num_chunks(self) -> int:
        """Of a piece: so many that the engines have four rounds of chunks to pass on, and none waits long for its first."""
        return -(-4 * (self.num_engines - 1) // self.num_senders) or 1

    def entry_of(self, sender: int, chunk: int) -> int:
        """The engine that gets a chunk first. Two would meet in both directions, which a pair of GPUs does one after the other:
        there the first one always begins."""
        return (sender * self.num_chunks + chunk) % self.num_engines if self.num_engines > 2 else 0

    def hops(self, engine: int) -> Iterator[Hop]:
        """The chunks of a bucket in the order in which an engine takes them.

        Round by round one enters at every engine and all move on together: what an engine passes on is what the one behind it
        takes next from it, so none waits for another in a circle.
        """
        chunks = [(sender, chunk) for sender in range(self.num_senders) for chunk in range(self.num_chunks)]
        width = self.num_engines if self.num_engines > 2 else 1
        for first in range(0, len(chunks), width):
            entering = {self.entry_of(*one): one for one in chunks[first : first + width]}
            for step in range(self.num_engines):
                one = entering.get((engine - step) % self.num_engines)
                if one is not None:
                    yield Hop(*one, is_first=step == 0, is_last=step == self.num_engines - 1)

    def part(self, num_bytes: int, chunk: int) -> slice:
        """Which bytes of a piece a chunk has."""
        size = -(-num_bytes // self.num_chunks)
        return slice(min(chunk * size, num_bytes), min((chunk + 1) * size, num_bytes))
