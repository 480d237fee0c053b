"""Weights by files: the way of a push that `weights.kind: disk` names."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from reroll.weights.buckets import Channel, Entry, OnDisk, Payload, unpack
from reroll.weights.sender import Transport


class DiskTransport(Transport):
    """A folder of safetensors files per version, with the index that Hugging Face's loaders read.

    It gets its name when it is whole and on the disk; then older versions go. Ranks gather together: so an error waits for
    `finish`.
    """

    def __init__(self, channel: Channel, *, bucket_bytes: int, device: torch.device) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        assert channel.folder is not None
        self._folder, self._version, self._num_files = channel.folder, 0, 0
        self._weight_map: dict[str, str] = {}
        self._failure: OSError | None = None

    def begin(self, version: int) -> None:
        self._version, self._num_files, self._weight_map, self._failure = version, 0, {}, None

    def finish(self) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            index = {"metadata": {}, "weight_map": self._weight_map}
            _write(self._partial / "model.safetensors.index.json", json.dumps(index).encode())
            shutil.rmtree(self._whole, ignore_errors=True)  # A push that is repeated.
            self._partial.rename(self._whole)
        except OSError as error:
            raise OSError(f"cannot write weights into {self._folder}: {error}: free space, or set weights.folder") from error
        for folder in self._folder.glob("version-*"):
            if folder != self._whole:
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def _whole(self) -> Path:
        return self._folder / f"version-{self._version:08d}"

    @property
    def _partial(self) -> Path:
        return self._whole.with_suffix(".partial")

    def _payload(self, flat: Tensor, entries: Sequence[Entry]) -> Payload:
        name = f"model-{self._num_files:05d}.safetensors"
        self._num_files += 1
        tensors = unpack(flat, entries)
        self._weight_map |= dict.fromkeys(tensors, name)
        try:
            if self._failure is None:
                self._partial.mkdir(parents=True, exist_ok=True)
                _write(self._partial / name, safetensors.torch.save(tensors))
        except OSError as error:
            self._failure = error
        return OnDisk(self._whole / name)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
