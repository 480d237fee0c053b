"""Pictures among tokens: the seam to the store that keeps their bytes, the entry point `store` of the group `reroll.vision`.

Among the tokens of a prompt a picture is a run of ids beyond every vocabulary, made from the hash of its bytes. So prompts with
equal ids show equal pictures: whatever goes by common beginnings (siblings, caches, the router, the journal) is right as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from reroll.config.registry import load_entry
from reroll.types import Message

FIRST_ID = 1 << 23
"""Ids from here on are parts of pictures. No vocabulary has 8 million words, and the journal has room for twice as many."""
FOLDER = "pictures"
"""Of a run: what its samples were shown."""


class Pictures(Protocol):
    """Keeps the pictures of a process by name. They are told apart by their content, so that all runs may share it."""

    def of_tokens(self, ids: Any, *, but: Collection[str] = ()) -> dict[str, bytes]:
        """Those among the ids of whole sequences, but these."""

    def receive(self, pictures: Mapping[str, bytes]) -> None:
        """Keep what came with tokens from another process."""

    def look_in(self, folder: Path) -> None:
        """Find also what a run has left in this folder."""

    def filed(self, message: Message, folder: Path) -> Message:
        """The message with its pictures in this folder, and by name: what may be stored and sent at will."""


def pictures() -> Pictures:
    """The store of this process."""
    return cast(Pictures, load_entry("reroll.vision", "store"))


def pictures_to_send(ids: Any, *, but: Collection[str] = ()) -> dict[str, bytes]:
    """What must be known where these ids are read, but these."""
    return pictures().of_tokens(ids, but=but) if bool((np.asarray(ids) >= FIRST_ID).any()) else {}


def receive_pictures(sent: Mapping[str, bytes]) -> None:
    """Know them from now on."""
    if sent:
        pictures().receive(sent)


def images_of(messages: Sequence[Message]) -> list[str]:
    """All pictures of a conversation, in order."""
    return [image for message in messages for image in message.get("images", ())]
