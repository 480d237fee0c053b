"""A Hugging Face folder that all ranks of a model write together: each some layers, so that no host ever holds the whole."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.errors import WorkerError
from reroll.models.load import save_model
from reroll.observe.files import sync

INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS_FILE = "model.safetensors"
_LAYER = re.compile(r".*?\.layers\.\d+\.")


class LayerShares:
    """Which rank writes which weights: those of a layer together, by the rank that has least. All ranks find the same."""

    def __init__(self, num_ranks: int) -> None:
        self._loads = [0] * num_ranks
        self._owners: dict[str, int] = {}

    def owner_of(self, name: str, num_bytes: int) -> int:
        """The rank that writes a weight. Every rank asks for all of them, in the same order."""
        layer = _LAYER.match(name)
        owner = self._owners.setdefault(layer[0] if layer else "", self._loads.index(min(self._loads)))
        self._loads[owner] += num_bytes
        return owner

    def file_of(self, rank: int) -> str | None:
        """The file that a rank writes, once all weights have been asked for; None if it writes none."""
        writers = sorted(set(self._owners.values()))
        if rank not in writers:
            return None
        if len(writers) == 1:
            return _WEIGHTS_FILE
        return f"model-{writers.index(rank) + 1:05d}-of-{len(writers):05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Export:
    """A rank's share of the folder, on its host."""

    model: PreTrainedModel
    """Without weights; of an adapter, with these."""
    weights: Mapping[str, Tensor]
    file: str | None
    """In which it writes them, if it has any. An adapter is the first rank's alone, and peft names its files."""

    def write(self, tokenizer: PreTrainedTokenizerBase, folder: Path, *, group: dist.ProcessGroup | None = None) -> list[Path]:
        """All ranks of the group call it; the first also writes what belongs to the folder beside the weights.

        Returns the files that this rank has written, which are on disk.
        """
        is_first, failure = dist.get_rank(group) == 0, None
        written, names = list[Path](), list[str]()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written, names = self._write_part(tokenizer, folder, is_first=is_first)
        except Exception as error:  # The others wait for this rank, and must hear of it.
            failure = error
        mine = _WrittenPart(
            self.file, names, sum(tensor.nbytes for tensor in self.weights.values()), repr(failure) if failure else None
        )
        parts = [mine] * dist.get_world_size(group)
        dist.all_gather_object(parts, mine, group=group)
        if failure is not None:
            raise failure
        for rank, part in enumerate(parts):
            if part.failure:
                raise WorkerError(f"rank {rank} could not write its part of {folder}: {part.failure}")
        if is_first and len([part for part in parts if part.file]) > 1:
            weight_map = {name: part.file for part in parts for name in part.names}
            index = {"metadata": {"total_size": sum(part.num_bytes for part in parts)}, "weight_map": weight_map}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            written.append(folder / INDEX_FILE)
        for path in written:
            sync(path)
        return written

    def _write_part(self, tokenizer: PreTrainedTokenizerBase, folder: Path, *, is_first: bool) -> tuple[list[Path], list[str]]:
        """The files, and the names of the weights in them."""
        if not is_first and self.file is None:
            return [], []
        written, names = list[Path](), list[str]()
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
            save_model(self.model, tokenizer, Path(part), weights=self.weights if self.file else None)
            for path in sorted(Path(part).iterdir()):
                is_mine = path.name == _WEIGHTS_FILE and self.file is not None
                names += _names_in(path) if is_mine else []
                if is_mine or is_first:
                    written.append(path.rename(folder / (self.file if is_mine and self.file else path.name)))
        return written, names


@dataclass(frozen=True, slots=True)
class _WrittenPart:
    """What a rank tells the others of the file that it has written."""

    file: str | None
    names: list[str]
    num_bytes: int
    failure: str | None


def _names_in(path: Path) -> list[str]:
    """As the folder has them: a model may have stacked what they are parts of."""
    with safe_open(path, framework="pt") as file:
        return sorted(file.keys())
