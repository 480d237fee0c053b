"""Content that is a list of parts, text and pictures, as the plain text and the `images` that a message holds."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
from PIL import Image, UnidentifiedImageError

from reroll.types import Message
from reroll_zoo.vision.store import MARK, PICTURES, called, name_of

_PICTURE_KEYS = ("image", "path", "url", "image_url", "bytes")
_SHOWN_CHARACTERS = 60
MAX_PIXELS = 1 << 24
"""Of a picture that a stranger sent: a few bytes may claim to be any number."""
_STRANGERS_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def message(role: str, *parts: Any) -> Message:
    """A message of texts and pictures (files, bytes, PIL images, arrays), e.g. `message("user", picture, "Which digit?")`.

    A string is text; name a file with `pathlib.Path`. Raises ValueError.
    """
    listed = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    text, images = plain_content(listed)
    return {"role": role, "content": text, "images": images} if images else {"role": role, "content": text}


def plain_content(parts: Sequence[Any], *, folder: Path | None = None, given: list[Any] | None = None) -> tuple[str, list[str]]:
    """The text, with `MARK` where pictures stand, and these as `images` holds them.

    Parts are those of OpenAI and of Hugging Face: `{"type": "text", "text": …}`, `{"type": "image", "image": …}` (a file, a
    data URL, bytes, a PIL image, an array of pixels), `{"type": "image_url", "image_url": {"url": …}}`. One that is
    `{"type": "image"}` and no more takes the next of `given`. Files are looked for in `folder`. Raises ValueError that says
    which part is wrong.
    """
    text, images = "", list[str]()
    for place, part in enumerate(parts):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise ValueError(f'part {place} is {_shown(part)}: give {{"type": "text", …}} or {{"type": "image", …}}')
        if part["type"] == "text":
            if not isinstance(part.get("text"), str):
                raise ValueError(f"part {place} has no `text` that is a string")
            text += _unmarked(part["text"])
            continue
        if part["type"] not in ("image", "image_url"):
            raise ValueError(f"part {place} is of type {part['type']!r}: reroll takes text and image")
        found = [part[key] for key in _PICTURE_KEYS if part.get(key) is not None]
        if not found and not given:
            raise ValueError(f"part {place} is a picture without one: give `image`, or a row with `images`")
        try:
            images.append(as_image(found[0] if found else (given or []).pop(0), folder=folder))
        except ValueError as error:
            raise ValueError(f"part {place}: {error}") from None
        text += MARK
    return text, images


def as_image(value: Any, *, folder: Path | None = None) -> str:
    """A picture as a message's `images` holds it: a data URL, or the absolute path of a file. Raises ValueError."""
    if isinstance(value, Mapping):  # As `datasets` stores them, or OpenAI sends them.
        found = [value[key] for key in ("bytes", "path", "url") if value.get(key) is not None]
        if not found:
            raise ValueError(f"{_shown(value)} is no picture: it has neither bytes nor path nor url")
        return as_image(found[0], folder=folder)
    if isinstance(value, Image.Image):
        return _data_url(_png(value), "png")
    if isinstance(value, np.ndarray):
        return _data_url(_png(_of_pixels(value)), "png")
    if isinstance(value, bytes | bytearray | memoryview):
        return _data_url(bytes(value), _kind_of(io.BytesIO(value), "the bytes"))
    if isinstance(value, str) and value.startswith("data:"):
        return _checked_url(value)
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise ValueError(f"{_shown(value)} lies on the web: a run fetches nothing, so store it and name the file")
    if isinstance(value, str | Path):
        path = unquote(urlparse(value).path) if isinstance(value, str) and value.startswith("file:") else value
        return _checked_file(Path(path).expanduser(), folder)
    raise ValueError(f"{_shown(value)} is a {type(value).__name__}: give a file, a data URL, bytes, a PIL image or pixels")


def kept_url(url: str) -> str:
    """What `images` calls the picture of a data URL that a stranger sent: it is kept under the hash of its bytes, so that equal
    pictures have equal names and others do not. Its size is read before it is decoded. Raises ValueError."""
    if not url.startswith("data:"):
        raise ValueError(f"{_shown(url)} is no data URL, and nothing is fetched: send data:image/png;base64,…")
    data = _data_of(url)
    if (name := name_of(data)) not in PICTURES:
        _check_stranger(data)
        PICTURES.keep(data)
    return called(name)


def _check_stranger(data: bytes) -> None:
    try:
        with Image.open(io.BytesIO(data), formats=_STRANGERS_FORMATS) as image:
            if (num := image.width * image.height) > MAX_PIXELS:
                raise ValueError(
                    f"it is {image.width} × {image.height} = {num:,} pixels, and {MAX_PIXELS:,} are taken: shrink it"
                )
            image.load()
    except (Image.DecompressionBombError, EOFError, IndexError, OSError, SyntaxError, TypeError, struct.error) as error:
        # All that Pillow's decoders were seen to raise.
        raise ValueError(f"it cannot be decoded as {', '.join(_STRANGERS_FORMATS)}: {type(error).__name__}") from None


def opened(data: bytes) -> Image.Image:
    """The pixels of an encoded picture. Raises ValueError."""
    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"a picture cannot be decoded: {error}") from error


def _unmarked(text: str) -> str:
    return text.replace(MARK, "")  # It would be taken for a picture.


def _checked_url(url: str) -> str:
    _kind_of(io.BytesIO(_data_of(url)), "the data URL")
    return url


def _data_of(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"{_shown(url)} is no data URL in base64")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ValueError(f"{_shown(url)} is broken: {error}") from None


def _checked_file(path: Path, folder: Path | None) -> str:
    """Seen from the folder, else from the working directory."""
    found = next((place for place in (folder and folder / path, path) if place and place.is_file()), None)
    if found is None:
        raise ValueError(f"there is no file {path}" + (f" in {folder.absolute()}" if folder else ""))
    with found.open("rb") as file:
        _kind_of(file, str(path))
    return str(found.absolute())


def _kind_of(file: Any, what: str) -> str:
    """The format, read from the first bytes."""
    try:
        with Image.open(file) as image:
            return (image.format or "png").lower()
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{what} is no picture that Pillow can read: {type(error).__name__}") from None


def _data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _of_pixels(pixels: np.ndarray[Any, Any]) -> Image.Image:
    is_image = pixels.dtype == np.uint8 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
    if not is_image:
        raise ValueError(f"an array {list(pixels.shape)} of {pixels.dtype} is no picture: give [height, width, 3] of uint8")
    return Image.fromarray(np.ascontiguousarray(pixels))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
