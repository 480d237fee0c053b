"""What samples in flight have written so far: in memory, and in one file that outlives the process.

journal/in-flight.tokens  records of tokens of many samples, each with its size and checksum; the first names the config

Of a sample that has ended nothing here is needed any longer: when the file has grown, it is written anew with what is.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reroll.observe.files import UNFINISHED_PREFIX, explained
from reroll.observe.trajectory_bytes import (
    ID_BYTES,
    TokenArrays,
    Told,
    decode_floats,
    decode_ids,
    decode_routes,
    encode_floats,
    encode_id_array,
    joined,
)
from reroll.types import Completion, FinishReason, PartialCompletion, Request, Versions

IN_FLIGHT = "in-flight.tokens"
_MAX_BYTES = 1 << 26
"""Written to the file since it was last written anew."""
_RECORD = struct.Struct("<II")
"""The size of what follows, and its checksum."""
_HEAD = struct.Struct("<IIIB")
"""Of a record: rows, bytes of their names, tokens, and the width of log-probs: 1 where they are doubles."""
_ROUTES = struct.Struct("<IIIIB")
"""Behind a record's log-probs, for each row that ends a turn whose experts are known: the row, tokens, layers, experts of each,
and bytes of a number. The numbers follow."""
_ROW = struct.Struct("<QIIiB")
"""Fingerprint of the prompt, place of the first token, number of tokens, version, how it ended."""
_FINISHES = {None: 0, FinishReason.STOP: 1, FinishReason.LENGTH: 2}


class PartialTurn(PartialCompletion):
    """One request of a sample: what is written of its completion, and whether that is all."""

    __slots__ = ("finish", "is_complete", "prompt", "routes", "whole")

    def __init__(self, prompt: int) -> None:
        super().__init__()
        self.prompt = prompt
        """A fingerprint of what was asked."""
        self.finish: FinishReason | None = None
        self.routes: NDArray[Any] | None = None
        """As in `Completion`, once it has ended."""
        self.whole: Completion | None = None
        """The completion that was handed out, once it has ended."""
        self.is_complete = False
        """All tokens of that are here."""

    @property
    def num_in_all(self) -> int:
        """Tokens, those included that it has not been told of."""
        return self.num_tokens if self.whole is None else len(self.whole.token_ids)

    def runs(self) -> Iterator[_TokenRun]:
        """Its tokens, split where the weights changed."""
        arrays, end = self.arrays(), 0
        if not self.num_tokens:
            return
        ids, logprobs = np.concatenate(arrays.ids), np.concatenate(arrays.logprobs)
        for version, count in self.versions:
            begin, end = end, end + count
            yield _TokenRun(ids[begin:end], logprobs[begin:end], version)

    def completion(self) -> Completion | None:
        """The whole of it; None while it is being written."""
        if self.whole is None and self.finish is not None:
            written = self.written()
            self.whole = Completion(
                token_ids=written.token_ids,
                logprobs=written.logprobs,
                versions=written.versions,
                finish_reason=self.finish,
                routes=self.routes,
            )
        return self.whole

    def arrays(self) -> TokenArrays:
        """All its tokens."""
        for _ in self.rest():
            pass
        return TokenArrays(self._ids, self._logprobs)

    def rest(self) -> Iterator[_TokenRun]:
        """What was not told of the whole completion, added on the way; once."""
        if self.whole is None or self.is_complete:
            return
        self.is_complete = True
        token_ids, logprobs, end = self.whole.token_ids, self.whole.logprobs, 0
        for version, count in self.whole.versions:
            begin, end = max(end, self.num_tokens), end + count
            if begin < end or end == len(token_ids):  # The last says that it is over, if nothing else.
                num = end - begin
                ids = np.frombuffer(struct.pack(f"<{num}I", *token_ids[begin:end]), dtype=np.uint32)
                tokens = _TokenRun(ids, np.frombuffer(struct.pack(f"<{num}d", *logprobs[begin:end])), version)
                yield tokens
                self.add(*tokens)


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
        self._rows: list[_Row] = []
        """Tokens that are not in the file yet."""
        self._file: BinaryIO | None = None
        self._num_bytes_left = 0
        self.on_added: Callable[[], None] = lambda: None
        """Called whenever there is something to flush."""

    def load(self) -> None:
        """Take up what an interrupted run has left."""
        for name, prompt, start, finish, tokens, routes in _read(self._path, config=self._config):
            turns = self._turns(name)
            turn = turns.get(name)
            if turn is None or turn.prompt != prompt or (start == 0 and turn.num_tokens):
                turn = turns[name] = PartialTurn(prompt)  # It was drawn anew.
            if start == turn.num_tokens:
                turn.add(*tokens)
                turn.finish, turn.routes = finish, routes

    def turn(self, request: Request) -> tuple[PartialTurn, int]:
        """What is written of a request, to go on with; and how many tokens are not kept, because they answer another prompt."""
        prompt, turns = _fingerprint(request), self._turns(request.id)
        turn = turns.get(request.id)
        if turn is not None and turn.prompt == prompt:
            return turn, 0
        for name, earlier in turns.items():
            self._keep_rest(name, earlier)  # What comes was written because of it.
        num_other = 0 if turn is None else turn.num_in_all
        turns[request.id] = PartialTurn(prompt)
        return turns[request.id], num_other

    def add(
        self, request_id: str, turn: PartialTurn, ids: NDArray[np.uint32], logprobs: NDArray[np.float64], version: int
    ) -> None:
        """The next tokens of a turn."""
        self._rows.append((request_id, turn, turn.num_tokens, ids, logprobs, version, turn.finish))
        turn.add(ids, logprobs, version)
        self.on_added()

    def end(self, turn: PartialTurn, completion: Completion) -> None:
        """A turn is over. What had not been told of it is kept as soon as another follows: a sample that is judged now is soon
        kept as a whole, and else draws these few tokens again."""
        turn.finish, turn.whole, turn.routes = completion.finish_reason, completion, completion.routes

    def told(self, sample_id: str) -> Told:
        """The tokens of a sample's turns that were told before they were over, by the `id` of the completion handed out."""
        turns = self._sample(sample_id).values()
        return {id(turn.whole): turn.arrays() for turn in turns if turn.whole is not None and turn.num_tokens}

    def versions_in_group(self, number: int) -> list[Versions]:
        """For each of its samples that has tokens, the weights that wrote them."""
        samples = self._groups.get(str(number), {})
        return [versions for turns in samples.values() if (versions := _versions(turns))]

    def num_tokens(self, sample_id: str) -> int:
        """What is written of a sample."""
        return sum(turn.num_in_all for turn in self._sample(sample_id).values())

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
        for sample_id, turns in [item for samples in self._groups.values() for item in samples.items()]:
            if (versions := _versions(turns)) and versions.oldest < version:
                self.forget(sample_id)

    def forget_lost(self, version: int, *, in_flight: Container[int]) -> None:
        """Weights of this version and later ones are lost: forget what they wrote, in the file too. These groups have none."""
        others = [samples for group, samples in self._groups.items() if int(group) not in in_flight]
        for sample_id, turns in [item for samples in others for item in samples.items()]:
            if (versions := _versions(turns)) and versions.newest >= version:
                self.forget(sample_id)
        self._num_bytes_left = 0

    def flush(self) -> None:
        """Hand all that was added to the operating system."""
        if not self._rows:
            return
        with explained(self._path):
            if self._file is None or self._num_bytes_left <= 0:
                self._write_anew()
            else:
                self._write(self._file, self._rows)
                self._file.flush()
        self._rows = []

    def close(self) -> None:
        """Keep all, flush and close. Safe to call twice."""
        for name, turn in self._all_turns():
            self._keep_rest(name, turn)
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _sample(self, sample_id: str) -> dict[str, PartialTurn]:
        return self._groups.get(sample_id.partition(".")[0], {}).get(sample_id, {})

    def _turns(self, request_id: str) -> dict[str, PartialTurn]:
        sample_id = request_id.rpartition(".")[0]
        return self._groups.setdefault(sample_id.partition(".")[0], {}).setdefault(sample_id, {})

    def _keep_rest(self, name: str, turn: PartialTurn) -> None:
        self._rows += _rows(name, turn, turn.num_tokens, turn.rest())

    def _write_anew(self) -> None:
        """All that is known of samples in flight, in a new file that takes the place of the old one when it is whole."""
        if self._file is not None:
            self._file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f"{UNFINISHED_PREFIX}{self._path.name}")
        self._file = unfinished.open("wb")
        self._append(self._file, self._config.encode())
        rows = [row for name, turn in self._all_turns() for row in _rows(name, turn, 0, turn.runs())]
        if rows:
            self._write(self._file, rows)
        self._file.flush()
        self._num_bytes_left = max(self._file.tell(), _MAX_BYTES)
        unfinished.replace(self._path)

    def _all_turns(self) -> Iterator[tuple[str, PartialTurn]]:
        for samples in self._groups.values():
            for turns in samples.values():
                yield from turns.items()

    def _write(self, file: BinaryIO, rows: Sequence[_Row]) -> None:
        is_exact, logprobs = encode_floats(np.frombuffer(joined([row[4] for row in rows])))
        ids = encode_id_array(np.frombuffer(joined([row[3] for row in rows]), dtype=np.uint32))
        names = "\n".join([row[0] for row in rows]).encode()
        table = [
            _ROW.pack(turn.prompt, start, len(tokens), version, _FINISHES[finish])
            for _, turn, start, tokens, _, version, finish in rows
        ]
        head = _HEAD.pack(len(rows), len(names), len(ids) // ID_BYTES, not is_exact)
        self._append(file, b"".join((head, names, *table, ids, logprobs, *_packed_routes(rows))))

    def _append(self, file: BinaryIO, body: bytes) -> None:
        file.write(_RECORD.pack(len(body), zlib.crc32(body)) + body)
        self._num_bytes_left -= len(body)


class _TokenRun(NamedTuple):
    """A run of tokens under one version of the weights."""

    ids: NDArray[np.uint32]
    logprobs: NDArray[np.float64]
    version: int


_Row = tuple[str, PartialTurn, int, NDArray[np.uint32], NDArray[np.float64], int, FinishReason | None]
"""Tokens of a request, by its name: its turn, the place of the first, ids, log-probs, version, and how the turn ended."""


def _rows(name: str, turn: PartialTurn, start: int, runs: Iterable[_TokenRun]) -> Iterator[_Row]:
    for tokens in runs:
        yield name, turn, start, *tokens, turn.finish
        start += len(tokens.ids)


def _packed_routes(rows: Sequence[_Row]) -> Iterator[bytes]:
    for number, (_, turn, start, ids, _, _, finish) in enumerate(rows):
        if turn.routes is not None and finish is not None and start + len(ids) == turn.num_in_all:
            yield _ROUTES.pack(number, *turn.routes.shape, turn.routes.itemsize)
            yield turn.routes.tobytes()


def _fingerprint(request: Request) -> int:
    """Equal for requests that ask for the same; the rest of how it is drawn is the config's."""
    sampling = request.sampling
    stops = zlib.crc32("\n".join(sampling.stop).encode()) if sampling.stop else 0
    # The hash of integers is the same in every process.
    return hash((request.prompt_ids, sampling.seed, sampling.max_tokens, stops)) & 0xFFFF_FFFF_FFFF_FFFF


def _versions(turns: dict[str, PartialTurn]) -> Versions | None:
    found = [version for turn in turns.values() for version, _ in (turn.whole or turn).versions]
    return Versions(min(found), max(found)) if found else None


def _read(path: Path, *, config: str) -> Iterator[tuple[str, int, int, FinishReason | None, _TokenRun, NDArray[Any] | None]]:
    """The rows of a file: request, fingerprint of its prompt, place of the first token, how it ended, tokens, and with the last
    of a turn their experts."""
    records = _records(path)
    if next(records, b"\0").decode(errors="replace") != config:
        return
    for body in records:
        num_rows, names_size, num_tokens, is_wide = _HEAD.unpack_from(body)
        table_at = _HEAD.size + names_size
        ids_at = table_at + num_rows * _ROW.size
        logprobs_at = ids_at + num_tokens * ID_BYTES
        names = body[_HEAD.size : table_at].decode().split("\n")
        ids = np.array(decode_ids(body[ids_at:logprobs_at]), dtype=np.uint32)
        routes_at = logprobs_at + num_tokens * (8 if is_wide else 4)
        logprobs = decode_floats(body[logprobs_at:routes_at], is_wide=bool(is_wide))
        routes = _routes_by_row(body[routes_at:])
        reasons, end = list(_FINISHES), 0
        for number, (name, row) in enumerate(zip(names, _ROW.iter_unpack(body[table_at:ids_at]), strict=True)):
            prompt, start, count, version, finish = row
            begin, end = end, end + count
            run = _TokenRun(ids[begin:end], logprobs[begin:end], version)
            yield name, prompt, start, reasons[finish], run, routes.get(number)


def _routes_by_row(data: bytes) -> dict[int, NDArray[Any]]:
    """Of each row that has any, the experts."""
    found, at = {}, 0
    while at < len(data):
        row, *shape, itemsize = _ROUTES.unpack_from(data, at)
        begin, at = at + _ROUTES.size, at + _ROUTES.size + math.prod(shape) * itemsize
        found[row] = decode_routes(data[begin:at], shape, itemsize)
    return found


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
