"""A model's image processor: what it makes of pictures, and the tokens that they are among."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoImageProcessor, PreTrainedTokenizerBase

from reroll.errors import DataError, ModelError
from reroll.models.load import resolve_base
from reroll.types import Message
from reroll_zoo.vision.families import ReadPicture, family_of
from reroll_zoo.vision.parts import opened
from reroll_zoo.vision.store import MIN_TOKENS, PICTURES, texts_around, tokens_of

_NUM_KEPT = 256
"""Pictures whose pixels are kept as the processor made them."""


class PictureReader:
    """The image processor stored with a model. The same in the controller, the engine and the trainer."""

    def __init__(self, name: str) -> None:
        folder = resolve_base(name)
        try:
            self.config: Any = AutoConfig.from_pretrained(folder)
            self.family = family_of(self.config)
            # The backend that needs no torchvision: so equal pixels wherever it runs.
            opener: Any = AutoImageProcessor
            self.processor = opener.from_pretrained(folder, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            wants_more = isinstance(error, ImportError)  # Before 5.18 of transformers, torchvision, which is not used.
            fix = "pip install -U transformers, or what is missing" if wants_more else "get its preprocessor_config.json"
            raise ModelError(f"cannot load the image processor of {name!r}: {reason} ({fix})") from error
        self.read = lru_cache(maxsize=_NUM_KEPT)(self._read)

    def save(self, folder: Path) -> None:
        self.processor.save_pretrained(folder)

    def _read(self, name: str) -> ReadPicture:
        """What is made of a kept picture. Raises DataError."""
        try:
            found = self.family.read(opened(PICTURES.find(name)), self.processor, self.config)
        except ValueError as error:
            raise DataError(f"the picture {name}: {error}") from error
        if found.num_tokens < MIN_TOKENS:
            raise DataError(
                f"the picture {name} is {found.num_tokens} tokens for this model, and no less than {MIN_TOKENS} can name it: "
                "show a larger one, or raise the smallest size in its preprocessor_config.json"
            )
        return found


@lru_cache(maxsize=8)
def reader_of(name: str) -> PictureReader:
    """The reader of a model folder, opened once. Raises ModelError if that model sees nothing."""
    return PictureReader(name)


class PromptPictures:
    """Puts pictures among the tokens of prompts, as the model's processor does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._reader = reader_of(tokenizer.name_or_path)
        self._image_id: int = self._reader.config.image_token_id

    def parts(self, message: Message) -> list[dict[str, str]]:
        """The content of a message as chat templates take it."""
        texts = texts_around(message["content"], len(message["images"]))
        parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
        return [part for part in parts if part.get("text") != ""]

    def encode(self, text: str, images: Sequence[str]) -> tuple[int, ...]:
        """The ids of a text in which these pictures have their placeholders, in order; each is a run of ids of its own."""
        names = [PICTURES.read(image) for image in images]
        placeholder = self._reader.family.placeholder
        first, *others = text.split(placeholder)
        if len(others) != len(names):
            raise DataError(
                f"{len(names)} pictures, and {len(others)} times {placeholder} in the prompt's text: take it out of what is "
                "said, or use a chat template that shows pictures"
            )
        pictures = [self._reader.read(name) for name in names]
        whole = first + "".join(picture.text + words for picture, words in zip(pictures, others, strict=True))
        ids = np.array(self._tokenizer.encode(whole, add_special_tokens=False), dtype=np.int64)
        shown = [token for name, picture in zip(names, pictures, strict=True) for token in tokens_of(name, picture.num_tokens)]
        places = ids == self._image_id
        if int(places.sum()) != len(shown):
            token = self._reader.family.image_token
            raise ModelError(f"the tokenizer does not take {token} for one token: it is not this model's")
        ids[places] = shown
        return tuple(ids.tolist())
