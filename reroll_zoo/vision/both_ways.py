"""Attention of families in which the tokens of a picture look at each other in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reroll.infer.embedded.attention import SlotCache
from reroll.models import exact
from reroll.models.attention import Attention, Scoring, attend_visible
from reroll.tokens.pictures import FIRST_ID


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens of a picture that stand side by side in a sequence."""

    asks: Tensor
    """[Q] which of the tokens of a pass they are."""
    looks: Tensor
    """[L] those of its sequence that are in the pass, up to its end."""
    slot: int
    """The number of its sequence."""
    place: int
    """Where it begins in its sequence."""

    def among(self, index: Tensor) -> Block:
        """The same where `index` says what each token has become."""
        return Block(index[self.asks], index[self.looks], self.slot, self.place)


def blocks_of(ids: NDArray[np.int64], start: int, *, slot: int, base: int, device: torch.device) -> Iterator[Block]:
    """The blocks of a sequence that is read from `start` on; its tokens are those of the pass from `base` on."""
    is_picture = np.concatenate([[False], ids >= FIRST_ID, [False]]).astype(np.int8)
    for first, end in np.flatnonzero(np.diff(is_picture)).reshape(-1, 2).tolist():
        if first >= start:
            tokens = torch.arange(base, base + end - start, device=device)
            yield Block(tokens[first - start :], tokens, slot, first)


def begin_of_block(ids: Sequence[int], place: int) -> int:
    """Where the block begins in whose midst `place` stands; `place` itself if it stands in none."""
    while 0 < place < len(ids) and ids[place - 1] >= FIRST_ID and ids[place] >= FIRST_ID:
        place -= 1
    return place


class BothWays:
    """As another attention, but the tokens of a block see to its end. With a `cache`, what they look at is there."""

    def __init__(self, inner: Attention, blocks: Sequence[Block], cache: SlotCache | None) -> None:
        self._inner, self._blocks, self._cache = inner, blocks, cache

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        output = self._inner.attend(layer, query, key, value, scoring=scoring)
        asks = torch.cat([block.asks for block in self._blocks])
        seen = [self._see(block, layer, query, key, value, scoring) for block in self._blocks]
        return output.index_copy(0, asks, torch.cat(seen).to(output.dtype))

    def _see(self, block: Block, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """[Q, H, D] what a block makes of its sequence up to its end."""
        end, window = block.place + len(block.asks), scoring.sliding_window
        low = 0 if window is None else max(0, block.place - window + 1)
        if self._cache is None:
            keys, values = (states[block.looks[low:]].transpose(0, 1) for states in (key, value))
        else:
            keys, values = (states[block.slot, :, low:end] for states in (self._cache.keys(layer), self._cache.values(layer)))
        groups = query.shape[1] // key.shape[1]
        keys, values = (states.repeat_interleave(groups, 0)[None] for states in (keys, values))
        places, offsets = (torch.arange(first, end, device=query.device) for first in (block.place, low))
        visible = places[:, None] - offsets < (window or end)
        sinks = None if scoring.sinks is None else scoring.sinks[:, None, None]
        attend = exact.arithmetic().attend if exact.is_exact() else attend_visible
        asking = query[block.asks].transpose(0, 1)[None].to(values.dtype)
        return attend(asking, keys.to(values.dtype), values, visible, scoring, sinks)[0].transpose(0, 1)
