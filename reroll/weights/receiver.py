"""The engine's end of a push: takes buckets in order, and refuses what is not the next one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor

from reroll.weights.bucket import (
    Bucket,
    Channel,
    InGroup,
    IpcHandle,
    IpcTensors,
    Mapped,
    OnDisk,
    PushBroken,
    SameIpcTensors,
    Stored,
    unpack,
)
from reroll.weights.delta import apply
from reroll.weights.group import BroadcastGroup

# Arrays from the runtime's store are read-only, and are only read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

_DEVICE = 6
"""Position of the device index in a handle's arguments: it is the sender's, and may differ in this process."""


class WeightReceiver:
    """Receives what a `WeightSender` sends through the same channel."""

    def __init__(self, channel: Channel, *, device: torch.device) -> None:
        self._device = device
        self._group = BroadcastGroup(channel.group_rank, device) if channel.group_rank else None
        self._keeps = channel.delta
        self._kept: dict[str, Tensor] = {}
        self._shared: dict[str, Tensor] = {}
        """Kept open: opening hundreds of tensors takes longer than copying them."""
        self._confirmed: int | None = None
        self._base: int | None = None
        self._version, self._num_taken = 0, 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """The tensors of the next bucket, valid until the next call. Raises PushBroken if it is not the next.

        The first bucket of a version is always accepted: what is left of an earlier version is void.
        """
        if bucket.index == 0:
            self._base, self._confirmed = self._confirmed, None
            self._version, self._num_taken = bucket.version, 0
        if (bucket.version, bucket.index) != (self._version, self._num_taken):
            raise PushBroken(
                f"bucket {bucket.index} of version {bucket.version} came where {self._num_taken} of {self._version} was due"
            )
        self._num_taken += 1
        tensors = self._received(bucket)
        if not self._keeps:
            return tensors
        if bucket.base_version is None:
            kept = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        else:
            kept = self._changed(tensors, base_version=bucket.base_version)
        self._kept |= kept
        return kept

    def confirm(self) -> None:
        """The whole version has been received and is in use."""
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

    def _received(self, bucket: Bucket) -> Mapping[str, Tensor]:
        match bucket.payload:
            case OnDisk(path):
                return safetensors.torch.load_file(path)
            case Stored(data):
                flat = torch.from_numpy(data)
            case Mapped(path):
                flat = torch.from_file(path, shared=True, size=bucket.num_bytes, dtype=torch.uint8)
            case IpcHandle():
                flat = self._opened(bucket.payload)
            case IpcTensors(handles):
                self._shared = {entry.name: self._opened(handle) for entry, handle in zip(bucket.entries, handles, strict=True)}
                return self._shared
            case SameIpcTensors():
                return self._shared
            case InGroup():
                flat = self._broadcast(bucket.num_bytes)
        return unpack(flat, bucket.entries)

    def _opened(self, handle: IpcHandle) -> Tensor:
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
