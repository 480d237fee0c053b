"""Pictures in conversations: what they are called, the ids that stand for them, and where their bytes are kept.

In a message's text MARK stands where a picture is, and `images` says in order which: a data URL, a file, or `picture:NAME` for
one that is kept here. Its name is the hash of its bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reroll.errors import DataError
from reroll.tokens.pictures import FIRST_ID
from reroll.types import Message

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for a picture in the text of a message that has `images`."""
MIN_TOKENS = 4
"""Of a picture: so many carry its name. The further ones carry their number."""
_NAMED = 1 << 22
_DIGITS = 5
"""Hexadecimal digits of the name that one token carries."""
_KEPT = "picture:"
_MAX_BYTES = 1 << 30
"""Held in memory; further ones lie in files."""


class PictureRun(NamedTuple):
    """A picture among tokens."""

    name: str
    places: NDArray[np.int64]
    """Where its tokens stand. Some models put others between them."""


def name_of(data: bytes) -> str:
    """What a picture of these bytes is called."""
    return hashlib.sha256(data).hexdigest()[: MIN_TOKENS * _DIGITS]


def called(name: str) -> str:
    """What a message's `images` may call a picture that is kept."""
    return _KEPT + name


def tokens_of(name: str, num: int) -> list[int]:
    """The `num` ids that stand for a picture."""
    parts = [int(name[start : start + _DIGITS], 16) for start in range(0, len(name), _DIGITS)]
    named = [FIRST_ID + _NAMED + (place << 4 * _DIGITS) + part for place, part in enumerate(parts)]
    return [*named, *range(FIRST_ID + MIN_TOKENS, FIRST_ID + num)]


def runs_in(ids: NDArray[np.int64]) -> list[PictureRun]:
    """The pictures among the ids of one sequence, from its beginning on; without one at its end whose name is cut off."""
    places = np.flatnonzero(ids >= FIRST_ID)
    if not len(places):
        return []
    numbers = ids[places] - FIRST_ID
    starts = np.flatnonzero(numbers >> 4 * _DIGITS == _NAMED >> 4 * _DIGITS).tolist()
    runs = []
    for start, end in pairwise([*starts, len(places)]):
        parts = numbers[start : start + MIN_TOKENS] & ((1 << 4 * _DIGITS) - 1)
        if len(parts) == MIN_TOKENS:
            runs.append(PictureRun("".join(f"{part:0{_DIGITS}x}" for part in parts.tolist()), places[start:end]))
    return runs


def names_in(ids: Iterable[int]) -> list[str]:
    """The pictures among the ids of whole sequences, each once."""
    return list(dict.fromkeys(run.name for run in runs_in(np.fromiter(ids, dtype=np.int64))))


class PictureStore:
    """The bytes of pictures by name. What does not fit into memory is written to a folder; nothing that was kept is lost."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._folders: list[Path] = []
        self._spilled: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()

    def keep(self, data: bytes) -> str:
        """Returns its name."""
        name = name_of(data)
        with self._lock:
            self._hold(name, data)
        return name

    def __contains__(self, name: str) -> bool:
        """Whether it is held in memory."""
        with self._lock:
            return name in self._held

    def find(self, name: str) -> bytes:
        """Raises DataError if it was never kept, or its file is gone."""
        with self._lock:
            if name in self._held:
                self._held.move_to_end(name)
                return self._held[name]
            spilled = [Path(self._spilled.name)] if self._spilled else []
            for folder in (*spilled, *reversed(self._folders)):
                if (folder / name).is_file():
                    data = (folder / name).read_bytes()
                    self._hold(name, data)
                    return data
        raise DataError(f"the picture {name} is not among those of this run: its folder `pictures` was removed")

    def read(self, image: str) -> str:
        """Keep what an entry of a message's `images` means, and return its name. Raises DataError."""
        if image.startswith(_KEPT):
            return image.removeprefix(_KEPT)
        if not image.startswith("data:"):
            try:
                return self.keep(Path(image).read_bytes())
            except OSError as error:
                raise DataError(f"the picture {image} cannot be read: {error.strerror}") from error
        try:
            return self.keep(base64.b64decode(image.partition(",")[2], validate=True))
        except binascii.Error as error:
            raise DataError(f"a picture's data URL is broken: {error}") from error

    def look_in(self, folder: Path) -> None:
        """Find also what a run has left in this folder."""
        with self._lock:
            self._folders = [*(one for one in self._folders if one != folder), folder]

    def write(self, image: str, folder: Path) -> str:
        """Have this picture in a folder, once. Returns what `images` may call it from now on."""
        name = self.read(image)
        file = folder / name
        if not file.is_file():
            data = self.find(name)
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
            unfinished.write_bytes(data)
            unfinished.replace(file)
        return called(name)

    def filed(self, message: Message, folder: Path) -> Message:
        """The message with its pictures in this folder, and by name."""
        if "images" not in message:
            return message
        return {**message, "images": [self.write(image, folder) for image in message["images"]]}

    def of_tokens(self, ids: Iterable[int], *, but: Collection[str] = ()) -> dict[str, bytes]:
        """The pictures among the ids of whole sequences, but these: to be sent where the ids are sent."""
        return {name: self.find(name) for name in names_in(ids) if name not in but}

    def receive(self, pictures: Mapping[str, bytes]) -> None:
        """Keep what came with tokens."""
        with self._lock:
            for name, data in pictures.items():
                self._hold(name, data)

    def _hold(self, name: str, data: bytes) -> None:
        if name in self._held:
            return
        self._held[name] = data
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes and len(self._held) > 1:
            oldest, there = self._held.popitem(last=False)
            self._num_bytes -= len(there)
            self._spilled = self._spilled or tempfile.TemporaryDirectory(prefix="reroll-pictures-")
            (Path(self._spilled.name) / oldest).write_bytes(there)


PICTURES = PictureStore()
"""Those of this process. They are told apart by their content, so that all runs may share it."""


def texts_around(content: str, num_images: int) -> list[str]:
    """A message's text, cut where its pictures stand. Raises DataError unless there are so many marks."""
    texts = content.split(MARK)
    if len(texts) != num_images + 1:
        raise DataError(
            f"a message has {num_images} images and {len(texts) - 1} places for them: give its content as a list of parts"
        )
    return texts
