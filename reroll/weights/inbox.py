"""The engine's end: takes parcels in order, and tells whether a version has come whole."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor

from reroll.weights.delta import apply
from reroll.weights.group import Group
from reroll.weights.parcel import Channel, InGroup, Lent, LentBefore, Mapped, OnDisk, OnGpu, Parcel, PushBroken, Stored, unpack

# What the runtime's store lends is read-only, and is only read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

_DEVICE = 6
"""Where the device's index stands among what torch opens a GPU's memory with: it is the sender's, and may differ here."""


class Inbox:
    """Receives what an Outbox sends through the same channel."""

    def __init__(self, channel: Channel, *, device: torch.device) -> None:
        self._device = device
        self._group = Group(channel.seat, device) if channel.seat else None
        self._keeps = channel.delta
        self._kept: dict[str, Tensor] = {}
        self._lent: dict[str, Tensor] = {}
        """Kept open: opening hundreds of tensors takes longer than copying them."""
        self._confirmed: int | None = None
        self._base: int | None = None
        self._version, self._num_taken = 0, 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def open(self, parcel: Parcel) -> Mapping[str, Tensor]:
        """The tensors of the next parcel, to be copied before the call after. Raises PushBroken if it is not the next.

        The first of a version may always come: what is left of an earlier version is void.
        """
        if parcel.index == 0:
            self._base, self._confirmed = self._confirmed, None
            self._version, self._num_taken = parcel.version, 0
        if (parcel.version, parcel.index) != (self._version, self._num_taken):
            raise PushBroken(
                f"parcel {parcel.index} of version {parcel.version} came where {self._num_taken} of {self._version} was due"
            )
        self._num_taken += 1
        tensors = self._received(parcel)
        if not self._keeps:
            return tensors
        if parcel.base_version is None:
            kept = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        else:
            kept = self._changed(tensors, base_version=parcel.base_version)
        self._kept |= kept
        return kept

    def confirm(self) -> None:
        """The last parcel was opened, and all that came is in use."""
        self._confirmed = self._version

    def close(self) -> None:
        """Leave the channel; whoever waits in its group fails."""
        if self._group is not None:
            self._group.leave()

    def _changed(self, changes: Mapping[str, Tensor], *, base_version: int) -> dict[str, Tensor]:
        if base_version != self._base or not changes.keys() <= self._kept.keys():
            raise PushBroken(f"changes since version {base_version} came, but version {self._base} is what is here")
        for name, coded in changes.items():
            apply(coded.cpu(), base=self._kept[name])
        return {name: self._kept[name] for name in changes}

    def _received(self, parcel: Parcel) -> Mapping[str, Tensor]:
        match parcel.payload:
            case OnDisk(path):
                return safetensors.torch.load_file(path)
            case Stored(data):
                flat = torch.from_numpy(data)
            case Mapped(path):
                flat = torch.from_file(path, shared=True, size=parcel.num_bytes, dtype=torch.uint8)
            case OnGpu():
                flat = self._opened(parcel.payload)
            case Lent(handles):
                self._lent = {entry.name: self._opened(handle) for entry, handle in zip(parcel.entries, handles, strict=True)}
                return self._lent
            case LentBefore():
                return self._lent
            case InGroup():
                flat = self._broadcast(parcel.num_bytes)
        return unpack(flat, parcel.entries)

    def _opened(self, handle: OnGpu) -> Tensor:
        before, after = handle.arguments[:_DEVICE], handle.arguments[_DEVICE + 1 :]
        tensor: Tensor = handle.open(*before, self._device.index or 0, *after)
        return tensor

    def _broadcast(self, num_bytes: int) -> Tensor:
        assert self._group is not None
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        flat = self._buffer[:num_bytes]
        self._group.broadcast(flat).wait()
        return flat
