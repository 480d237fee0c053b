"""Trajectories as bytes for the journal: 7 bytes a token and what its experts take, and back to the bit."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from reroll.types import Completion, FinishReason, Status, Trajectory, Turn

Decode = Callable[[Sequence[int]], str]
"""Token ids to the text that rewards and environments read."""


def _encoder() -> Callable[[Any], str]:
    """JSON without a blank, from one encoder: those of the standard library's functions make another for every value."""
    plain = json.JSONEncoder(separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    encode = make(
        None, plain.default, encode_basestring_ascii, None, plain.key_separator, plain.item_separator, False, False, True
    )
    return lambda value: "".join(encode(value, 0))


to_json = _encoder()
_SIZE = struct.Struct("<I")
ID_BYTES = 3
"""Of a token id. No vocabulary has 16 million words."""
_LOW_BYTES = np.dtype({"names": ["low"], "formats": [f"V{ID_BYTES}"], "itemsize": 4})
"""Of four bytes the first three: copying a field is twice as fast as slicing a matrix of bytes."""


class TokenArrays(NamedTuple):
    """Tokens of a completion as engines tell of them, one array after the other: many times faster to read than objects."""

    ids: Sequence[NDArray[np.uint32]]
    logprobs: Sequence[NDArray[np.float64]]


Told = Mapping[int, TokenArrays]
"""The tokens of some completions of a trajectory, by the completion's `id`."""
_NOTHING_TOLD: Told = MappingProxyType({})


def encode_ids(ids: Sequence[int]) -> bytes:
    """Three bytes each."""
    return _low_bytes(_packed_ids(ids))


def _packed_ids(ids: Sequence[int]) -> bytes:
    # Sequences of Python numbers go through `struct`, which reads them several times faster than numpy does.
    return struct.pack(f"<{len(ids)}I", *ids)


def _low_bytes(ids: bytes) -> bytes:
    return np.frombuffer(ids, dtype=_LOW_BYTES)["low"].tobytes()


def encode_id_array(ids: NDArray[np.uint32]) -> bytes:
    """As `encode_ids`."""
    return ids.view(_LOW_BYTES)["low"].tobytes()


def decode_ids(data: bytes) -> tuple[int, ...]:
    """What `encode_ids` was given."""
    wide = np.zeros((len(data) // ID_BYTES, 4), dtype=np.uint8)
    wide[:, :ID_BYTES] = np.frombuffer(data, dtype=np.uint8).reshape(-1, ID_BYTES)
    return tuple(wide.reshape(-1).view("<u4").tolist())


def encode(trajectory: Trajectory, told: Told = _NOTHING_TOLD) -> bytes:
    """All but the first prompt, which siblings share (`encode_prompt`), and the texts, which follow from the tokens."""
    [data] = encode_all([(trajectory, told)])
    return data


def encode_all(samples: Sequence[tuple[Trajectory, Told]]) -> list[bytes]:
    """As `encode`, many at once: each array is small, and to begin with one takes longer than to go through it."""
    tokens = _TokenBytes(samples)
    return [_encode(trajectory, tokens) for trajectory, _ in samples]


class _TokenBytes:
    """The tokens of all turns of many trajectories, in their order."""

    def __init__(self, samples: Sequence[tuple[Trajectory, Told]]) -> None:
        ids: list[bytes | NDArray[np.uint32]] = []
        logprobs: list[bytes | NDArray[np.float64]] = []
        for trajectory, told in samples:
            for turn in trajectory.turns:
                completion = turn.completion
                arrays = told.get(id(completion))
                if arrays is not None:
                    ids += arrays.ids
                    logprobs += arrays.logprobs
                else:
                    ids.append(_packed_ids(completion.token_ids))
                    logprobs.append(struct.pack(f"<{len(completion.logprobs)}d", *completion.logprobs))
        self._ids = memoryview(_low_bytes(joined(ids)))
        self._wide = np.frombuffer(joined(logprobs), dtype="<f8")
        self._is_exact, data = encode_floats(self._wide)
        self._bytes = memoryview(data)
        self._at = 0

    def take(self, num: int) -> tuple[bool, memoryview, memoryview | bytes]:
        """The ids and log-probs of so many tokens, and whether the latter lose nothing in single precision."""
        begin, self._at = self._at, self._at + num
        ids = self._ids[ID_BYTES * begin : ID_BYTES * self._at]
        if self._is_exact:
            return True, ids, self._bytes[4 * begin : 4 * self._at]
        is_exact, logprobs = encode_floats(self._wide[begin : self._at])
        return is_exact, ids, logprobs


def joined(arrays: Sequence[bytes | NDArray[Any]]) -> bytes:
    """One after the other: three times as fast as numpy puts hundreds of short arrays together."""
    return b"".join(cast("Sequence[memoryview]", arrays))  # Arrays are buffers, of which their types say nothing.


def _encode(trajectory: Trajectory, tokens: _TokenBytes) -> bytes:
    arrays: list[bytes | memoryview] = []
    turns: list[dict[str, Any]] = []
    context = trajectory.turns[0].prompt_ids if trajectory.turns else ()
    for turn in trajectory.turns:
        num_shared = _num_shared(context, turn.prompt_ids)
        num_own, completion = len(turn.prompt_ids) - num_shared, turn.completion
        is_exact, ids, logprobs = tokens.take(len(completion.token_ids))
        if num_own:
            arrays.append(encode_ids(turn.prompt_ids[num_shared:]))
        arrays += (ids, logprobs)
        if completion.routes is not None:
            arrays.append(completion.routes.tobytes())
        header = _turn_header(turn, is_exact=is_exact)
        if turns:
            _add_what_was_asked(header, turn, num_shared=num_shared, num_own=num_own)
        turns.append(header)
        if len(turns) < len(trajectory.turns):
            context = turn.prompt_ids + completion.token_ids
    head: dict[str, Any] = {"turns": turns}
    if trajectory.status is not Status.COMPLETED:
        head["status"] = trajectory.status
    if trajectory.reward:
        head["reward"] = trajectory.reward
    if trajectory.reason:
        head["reason"] = trajectory.reason
    if trajectory.reward_parts:
        head["parts"] = trajectory.reward_parts
    if trajectory.part_weights:
        head["weights"] = trajectory.part_weights
    if trajectory.reward_info:
        head["info"] = trajectory.reward_info
    if trajectory.answer is not None:
        head["answer"] = trajectory.answer
    head_bytes = to_json(head).encode()
    return b"".join((_SIZE.pack(len(head_bytes)), head_bytes, *arrays))


def encode_prompt(turns: Sequence[Turn]) -> tuple[bytes, bytes]:
    """The ids of the first prompt, and what was shown to the policy as messages, which follows them."""
    if not turns:
        return b"", b""
    shown = turns[0].shown
    return encode_ids(turns[0].prompt_ids), to_json(shown).encode() if shown else b""


def decode(data: bytes, *, id: str, prompt_ids: tuple[int, ...], shown: bytes = b"", text_of: Decode) -> Trajectory:
    """The trajectory that was encoded, given what was left out of it."""
    (size,) = _SIZE.unpack_from(data)
    head = json.loads(data[_SIZE.size : _SIZE.size + size])
    read = _ByteReader(data, _SIZE.size + size)
    turns: list[Turn] = []
    context = prompt_ids
    if shown:
        head["turns"][0]["shown"] = json.loads(shown)
    for row in head["turns"]:
        num_shared = row.get("shared", 0 if turns else len(prompt_ids))
        context = context[:num_shared] + decode_ids(read.take(row.get("own", 0) * ID_BYTES))
        turns.append(_decode_turn(row, read, prompt_ids=context, text_of=text_of))
        context += turns[-1].completion.token_ids
    return Trajectory(
        id=id,
        turns=tuple(turns),
        status=Status(head.get("status", Status.COMPLETED)),
        reason=head.get("reason", ""),
        reward=head.get("reward", 0.0),
        reward_parts=head.get("parts", {}),
        part_weights=head.get("weights", {}),
        reward_info=head.get("info", {}),
        answer=head.get("answer"),
    )


def _decode_turn(row: dict[str, Any], read: _ByteReader, *, prompt_ids: tuple[int, ...], text_of: Decode) -> Turn:
    num = row.get("num", 0)
    ids = decode_ids(read.take(num * ID_BYTES))
    is_wide = bool(row.get("wide"))
    logprobs = decode_floats(read.take(num * (8 if is_wide else 4)), is_wide=is_wide)
    *shape, route_bytes = row.get("routes", (0, 0, 0, 0))
    routes = read.take(math.prod(shape) * route_bytes)
    versions = [(row["version"], num)] if "version" in row else row.get("versions", ())
    completion = Completion(
        token_ids=ids,
        logprobs=tuple(logprobs.tolist()),
        finish_reason=FinishReason(row.get("finish", FinishReason.STOP)),
        versions=tuple((version, count) for version, count in versions),
        routes=decode_routes(routes, shape, route_bytes) if route_bytes else None,
    )
    return Turn(
        prompt_ids=prompt_ids,
        completion=completion,
        text=text_of(ids),
        shown=tuple(row.get("shown", ())),
        reply=tuple(row.get("reply", ())),
        reward=row.get("reward", 0.0),
        info=row.get("info", {}),
        state=row.get("state"),
    )


class _ByteReader:
    """Bytes that are taken one run after the other."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._at = data, start

    def take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]


def _turn_header(turn: Turn, *, is_exact: bool) -> dict[str, Any]:
    """What is 0, empty or None is left out, and read as that; so is what nearly all have."""
    completion = turn.completion
    num = len(completion.token_ids)
    header: dict[str, Any] = {"num": num}
    if completion.finish_reason is not FinishReason.STOP:
        header["finish"] = completion.finish_reason
    if len(completion.versions) == 1 and completion.versions[0][1] == num:
        header["version"] = completion.versions[0][0]
    elif completion.versions:
        header["versions"] = completion.versions
    if not is_exact:
        header["wide"] = True
    if completion.routes is not None:
        header["routes"] = [*completion.routes.shape, completion.routes.itemsize]
    if turn.reply:
        header["reply"] = turn.reply
    if turn.reward:
        header["reward"] = turn.reward
    if turn.info:
        header["info"] = turn.info
    if turn.state is not None:
        header["state"] = turn.state
    return header


def _add_what_was_asked(header: dict[str, Any], turn: Turn, *, num_shared: int, num_own: int) -> None:
    """Of a turn after the first: how many ids of its prompt are those of what came before, and what it was told."""
    header["shared"] = num_shared
    if num_own:
        header["own"] = num_own
    if turn.shown:
        header["shown"] = turn.shown


def _num_shared(before: tuple[int, ...], now: tuple[int, ...]) -> int:
    """How many ids both begin with. Nearly always one is the beginning of the other."""
    if before is now:
        return len(now)
    num = min(len(before), len(now))
    if before[:num] == now[:num]:
        return num
    return next(index for index, (a, b) in enumerate(zip(before, now, strict=False)) if a != b)


def decode_routes(data: bytes, shape: Sequence[int], itemsize: int) -> NDArray[Any]:
    """`Completion.routes` from its bytes."""
    return np.frombuffer(data, dtype=np.uint8 if itemsize == 1 else np.int16).reshape(shape)


def encode_floats(values: NDArray[np.float64]) -> tuple[bool, bytes]:
    """In single precision, which is what engines compute in; in double where that would lose anything. Which it was."""
    with np.errstate(over="ignore"):  # What is too large is not equal, and kept as it is.
        narrow = values.astype("<f4")
    wide = values.astype("<f8", copy=False).tobytes()
    is_exact = narrow.astype("<f8").tobytes() == wide  # Of short arrays, in half the time of `==`.
    return is_exact, narrow.tobytes() if is_exact else wide


def decode_floats(data: bytes, *, is_wide: bool) -> NDArray[np.float64]:
    """What `encode_floats` was given."""
    return np.frombuffer(data, dtype="<f8" if is_wide else "<f4").astype(np.float64)
