"""Pushes of what changed alone (`weights.delta`), bit for bit. Both ends keep what was sent last."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from reroll.weights.buckets import Bucket, PushBroken

_CHECKSUM, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")
"""The checksum of all that follows it, then the length of the compressed bits, which come next."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Values are compared as integers: NaN equals itself, and 0.0 does not equal -0.0."""


class SentWeights:
    """The sender's copies."""

    def __init__(self) -> None:
        self._sent: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor, *, as_change: bool) -> Tensor:
        """The tensor, or how it changed since it was last sent; kept for the next time."""
        new = tensor.to("cpu", copy=True).contiguous()
        base, self._sent[name] = self._sent.get(name), new
        return encode_change(new, base=base) if as_change and base is not None else new


class ReceivedWeights:
    """The receiver's copies."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}
        """By sender and name."""

    def applied(self, bucket: Bucket, tensors: Mapping[str, Tensor], *, base_version: int | None) -> Mapping[str, Tensor]:
        """Whole tensors, of those of a bucket, which may be changes since the version that was taken last."""
        keys = {name: (bucket.sender, name) for name in tensors}
        if bucket.base_version is None:
            self._kept |= {keys[name]: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        elif bucket.base_version != base_version or not self._kept.keys() >= set(keys.values()):
            raise PushBroken(f"changes since version {bucket.base_version} came, but version {base_version} is what is here")
        else:
            for name, coded in tensors.items():
                apply_change(coded.cpu(), base=self._kept[keys[name]])
        return {name: self._kept[key] for name, key in keys.items()}


def encode_change(new: Tensor, *, base: Tensor) -> Tensor:
    """[bytes] what `apply_change` needs to make `new` of `base`. Both lie on the host, in the same dtype and shape."""
    bits, before = _bits(new), _bits(base)
    changed = bits != before
    mask = zlib.compress(np.packbits(changed.numpy()).tobytes(), level=1)
    body = _LENGTH.pack(len(mask)) + mask + bits[changed].numpy().tobytes()
    return torch.frombuffer(bytearray(_CHECKSUM.pack(zlib.crc32(body)) + body), dtype=torch.uint8)


def apply_change(coded: Tensor, *, base: Tensor) -> None:
    """Turn `base` into the tensor that was encoded, in place. Raises PushBroken if the bytes are not what was sent."""
    data = memoryview(coded.numpy().tobytes())
    body = data[_CHECKSUM.size :]
    if len(body) < _LENGTH.size or _CHECKSUM.unpack_from(data) != (zlib.crc32(body),):
        raise PushBroken("a change of weights was damaged on its way: its checksum does not match")
    (num_mask_bytes,) = _LENGTH.unpack_from(body)
    mask, values = body[_LENGTH.size :][:num_mask_bytes], bytearray(body[_LENGTH.size + num_mask_bytes :])
    bits = _bits(base)
    packed = np.frombuffer(zlib.decompress(mask), dtype=np.uint8)
    changed = torch.from_numpy(np.unpackbits(packed, count=bits.numel()).astype(bool))
    if values:
        bits[changed] = torch.frombuffer(values, dtype=bits.dtype)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(_BITS[tensor.dtype.itemsize])
