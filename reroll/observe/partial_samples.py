"""What samples in flight have written so far: in memory, and in one file that outlives the process.

journal/in-flight.tokens  records of tokens of many samples, each with its size and checksum; the first names the config

Of a sample that has ended nothing here is needed any longer: when the file has grown, it is written anew with what is.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reroll.observe.files import UNFINISHED_PREFIX, explained
from reroll.observe.trajectory_bytes import ID_BYTES, decode_floats, decode_ids, encode_float_array, encode_id_array
from reroll.types import Completion, FinishReason, PartialCompletion, Request, Versions

IN_FLIGHT = "in-flight.tokens"
_MAX_BYTES = 1 << 26
"""Written to the file since it was last written anew."""
_RECORD = struct.Struct("<II")
"""The size of what follows, and its checksum."""
_HEAD = struct.Struct("<IIIB")
"""Of a record: rows, bytes of their names, tokens, and whether log-probs are doubles."""
_ROW_TYPE = np.dtype([("prompt", "<u8"), ("start", "<u4"), ("count", "<u4"), ("version", "<i4"), ("finish", "u1")])
_FINISHES = {None: 0, FinishReason.STOP: 1, FinishReason.LENGTH: 2}


class PartialTurn(PartialCompletion):
    """One request of a sample: what is written of its completion, and whether that is all."""

    __slots__ = ("finish", "prompt")

    def __init__(self, prompt: int) -> None:
        super().__init__()
        self.prompt = prompt
        """A fingerprint of what was asked."""
        self.finish: FinishReason | None = None

    def runs(self) -> Iterator[_TokenRun]:
        """Its tokens, split where the weights changed."""
        if not self.num_tokens:
            return
        ids, logprobs, end = np.concatenate(self._ids), np.concatenate(self._logprobs), 0
        for version, count in self.versions:
            begin, end = end, end + count
            yield _TokenRun(ids[begin:end], logprobs[begin:end], version)

    def completion(self) -> Completion | None:
        """The whole of it; None while it is being written."""
        if self.finish is None:
            return None
        written = self.written()
        return Completion(
            token_ids=written.token_ids, logprobs=written.logprobs, versions=written.versions, finish_reason=self.finish
        )


@dataclass(slots=True)
class _RowBuffer:
    """Tokens that are not in the file yet."""

    names: list[str] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    ids: list[NDArray[np.uint32]] = field(default_factory=list)
    logprobs: list[NDArray[np.float64]] = field(default_factory=list)


class PartialSamples:
    """The tokens of samples that have not ended, by the id of the request that they were written for: `GROUP.INDEX.TURN`.

    What was added is out of this process's hands when `flush` returns. A write that fails raises RunFolderError.
    """

    def __init__(self, folder: Path, *, config: str) -> None:
        """Of a file that was written under another `config` nothing is read: that run drew other samples."""
        self._path = folder / IN_FLIGHT
        self._config = config
        self._groups: dict[str, dict[str, dict[str, PartialTurn]]] = {}
        """By group, sample and request."""
        self._rows = _RowBuffer()
        self._file: BinaryIO | None = None
        self._num_bytes_left = 0
        self.on_added: Callable[[], None] = lambda: None
        """Called whenever there is something to flush."""

    def load(self) -> None:
        """Take up what an interrupted run has left."""
        for name, prompt, start, finish, tokens in _read(self._path, config=self._config):
            turns = self._turns(name)
            turn = turns.get(name)
            if turn is None or turn.prompt != prompt or (start == 0 and turn.num_tokens):
                turn = turns[name] = PartialTurn(prompt)  # It was drawn anew.
            if start == turn.num_tokens:
                turn.add(*tokens)
                turn.finish = finish

    def turn(self, request: Request) -> tuple[PartialTurn, int]:
        """What is written of a request, to go on with; and how many tokens are not kept, because they answer another prompt."""
        prompt, turns = _fingerprint(request), self._turns(request.id)
        turn = turns.get(request.id)
        if turn is not None and turn.prompt == prompt:
            return turn, 0
        num_other = 0 if turn is None else turn.num_tokens
        turns[request.id] = PartialTurn(prompt)
        return turns[request.id], num_other

    def add(
        self, request_id: str, turn: PartialTurn, ids: NDArray[np.uint32], logprobs: NDArray[np.float64], version: int
    ) -> None:
        """The next tokens of a turn."""
        self._buffer(request_id, turn, turn.num_tokens, ids, logprobs, version)
        turn.add(ids, logprobs, version)
        self.on_added()

    def end(self, request_id: str, turn: PartialTurn, completion: Completion) -> None:
        """A turn is over: add what had not been told of it."""
        turn.finish = completion.finish_reason
        end = 0
        for version, count in completion.versions:
            begin, end = max(end, turn.num_tokens), end + count
            if begin < end or end == len(completion.token_ids):  # The last says that it is over, if nothing else.
                ids = np.array(completion.token_ids[begin:end], dtype=np.uint32)
                self.add(request_id, turn, ids, np.array(completion.logprobs[begin:end]), version)

    def versions_in_group(self, number: int) -> list[Versions]:
        """For each of its samples that has tokens, the weights that wrote them."""
        samples = self._groups.get(str(number), {})
        return [versions for turns in samples.values() if (versions := _versions(turns))]

    def num_tokens(self, sample_id: str) -> int:
        """What is written of a sample."""
        return sum(turn.num_tokens for turn in self._sample(sample_id).values())

    def versions(self, sample_id: str) -> Versions | None:
        """The weights that wrote a sample's tokens; None if it has none."""
        return _versions(self._sample(sample_id))

    def forget(self, sample_id: str) -> None:
        """The sample has ended, or is drawn anew."""
        group, _, _ = sample_id.partition(".")
        samples = self._groups.get(group)
        if samples is not None:
            samples.pop(sample_id, None)
            if not samples:
                del self._groups[group]

    def forget_older(self, version: int) -> None:
        """Samples with tokens of weights before this version will never be trained on."""
        for samples in list(self._groups.values()):
            for sample_id, turns in list(samples.items()):
                versions = _versions(turns)
                if versions is not None and versions.oldest < version:
                    self.forget(sample_id)

    def flush(self) -> None:
        """Hand all that was added to the operating system."""
        if not self._rows.names:
            return
        with explained(self._path):
            if self._file is None or self._num_bytes_left <= 0:
                self._write_anew()
            else:
                self._write(self._file, self._rows)
                self._file.flush()
        self._rows = _RowBuffer()

    def close(self) -> None:
        """Flush and close. Safe to call twice."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _sample(self, sample_id: str) -> dict[str, PartialTurn]:
        return self._groups.get(sample_id.partition(".")[0], {}).get(sample_id, {})

    def _turns(self, request_id: str) -> dict[str, PartialTurn]:
        sample_id = request_id.rpartition(".")[0]
        return self._groups.setdefault(sample_id.partition(".")[0], {}).setdefault(sample_id, {})

    def _buffer(
        self,
        request_id: str,
        turn: PartialTurn,
        start: int,
        ids: NDArray[np.uint32],
        logprobs: NDArray[np.float64],
        version: int,
    ) -> None:
        rows = self._rows
        rows.names.append(request_id)
        rows.rows.append((turn.prompt, start, len(ids), version, _FINISHES[turn.finish]))
        rows.ids.append(ids)
        rows.logprobs.append(logprobs)

    def _write_anew(self) -> None:
        """All that is known of samples in flight, in a new file that takes the place of the old one when it is whole."""
        if self._file is not None:
            self._file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f"{UNFINISHED_PREFIX}{self._path.name}")
        self._file = unfinished.open("wb")
        self._append(self._file, self._config.encode())
        self._rows = _RowBuffer()
        for name, turn in self._all_turns():
            start = 0
            for tokens in turn.runs():
                self._buffer(name, turn, start, *tokens)
                start += len(tokens.ids)
        if self._rows.names:
            self._write(self._file, self._rows)
        self._file.flush()
        self._num_bytes_left = max(self._file.tell(), _MAX_BYTES)
        unfinished.replace(self._path)

    def _all_turns(self) -> Iterator[tuple[str, PartialTurn]]:
        for samples in self._groups.values():
            for turns in samples.values():
                yield from turns.items()

    def _write(self, file: BinaryIO, rows: _RowBuffer) -> None:
        is_exact, logprobs = encode_float_array(np.concatenate(rows.logprobs))
        ids, names = encode_id_array(np.concatenate(rows.ids)), "\n".join(rows.names).encode()
        head = _HEAD.pack(len(rows.names), len(names), len(ids) // ID_BYTES, not is_exact)
        table = np.array(rows.rows, dtype=_ROW_TYPE).tobytes()
        self._append(file, b"".join((head, names, table, ids, logprobs)))

    def _append(self, file: BinaryIO, body: bytes) -> None:
        file.write(_RECORD.pack(len(body), zlib.crc32(body)) + body)
        self._num_bytes_left -= len(body)


class _TokenRun(NamedTuple):
    """A run of tokens under one version of the weights."""

    ids: NDArray[np.uint32]
    logprobs: NDArray[np.float64]
    version: int


def _fingerprint(request: Request) -> int:
    """Equal for requests that ask for the same; the rest of how it is drawn is the config's."""
    sampling = request.sampling
    stops = zlib.crc32("\n".join(sampling.stop).encode())
    # The hash of integers is the same in every process.
    return hash((request.prompt_ids, sampling.seed, sampling.max_tokens, stops)) & 0xFFFF_FFFF_FFFF_FFFF


