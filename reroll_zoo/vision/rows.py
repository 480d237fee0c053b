"""Rows with pictures: in the parts of their messages, or in a column of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reroll.data.rows import BadRow
from reroll_zoo.vision.parts import plain_content
from reroll_zoo.vision.store import MARK

COLUMNS = ("images", "image")
"""Where a row may have its pictures: one, or a list of them."""
PLACE = "<image>"
"""Where a picture stands in a prompt that is plain text. Without any, pictures stand before the text."""


def with_pictures(row: Mapping[str, Any], *, prompt: str, messages: str, folder: Path | None) -> dict[str, Any]:
    """The row with its pictures in its messages, as `Message` has them. Columns `prompt` and `messages` are called so.

    Raises BadRow.
    """
    given = _given(row)
    plain = {name: value for name, value in row.items() if name not in COLUMNS}
    if row.get(messages) is None and isinstance(row.get(prompt), str):
        parts = _placed(plain.pop(prompt), len(given))
        plain[messages] = [{"role": "user", "content": parts}]
    if not isinstance(plain.get(messages), list):
        return plain  # It is no conversation either way: told by who reads it.
    plain[messages] = [_plain(message, f"{messages}[{place}]", folder, given) for place, message in enumerate(plain[messages])]
    if given:
        raise BadRow(f'{len(given)} of its pictures stand nowhere: give as many parts {{"type": "image"}} (or marks {PLACE})')
    return plain


def _given(row: Mapping[str, Any]) -> list[Any]:
    found: Any = next((row[name] for name in COLUMNS if row.get(name) is not None), [])
    return list(found) if isinstance(found, list | tuple) else [found]


def _placed(text: str, num: int) -> list[dict[str, str]]:
    """A prompt's text as parts."""
    texts = text.split(PLACE) if num else [text]
    if len(texts) == 1:
        return [*[{"type": "image"}] * num, {"type": "text", "text": text}]
    if len(texts) != num + 1:
        raise BadRow(f"{len(texts) - 1} marks {PLACE} and {num} pictures")
    return [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]


def _plain(message: Any, name: str, folder: Path | None, given: list[Any]) -> Any:
    if isinstance(message, Mapping) and message.get("images"):
        return _as_it_is(message, name)
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list | tuple):
        return message
    # Columnar files fill the keys that only other parts have with nulls.
    parts = [
        {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part
        for part in message["content"]
    ]
    try:
        text, images = plain_content(parts, folder=folder, given=given)
    except ValueError as error:
        raise BadRow(f"`{name}.content`: {error}") from None
    return {**message, "content": text} | ({"images": images} if images else {})


def _as_it_is(message: Mapping[str, Any], name: str) -> Any:
    """A message whose pictures stand beside its text already, as `Message` has them."""
    content, images = message.get("content"), message["images"]
    is_list = isinstance(images, list) and all(isinstance(image, str) for image in images)
    if not is_list or not isinstance(content, str) or content.count(MARK) != len(images):
        raise BadRow(f"`{name}.images` does not name a picture for each place of one: give `{name}.content` as a list of parts")
    return message
