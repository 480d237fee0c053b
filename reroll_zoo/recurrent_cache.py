"""Dense slots for models with layers that carry a state: beside keys and values, a slot holds the states after its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from reroll.infer.embedded.attention import SlotCache, StepAttention
from reroll.infer.embedded.model_runner import ModelRunner
from reroll.infer.embedded.slots import SavedSlot, SlotBackend
from reroll.infer.prefixes import TOKEN_BYTES, PrefixIndex
from reroll.models.attention import Scoring
from reroll.models.recurrent import Run, recurrent_layers
from reroll_zoo.recurrent_layers import MixerState, run_mixer

T = TypeVar("T")

_SHARE_OF_FREE = 0.3
"""Of a GPU's free memory: what slots without a budget of their own may grow to. They are copied as they grow."""


class WholePrefixIndex(PrefixIndex[T]):
    """The index of saved prefixes for values that stand for all of their tokens and for no fewer."""

    def keep(self, tokens: tuple[int, ...], value: T) -> None:
        """Remember `value` under `tokens`. Entries that they extend stay too: nothing else can stand for those."""
        self._put(self._key(tokens), value)

    def find(self, tokens: tuple[int, ...]) -> tuple[int, T] | None:
        """The longest kept sequence that `tokens` begin with and go on from: its length and its value. It counts as used."""
        key = self._key(tokens)
        for length in sorted({len(other) for other in self._values if len(other) < len(key)}, reverse=True):
            if (found := key[:length]) in self._values:
                self._values.move_to_end(found)
                return length // TOKEN_BYTES, self._values[found]
        return None