def _versions(turns: dict[str, PartialTurn]) -> Versions | None:
    found = [version for turn in turns.values() for version, _ in turn.versions]
    return Versions(min(found), max(found)) if found else None


def _read(path: Path, *, config: str) -> Iterator[tuple[str, int, int, FinishReason | None, _TokenRun]]:
    """The rows of a file: request, fingerprint of its prompt, place of the first token, how it ended, tokens."""
    records = _records(path)
    if next(records, b"\0").decode(errors="replace") != config:
        return
    for body in records:
        num_rows, names_size, num_tokens, is_wide = _HEAD.unpack_from(body)
        table_at = _HEAD.size + names_size
        ids_at = table_at + num_rows * _ROW_TYPE.itemsize
        logprobs_at = ids_at + num_tokens * ID_BYTES
        names = body[_HEAD.size : table_at].decode().split("\n")
        ids = np.array(decode_ids(body[ids_at:logprobs_at]), dtype=np.uint32)
        logprobs = decode_floats(body[logprobs_at:], is_wide=bool(is_wide))
        reasons, end = list(_FINISHES), 0
        for name, row in zip(names, np.frombuffer(body[table_at:ids_at], dtype=_ROW_TYPE).tolist(), strict=True):
            prompt, start, count, version, finish = row
            begin, end = end, end + count
            yield name, prompt, start, reasons[finish], _TokenRun(ids[begin:end], logprobs[begin:end], version)


def _records(path: Path) -> Iterator[bytes]:
    """What was written at a time. What a crash tore is left out, and all after it."""
    data = path.read_bytes() if path.exists() else b""
    at = 0
    while at + _RECORD.size <= len(data):
        size, checksum = _RECORD.unpack_from(data, at)
        body = data[at + _RECORD.size : at + _RECORD.size + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            return
        yield body
        at += _RECORD.size + size
