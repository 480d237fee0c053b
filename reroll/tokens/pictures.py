"""Pictures among tokens: the seam to the store that keeps their bytes, the entry point `store` of the group `reroll.vision`.

Among the tokens of a prompt a picture is a run of ids beyond every vocabulary, made from the hash of its bytes. So prompts with
equal ids show equal pictures: whatever goes by common beginnings (siblings, caches, the router, the journal) is right as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from reroll.config.registry import load_entry
from reroll.types import Message

FIRST_ID = 1 << 23
"""Ids from here on are parts of pictures. No vocabulary has 8 million words, and the journal has room for twice as many."""
FOLDER = "pictures"
"""Of a run: what its samples were shown."""


def pictures() -> Any:
    """The store of this process: a `reroll_zoo.vision.store.PictureStore`."""
    return load_entry("reroll.vision", "store")


def pictures_to_send(ids: Any, *, but: Collection[str] = ()) -> dict[str, bytes]:
    """What must be known where these ids are read, but these."""
    has_any = bool((np.asarray(ids) >= FIRST_ID).any())
    found: dict[str, bytes] = pictures().of_tokens(ids, but=but) if has_any else {}
    return found


def receive_pictures(sent: Mapping[str, bytes]) -> None:
    """Know them from now on."""
    if sent:
        pictures().receive(sent)


def images_of(messages: Sequence[Message]) -> list[str]:
    """All pictures of a conversation, in order."""
    return [image for message in messages for image in message.get("images", ())]
