"""What makes a model see: its tower, run once for each picture, and its decoder on words and pictures, packed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from reroll.errors import ModelError
from reroll.infer.embedded.attention import SlotCache
from reroll.models.sight import Sight
from reroll.tokens.pictures import FIRST_ID
from reroll_zoo.vision.both_ways import Block, BothWays, blocks_of
from reroll_zoo.vision.families import FAMILIES, Features, grid_positions
from reroll_zoo.vision.reader import PictureReader, reader_of
from reroll_zoo.vision.store import runs_in

_MAX_CACHED_BYTES = 256 << 20
"""Of features, for each model."""


def auto_class(config: Any) -> Any:
    """What of transformers opens a model that sees here; None for others."""
    return AutoModelForImageTextToText if config.model_type in FAMILIES else None


class ReadNow(NamedTuple):
    """What of one sequence a pass reads."""

    ids: NDArray[np.int64]
    """From its beginning on, if there are pictures among what is read."""
    start: int = 0
    """From which of them on they are read."""
    shift: int = 0
    """By how much they stand further back than they would in a sequence that begins with `ids`."""


class _FeatureRows:
    """Gives the tokens of pictures their rows among the features of all: each picture once, in the order of first sight."""

    def __init__(self, reader: PictureReader) -> None:
        self._reader, self._num = reader, 0
        self.first_rows: dict[str, int] = {}

    def rows(self, part: ReadNow) -> NDArray[np.int64]:
        """Of what is read of a sequence: -1 for a word."""
        rows = np.full(len(part.ids), -1, dtype=np.int64)
        for name, places in runs_in(part.ids):
            if places[-1] < part.start:  # It was read before.
                continue
            if name not in self.first_rows:
                self.first_rows[name], self._num = self._num, self._num + self._reader.read(name).num_tokens
            rows[places] = self.first_rows[name] + np.arange(len(places))
        return rows[part.start :]


@dataclass(frozen=True, slots=True)
class PackedSight(Sight):
    """The pictures among the packed tokens of a pass."""

    names: tuple[str, ...]
    """Each picture once."""
    rows: Tensor
    """[T] which row of their features, one after the other, a token is; -1: it is a word."""
    positions: Tensor | None
    """[3, T] in time, height and width; None: a token stands where its sequence has it."""

    blocks: tuple[Block, ...] = ()
    """Tokens of pictures that look at each other in both directions."""
    cache: SlotCache | None = None
    """Where the keys and values of the sequences are, if they are not all among the tokens of the pass."""

    def at(self, tokens: Tensor, index: Tensor) -> Self:
        positions = None if self.positions is None else self.positions[:, tokens]
        own = [block for block in self.blocks if tokens[index[block.asks[0]]] == block.asks[0]]  # Of common ones, the first.
        blocks = tuple(block.among(index) for block in own)
        return replace(self, rows=self.rows[tokens], positions=positions, blocks=blocks)


class PackedEye:
    """Takes the place of the forward pass of a model's trunk, so that it runs on packed tokens."""

    def __init__(self, model: PreTrainedModel, name: str, *, trains: bool) -> None:
        self._reader = reader_of(name)
        self._family = self._reader.family
        self._base = cast(Any, model.base_model)
        self._trains = trains
        self._image_id: int = model.config.image_token_id
        self._tower = [parameter for part in self._family.tower(self._base) for parameter in part.parameters()]
        self._cached: OrderedDict[str, Features] = OrderedDict()
        self._cached_by = self._weights()
        self._num_cached_bytes = 0
        self.num_looks = 0
        """Pictures that the tower was run on."""
        for part in self._family.tower(self._base):
            part.requires_grad_(trains)
            for module in part.modules():
                if isinstance(module, PreTrainedModel):
                    module.config._attn_implementation = "sdpa"  # It looks both ways, and at pictures alone.
        self._base.forward = self._forward

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # A copy of a model is made to be saved.

    def look(self, parts: Sequence[ReadNow]) -> PackedSight | None:
        """What the packed tokens of a pass show, and where all stand; None where nothing says more than their places do."""
        has_pictures = [bool((part.ids[part.start :] >= FIRST_ID).any()) for part in parts]
        has_grid = self._family.has_grid_positions
        if not any(has_pictures) and not (has_grid and any(part.shift != 0 for part in parts)):
            return None
        book = _FeatureRows(self._reader)
        rows = [
            book.rows(part) if shows else np.full(len(part.ids) - part.start, -1)
            for part, shows in zip(parts, has_pictures, strict=True)
        ]
        positions = [self._positions(part)[0][:, part.start :] + part.shift for part in parts] if has_grid else []
        device = self._base.device
        return PackedSight(
            blocks=tuple(self._blocks(parts)) if self._family.looks_both_ways else (),
            names=tuple(book.first_rows),
            rows=torch.from_numpy(np.concatenate(rows)).to(device),
            positions=torch.from_numpy(np.concatenate(positions, 1)).to(device) if positions else None,
        )

    def _blocks(self, parts: Sequence[ReadNow]) -> Iterator[Block]:
        base = 0
        for slot, part in enumerate(parts):
            yield from blocks_of(part.ids, part.start, slot=slot, base=base, device=self._base.device)
            base += len(part.ids) - part.start

    def look_packed(self, ids: Tensor, cu_seqlens: Tensor) -> PackedSight | None:
        """The same for whole sequences."""
        if not (ids >= FIRST_ID).any():
            return None
        flat = ids.cpu().numpy()
        return self.look([ReadNow(flat[start:end]) for start, end in pairwise(cu_seqlens.tolist())])

    def shift_after(self, ids: NDArray[np.int64]) -> int:
        """How far the token after these stands from their number."""
        if not (self._family.has_grid_positions and (ids >= FIRST_ID).any()):
            return 0
        return self._positions(ReadNow(ids))[1] - len(ids)

    def _positions(self, part: ReadNow) -> tuple[NDArray[np.int64], int]:
        return grid_positions(part.ids, [self._reader.read(run.name).grid for run in runs_in(part.ids)])

    def forget(self) -> None:
        """The weights are others: look at everything anew, if the tower is trained. A frozen one that is replaced moves in
        memory, or is written to: that is seen."""
        if self._trains:
            self._clear()

    def _clear(self) -> None:
        self._cached.clear()
        self._num_cached_bytes = 0

    def save(self, folder: Path) -> None:
        """Write the image processor, without which the model cannot be used."""
        self._reader.save(folder)

    def _forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        use_cache: bool = False,
        reroll_sight: PackedSight | None = None,
        **options: Any,
    ) -> Any:
        """[1, T] ids and positions in, as for a model that reads text."""
        decoder = self._family.decoder(self._base)
        embed: Any = decoder.get_input_embeddings()
        if reroll_sight is None:
            if (input_ids >= FIRST_ID).any():
                raise ModelError("a prompt shows a picture to a model that was not told of it")
            return decoder(inputs_embeds=embed(input_ids), position_ids=position_ids, use_cache=use_cache, **options)
        rows = reroll_sight.rows
        is_picture = rows >= 0
        embeddings = embed(input_ids.masked_fill(input_ids >= FIRST_ID, self._image_id))
        if reroll_sight.names:
            seen = self._features(reroll_sight.names)
            where, chosen = is_picture.nonzero().squeeze(1), rows[is_picture]
            table = torch.cat([each.embeddings for each in seen]).to(embeddings.dtype)
            embeddings = embeddings.index_put((torch.zeros_like(where), where), table[chosen])
            if seen[0].deep:
                layers = zip(*(each.deep for each in seen), strict=True)
                options["visual_pos_masks"] = is_picture[None]
                options["deepstack_visual_embeds"] = [torch.cat(layer)[chosen] for layer in layers]
        if reroll_sight.blocks:
            options["reroll_attention"] = BothWays(options["reroll_attention"], reroll_sight.blocks, reroll_sight.cache)
        if reroll_sight.positions is not None:
            position_ids = reroll_sight.positions[:, None]
        return decoder(inputs_embeds=embeddings, position_ids=position_ids, use_cache=use_cache, **options)

    def _features(self, names: Sequence[str]) -> list[Features]:
        """Of each picture. Where no gradient is asked for, they are kept until the tower's weights change."""
        if self._trains and torch.is_grad_enabled():
            return self._run_tower(names)
        if self._cached_by != (weights := self._weights()):
            self._clear()
            self._cached_by = weights
        found = {name: self._cached[name] for name in names if name in self._cached}
        missing = [name for name in names if name not in found]
        if missing:
            with torch.inference_mode(False), torch.no_grad():
                found |= dict(zip(missing, self._run_tower(missing), strict=True))
            for name in missing:
                self._keep(name, found[name])
        return [found[name] for name in names]

    def _weights(self) -> list[tuple[int, int]]:
        """What is another list when a weight of the tower has moved or was written to."""
        return [(parameter.data_ptr(), parameter._version) for parameter in self._tower]

    def _run_tower(self, names: Sequence[str]) -> list[Features]:
        self.num_looks += len(names)
        return self._family.look(self._base, [self._reader.read(name) for name in names])

    def _keep(self, name: str, features: Features) -> None:
        self._cached[name] = features
        self._num_cached_bytes += features.num_bytes
        while self._num_cached_bytes > _MAX_CACHED_BYTES and len(self._cached) > 1:
            self._num_cached_bytes -= self._cached.popitem(last=False)[1].num_bytes


def open_eye(model: PreTrainedModel, name: str, *, trains: bool) -> PackedEye:
    """Have this model see, with the image processor of the folder `name`."""
    return PackedEye(model, name, trains=trains)
