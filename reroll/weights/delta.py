"""Changes between two versions of a tensor, bit by bit: which values differ, and what they are now.

One bit per value says whether it changed; these bits compress well, since few are set. The new values follow as they are.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from reroll.weights.bucket import PushBroken

_CHECKSUM, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")
"""The checksum of all that follows it, then the length of the compressed bits, which come next."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Values are compared as integers: NaN equals itself, and 0.0 does not equal -0.0."""


def encode(new: Tensor, *, base: Tensor) -> Tensor:
    """[bytes] what `apply` needs to make `new` of `base`. Both lie on the host, in the same dtype and shape."""
    bits, before = _bits(new), _bits(base)
    changed = bits != before
    mask = zlib.compress(np.packbits(changed.numpy()).tobytes(), level=1)
    body = _LENGTH.pack(len(mask)) + mask + bits[changed].numpy().tobytes()
    return torch.frombuffer(bytearray(_CHECKSUM.pack(zlib.crc32(body)) + body), dtype=torch.uint8)


def apply(coded: Tensor, *, base: Tensor) -> None:
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
