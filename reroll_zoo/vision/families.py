"""What families of models that see do differently: how their text shows a picture, their towers, their positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from reroll.errors import ModelError
from reroll_zoo.vision.kinds import GEMMA, QWEN, SMOL
from reroll_zoo.vision.store import runs_in


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """What a model's image processor makes of a picture."""

    text: str
    """What stands in the prompt's text in its place: image tokens, and in some families others between them."""
    num_tokens: int
    """How many of these are image tokens."""
    grid: tuple[int, int]
    """Its height and width in tokens; of families whose positions do not go by them, zeros."""
    inputs: dict[str, Tensor]
    """What the tower takes."""


@dataclass(frozen=True, slots=True)
class Features:
    """What a tower makes of a picture."""

    embeddings: Tensor
    """[tokens, hidden]"""
    deep: tuple[Tensor, ...] = ()
    """[tokens, hidden] to be added behind the decoder's first layers."""

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.embeddings, *self.deep))


class SeeingFamily(ABC):
    """One for all models of it."""

    placeholder: str
    """How the chat template shows a picture."""
    image_token: str
    """What `ReadPicture.text` holds for each of its tokens."""
    has_grid_positions: bool = False
    """Whether a picture's tokens stand at rows and columns, not one after the other."""
    looks_both_ways: bool = False
    """Whether those that stand side by side look at each other in both directions."""

    @abstractmethod
    def read(self, image: Image.Image, processor: Any, config: Any) -> ReadPicture: ...

    @abstractmethod
    def tower(self, base: PreTrainedModel) -> list[nn.Module]:
        """The modules that only pictures go through."""

    @abstractmethod
    def decoder(self, base: PreTrainedModel) -> PreTrainedModel:
        """The language model in it."""

    @abstractmethod
    def look(self, base: PreTrainedModel, pictures: Sequence[ReadPicture]) -> list[Features]:
        """Run the tower once on all of these."""


class QwenFamily(SeeingFamily):
    """Qwen2.5-VL and Qwen3-VL: pictures of any size, positions in three dimensions."""

    placeholder = image_token = "<|image_pad|>"
    has_grid_positions = True

    def read(self, image: Image.Image, processor: Any, config: Any) -> ReadPicture:
        inputs = processor(images=[image], return_tensors="pt")
        _, height, width = inputs["image_grid_thw"][0].tolist()
        grid = height // processor.merge_size, width // processor.merge_size
        num = grid[0] * grid[1]
        pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
        return ReadPicture(self.image_token * num, num, grid, pixels)

    def tower(self, base: PreTrainedModel) -> list[nn.Module]:
        return [base.get_submodule("visual")]

    def decoder(self, base: PreTrainedModel) -> PreTrainedModel:
        found = base.get_submodule("language_model")
        assert isinstance(found, PreTrainedModel)
        return found

    def look(self, base: PreTrainedModel, pictures: Sequence[ReadPicture]) -> list[Features]:
        pixels, grids = (
            torch.cat([picture.inputs[name] for picture in pictures]).to(base.device)
            for name in ("pixel_values", "image_grid_thw")
        )
        output = base.get_image_features(pixels, grids, return_dict=True)  # type: ignore[operator]
        layers = getattr(output, "deepstack_features", None) or ()  # Qwen3-VL has them.
        return [Features(found, tuple(layer[place] for layer in layers)) for place, found in enumerate(output.pooler_output)]