class StateTable:
    """The states of the slots. One tensor [slots, width] for all convolutions and one for all recurrent states: moving or
    copying a slot is one operation each over all layers."""

    def __init__(self, runner: ModelRunner) -> None:
        self._places: dict[int, list[tuple[slice, torch.Size]]] = {}
        """Where each layer's two states are in a row of these, and their shapes."""
        widths, dtypes = [0, 0], [runner.dtype, torch.float32]
        for layer, state in _empty_states(runner).items():
            self._places[layer] = []
            for part, tensor in enumerate(state):
                width = prod(tensor.shape)
                self._places[layer].append((slice(widths[part], widths[part] + width), tensor.shape))
                widths[part] += width
                dtypes[part] = tensor.dtype
        kinds = zip(widths, dtypes, strict=True)
        self._data = [torch.zeros((0, width), dtype=dtype, device=runner.device) for width, dtype in kinds]

    @property
    def bytes_per_slot(self) -> int:
        return sum(part.shape[1] * part.element_size() for part in self._data)

    def reserve(self, num_slots: int) -> None:
        """Make room for this many slots; grows by half at least."""
        old = len(self._data[0])
        if num_slots > old:
            grown = [part.new_zeros((max(num_slots, old * 3 // 2), part.shape[1])) for part in self._data]
            for new, part in zip(grown, self._data, strict=True):
                new[:old] = part
            self._data = grown

    def of_layer(self, layer: int, slots: slice) -> MixerState:
        """The states of a layer in these slots: views, which change as the layer goes on."""
        parts = zip(self._data, self._places[layer], strict=True)
        conv, recurrent = (part[slots, where].unflatten(1, shape) for part, (where, shape) in parts)  # type: ignore[no-untyped-call]
        return MixerState(conv, recurrent)

    def copy(self, source: int, target: int) -> None:
        for part in self._data:
            part[target] = part[source]

    def save(self, slot: int) -> tuple[Tensor, ...]:
        return tuple(part[slot].clone() for part in self._data)

    def restore(self, slot: int, saved: tuple[Tensor, ...]) -> None:
        for part, state in zip(self._data, saved, strict=True):
            part[slot] = state

    def free(self) -> None:
        """Give the memory back; every state is lost."""
        self._data = [part.new_zeros((0, part.shape[1])) for part in self._data]


@torch.inference_mode()
def _empty_states(runner: ModelRunner) -> dict[int, tuple[Tensor, Tensor]]:
    """Each layer's two states, without the slots, as its module shapes them: each is run on one token."""
    states = {}
    size: int = runner.model.config.get_text_config().hidden_size
    for layer, mixer in recurrent_layers(runner.model).items():
        state = MixerState()
        run_mixer(mixer, torch.zeros((1, 1, size), dtype=runner.dtype, device=runner.device), state)
        assert state.conv is not None
        recurrent = state.conv.new_zeros((1, 0), dtype=torch.float32) if state.recurrent is None else state.recurrent
        states[layer] = (state.conv[0], recurrent[0])
    return states


class RecurrentStep(StepAttention):
    """A step in which recurrent layers go on from the states of the slots, and leave there those after the new tokens.

    Rows are neighbouring slots with equally many new tokens: a state would take note of padding.
    """

    def __init__(
        self, cache: SlotCache, states: StateTable, layers: Sequence[int], *, starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        super().__init__(cache, starts=starts, lengths=lengths)
        self._states, self._places = states, {layer: place for place, layer in enumerate(layers)}
        bounds = [0, *accumulate(lengths)]
        kinds = [(start == 0, length) for start, length in zip(starts, lengths, strict=True)]
        self._row_groups: list[tuple[slice, slice, int, bool]] = []
        """Packed tokens, their slots, how many of each, and whether they are its first."""
        for (is_first, length), run in groupby(range(len(kinds)), key=kinds.__getitem__):
            slots = list(run)
            first, end = slots[0], slots[-1] + 1
            self._row_groups.append((slice(bounds[first], bounds[end]), slice(first, end), length, is_first))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        return super().attend(self._places[layer], query, key, value, scoring=scoring)

    def mix(self, layer: int, hidden: Tensor, run: Run) -> Tensor:
        outputs = []
        for tokens, slots, length, is_first in self._row_groups:
            kept = self._states.of_layer(layer, slots)
            state = MixerState() if is_first else kept
            outputs.append(run(hidden[tokens].view(-1, length, hidden.shape[1]), state).flatten(0, 1))
            if is_first:
                kept.take(state)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class RecurrentBackend(SlotBackend):
    """Dense slots on any device. What a slot or a saved prefix holds is good at its exact length only."""

    prefix_index = WholePrefixIndex

    def __init__(self, runner: ModelRunner, end_ids: Sequence[int] = (), *, max_bytes: int | None = None) -> None:
        if max_bytes is None and runner.device.type == "cuda":
            max_bytes = int(_SHARE_OF_FREE * torch.cuda.mem_get_info(runner.device)[0])
        super().__init__(runner, max_bytes=max_bytes)
        self._states, self._layers = StateTable(runner), runner.attention_layers
        self.bytes_per_state = self._states.bytes_per_slot

    def _attention(self, starts: Sequence[int], lengths: Sequence[int]) -> StepAttention:
        self._states.reserve(len(starts))
        return RecurrentStep(self._cache, self._states, self._layers, starts=starts, lengths=lengths)

    def copy(self, source: int, target: int, *, length: int) -> None:
        super().copy(source, target, length=length)
        self._states.reserve(target + 1)
        self._states.copy(source, target)

    def save_prefix(self, slot: int, *, length: int) -> SavedSlot:
        return replace(super().save_prefix(slot, length=length), states=self._states.save(slot))

    def restore_prefix(self, slot: int, saved: SavedSlot, *, length: int) -> None:
        super().restore_prefix(slot, saved, length=length)
        self._states.reserve(slot + 1)
        self._states.restore(slot, saved.states)

    def free_slot(self, slot: int, last: int, *, length: int) -> None:
        super().free_slot(slot, last, length=length)
        if slot != last:
            self._states.copy(last, slot)

    def free(self) -> None:
        super().free()
        self._states.free()
