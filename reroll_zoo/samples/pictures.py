"""The pictures that a run's samples were shown, as its folder keeps them: raster images of a few kinds, by the hash of their
bytes. Nothing else of the folder, or beside it, can be asked for by such a name.
"""

from __future__ import annotations

import re
from base64 import b64encode
from pathlib import Path
from typing import NamedTuple

from reroll_zoo.vision.store import name_of

FOLDER = "pictures"
_KEPT = "picture:"
"""What `Message.images` says before the name of a picture that the run keeps."""
_NAME = re.compile(r"[0-9a-f]{20}")
_MAX_BYTES = 1 << 25
_KINDS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"BM": "image/bmp",
}
"""What a browser may be given, by what such a file begins with. Never SVG, which may hold a script."""
RASTER_KINDS = frozenset({*_KINDS.values(), "image/webp"})


class RasterPicture(NamedTuple):
    """Bytes that a browser may show, and as what."""

    data: bytes
    kind: str

    @property
    def url(self) -> str:
        """The whole picture, for a page that needs nothing beside it."""
        return f"data:{self.kind};base64,{b64encode(self.data).decode()}"


def kept_name(image: str) -> str:
    """The name of an entry of `Message.images`; empty if it is not kept with the run."""
    name = image.removeprefix(_KEPT)
    return name if image.startswith(_KEPT) and _NAME.fullmatch(name) else ""


def read_picture(run: Path, name: str) -> RasterPicture | None:
    """A picture of this run; None where the name is none, nothing of that name is kept, or it is no raster image."""
    file = run / FOLDER / name
    if not _NAME.fullmatch(name) or file.is_symlink():
        return None
    try:
        with file.open("rb") as stored:
            data = stored.read(_MAX_BYTES + 1)
    except OSError:
        return None
    kind = _kind_of(data)
    return RasterPicture(data, kind) if kind and len(data) <= _MAX_BYTES and name_of(data) == name else None


def _kind_of(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _KINDS.items() if data.startswith(start)), "")