class SmolFamily(SeeingFamily):
    """SmolVLM and Idefics3: large pictures are cut into tiles, each of which is a run of tokens with its place before it."""

    placeholder = image_token = "<image>"

    def read(self, image: Image.Image, processor: Any, config: Any) -> ReadPicture:
        inputs = processor(images=[[image]], return_row_col_info=True, return_tensors="pt")
        vision = config.vision_config
        num_of_tile = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
        text: str = get_image_prompt_string(  # type: ignore[no-untyped-call]
            inputs["rows"][0][0],
            inputs["cols"][0][0],
            num_of_tile,
            fake_token_around_image="<fake_token_around_image>",
            image_token=self.image_token,
            global_image_token="<global-img>",
        )
        pixels = {name: inputs[name][0] for name in ("pixel_values", "pixel_attention_mask")}
        return ReadPicture(text, num_of_tile * len(pixels["pixel_values"]), (0, 0), pixels)

    def tower(self, base: PreTrainedModel) -> list[nn.Module]:
        return [base.get_submodule("vision_model"), base.get_submodule("connector")]

    def decoder(self, base: PreTrainedModel) -> PreTrainedModel:
        found = base.get_submodule("text_model")
        assert isinstance(found, PreTrainedModel)
        return found

    def look(self, base: PreTrainedModel, pictures: Sequence[ReadPicture]) -> list[Features]:
        # Not by way of `get_image_features`: that takes a picture which is all grey for padding, and leaves it out.
        tower, connector = self.tower(base)
        pixels, mask = (
            torch.cat([picture.inputs[name] for picture in pictures]).to(base.device)
            for name in ("pixel_values", "pixel_attention_mask")
        )
        size: int = base.config.vision_config.patch_size
        patches = mask.unfold(1, size, size).unfold(2, size, size).sum((-1, -2)) > 0
        output = tower(pixel_values=pixels.to(base.dtype), patch_attention_mask=patches)
        found = connector(output.last_hidden_state)
        parts = found.split([len(picture.inputs["pixel_values"]) for picture in pictures])
        return [Features(part.flatten(0, 1)) for part in parts]


class GemmaFamily(SeeingFamily):
    """Gemma 3: pictures are squares of one size; of a long one, crops may be shown beside the whole (`do_pan_and_scan`)."""

    placeholder = "<start_of_image>"
    image_token = "<image_soft_token>"
    looks_both_ways = True

    def read(self, image: Image.Image, processor: Any, config: Any) -> ReadPicture:
        inputs = processor(images=[[image]], return_tensors="pt")
        num_crops = int(inputs["num_crops"][0])
        num: int = config.mm_tokens_per_image
        text = f"\n\n{self.placeholder}{self.image_token * num}<end_of_image>\n\n"
        if num_crops:
            crops = " ".join([text] * num_crops)
            text = f"Here is the original image {text} and here are some crops to help you see better {crops}"
        return ReadPicture(text, num * (1 + num_crops), (0, 0), {"pixel_values": inputs["pixel_values"]})

    def tower(self, base: PreTrainedModel) -> list[nn.Module]:
        return [base.get_submodule("vision_tower"), base.get_submodule("multi_modal_projector")]

    def decoder(self, base: PreTrainedModel) -> PreTrainedModel:
        found = base.get_submodule("language_model")
        assert isinstance(found, PreTrainedModel)
        return found

    def look(self, base: PreTrainedModel, pictures: Sequence[ReadPicture]) -> list[Features]:
        pixels = [picture.inputs["pixel_values"] for picture in pictures]
        output = base.get_image_features(torch.cat(pixels).to(base.device, base.dtype), return_dict=True)  # type: ignore[operator]
        return [Features(found.flatten(0, 1)) for found in output.pooler_output.split([len(each) for each in pixels])]


FAMILIES: dict[str, SeeingFamily] = (
    dict.fromkeys(SMOL, SmolFamily()) | dict.fromkeys(QWEN, QwenFamily()) | dict.fromkeys(GEMMA, GemmaFamily())
)
"""By `model_type`."""


def family_of(config: Any) -> SeeingFamily:
    """Raises ModelError if pictures cannot be shown to such a model."""
    kind = config.model_type
    if kind in FAMILIES:
        return FAMILIES[kind]
    has_tower = getattr(config, "vision_config", None) is not None
    reason = "reroll does not run its tower" if has_tower else "it reads text only"
    raise ModelError(f"models of family {kind!r} are shown no pictures, since {reason}: use one of {', '.join(FAMILIES)}")


def grid_positions(ids: NDArray[np.int64], grids: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int64], int]:
    """Where the tokens of one sequence stand in time, height and width, [3, L], and where the next one stands.

    Words stand one behind the other. A picture, of which `grids` gives rows and columns, stands at one time, and what follows
    it behind its longer side.
    """
    positions, done, following = np.empty((3, len(ids)), dtype=np.int64), 0, 0
    for (_, places), (height, width) in zip(runs_in(ids), grids, strict=True):
        first, end = int(places[0]), int(places[-1]) + 1
        positions[:, done:first] = np.arange(following, following + first - done)
        following += first - done
        rows, columns = np.divmod(np.arange(end - first), width)
        positions[:, first:end] = following + np.stack([np.zeros_like(rows), rows, columns])
        if end - first == height * width:
            following += max(height, width)
        done = end
    positions[:, done:] = np.arange(following, following + len(ids) - done)
    return positions, following + len(ids) - done
