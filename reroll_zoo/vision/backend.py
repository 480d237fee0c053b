"""Dense slots for models that see: beside keys and values, a slot remembers its ids, which say what pictures it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch

from reroll.errors import ModelError
from reroll.infer.embedded.backend import PendingTokens
from reroll.infer.embedded.model_runner import ModelRunner
from reroll.infer.embedded.slots import SavedSlot, SlotBackend
from reroll.models.exact import can_be_exact
from reroll.models.sight import Sight
from reroll.tokens.pictures import FIRST_ID
from reroll_zoo.vision.both_ways import begin_of_block
from reroll_zoo.vision.eye import PackedEye, ReadNow

_SHARE_OF_FREE = 0.3
"""Of a GPU's free memory: what slots without a budget of their own may grow to. They are copied as they grow."""


@dataclass(slots=True)
class _Seen:
    """What a slot was told."""

    ids: list[int]
    shift: int
    """How far its next token stands from the place that it has in the sequence, which pictures change."""


_NOTHING = _Seen([], 0)


class VisionBackend(SlotBackend):
    """Dense slots on any device. A picture is looked at when its tokens are read: once for all siblings and later turns, which
    find its keys and values."""

    def __init__(self, runner: ModelRunner, end_ids: Sequence[int] = (), *, max_bytes: int | None = None) -> None:
        if runner.device.type == "cuda" and can_be_exact(runner.model):
            raise ModelError("policy.exact: on a GPU there is no fixed order of sums for what a model sees with: leave it out")
        if max_bytes is None and runner.device.type == "cuda":
            max_bytes = int(_SHARE_OF_FREE * torch.cuda.mem_get_info(runner.device)[0])
        super().__init__(runner, max_bytes=max_bytes)
        assert isinstance(runner.eye, PackedEye)
        self._eye = runner.eye
        self._slots: list[_Seen] = []

    def forward_and_sample(self, starts: Sequence[int], uncached: Sequence[Sequence[int]], **options: Any) -> PendingTokens:
        starts, uncached = zip(*map(self._from_whole_pictures, count(), starts, uncached), strict=True)
        return super().forward_and_sample(starts, uncached, **options)

    def _from_whole_pictures(self, slot: int, start: int, tokens: Sequence[int]) -> tuple[int, Sequence[int]]:
        """A context whose beginning ends in the midst of a picture is read from where that begins."""
        if start == 0 or tokens[0] < FIRST_ID:
            return start, tokens
        whole = [*self._slots[slot].ids[:start], *tokens]
        begin = begin_of_block(whole, start)
        return begin, whole[begin:]

    def _sight(self, starts: Sequence[int], uncached: Sequence[Sequence[int]]) -> Sight | None:
        self._slots += [_NOTHING] * (len(starts) - len(self._slots))
        parts = []
        for slot, (start, tokens) in enumerate(zip(starts, uncached, strict=True)):
            seen, new = self._slots[slot], np.array(tokens, dtype=np.int64)
            if start == 0:
                seen = self._slots[slot] = _Seen([], 0)
            del seen.ids[start:]
            seen.ids += tokens
            if (new >= FIRST_ID).any():
                whole = np.array(seen.ids, dtype=np.int64)
                seen.shift = self._eye.shift_after(whole)
                parts.append(ReadNow(whole, start))
            else:
                parts.append(ReadNow(new, 0, start + seen.shift))
        sight = self._eye.look(parts)
        return sight and replace(sight, cache=self._cache)

    def copy(self, source: int, target: int, *, length: int) -> None:
        super().copy(source, target, length=length)
        self._put(target, self._slots[source].ids[:length])

    def save_prefix(self, slot: int, *, length: int) -> SavedSlot:
        ids = torch.tensor(self._slots[slot].ids[:length])
        return replace(super().save_prefix(slot, length=length), states=(ids,))

    def restore_prefix(self, slot: int, saved: SavedSlot, *, length: int) -> None:
        super().restore_prefix(slot, saved, length=length)
        self._put(slot, saved.states[0][:length].tolist())

    def free_slot(self, slot: int, last: int, *, length: int) -> None:
        super().free_slot(slot, last, length=length)
        if slot != last:
            self._slots[slot] = self._slots[last]
            self._slots[last] = _NOTHING

    def free(self) -> None:
        super().free()
        self._slots = []

    def _put(self, slot: int, ids: list[int]) -> None:
        self._slots += [_NOTHING] * (slot + 1 - len(self._slots))
        self._slots[slot] = _Seen(ids, self._eye.shift_after(np.array(ids, dtype=np.int64)))
