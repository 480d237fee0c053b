"""Seeds that are the same on every machine and in every run of the same config."""

from __future__ import annotations

from hashlib import blake2b


def stable_seed(*parts: int) -> int:
    """A 63-bit seed from the numbers that name a draw, e.g. (run seed, group number, sibling). Order counts."""
    digest = blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
