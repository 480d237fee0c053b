"""A trajectory as bytes for the journal: 7 bytes a token and what its experts take, and back to the bit."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from types import MappingProxyType
from typing import Any, NamedTuple

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


class PackedTokens(NamedTuple):
    """Tokens of a completion that are in arrays already, as engines tell of them: many times faster to read than objects."""

    ids: bytes
    """Four bytes each."""
    logprobs: bytes
    """Doubles."""


def encode_ids(ids: Sequence[int]) -> bytes:
    """Three bytes each."""
    # Sequences of Python numbers go through `struct`, which reads them several times faster than numpy does.
    return _low_bytes(struct.pack(f"<{len(ids)}I", *ids))


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


def encode(trajectory: Trajectory, told: Mapping[int, PackedTokens] = MappingProxyType({})) -> bytes:
    """All but the ids of the first prompt, which siblings share, and the texts, which follow from the tokens.

    `told`: the tokens of some of its completions, by the completion's `id`.
    """
    arrays: list[bytes] = []
    turns: list[dict[str, Any]] = []
    context = trajectory.turns[0].prompt_ids if trajectory.turns else ()
    for turn in trajectory.turns:
        num_shared = _num_shared(context, turn.prompt_ids)
        own, completion = turn.prompt_ids[num_shared:], turn.completion
        packed = told.get(id(completion))
        is_exact, logprobs = _narrowed(packed.logprobs) if packed else encode_floats(completion.logprobs)
        ids = _low_bytes(packed.ids) if packed else encode_ids(completion.token_ids)
        arrays += (encode_ids(own) if own else b"", ids, logprobs)
        if completion.routes is not None:
            arrays.append(completion.routes.tobytes())
        turns.append(_turn_header(turn, num_shared=num_shared, num_own=len(own), is_exact=is_exact))
        if len(turns) < len(trajectory.turns):
            context = turn.prompt_ids + completion.token_ids
    head: dict[str, Any] = {"status": trajectory.status, "turns": turns}
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
    header = to_json(head).encode()
    return b"".join((_SIZE.pack(len(header)), header, *arrays))


def decode(data: bytes, *, id: str, prompt_ids: tuple[int, ...], text_of: Decode) -> Trajectory:
    """The trajectory that was encoded, given what was left out of it."""
    (size,) = _SIZE.unpack_from(data)
    head = json.loads(data[_SIZE.size : _SIZE.size + size])
    read = _ByteReader(data, _SIZE.size + size)
    turns: list[Turn] = []
    context = prompt_ids
    for row in head["turns"]:
        context = context[: row.get("shared", 0)] + decode_ids(read.take(row.get("own", 0) * ID_BYTES))
        turns.append(_decode_turn(row, read, prompt_ids=context, text_of=text_of))
        context += turns[-1].completion.token_ids
    return Trajectory(
        id=id,
        turns=tuple(turns),
        status=Status(head["status"]),
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
    completion = Completion(
        token_ids=ids,
        logprobs=tuple(logprobs.tolist()),
        finish_reason=FinishReason(row["finish"]),
        versions=tuple((version, count) for version, count in row.get("versions", ())),
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


def _turn_header(turn: Turn, *, num_shared: int, num_own: int, is_exact: bool) -> dict[str, Any]:
    """What is 0, empty or None is left out, and read as that."""
    completion = turn.completion
    header: dict[str, Any] = {"num": len(completion.token_ids), "finish": completion.finish_reason}
    if completion.versions:
        header["versions"] = completion.versions
    if num_shared:
        header["shared"] = num_shared
    if num_own:
        header["own"] = num_own
    if not is_exact:
        header["wide"] = True
    if completion.routes is not None:
        header["routes"] = [*completion.routes.shape, completion.routes.itemsize]
    if turn.shown:
        header["shown"] = turn.shown
    if turn.reply:
        header["reply"] = turn.reply
    if turn.reward:
        header["reward"] = turn.reward
    if turn.info:
        header["info"] = turn.info
    if turn.state is not None:
        header["state"] = turn.state
    return header


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


def encode_floats(values: Sequence[float]) -> tuple[bool, bytes]:
    """In single precision, which is what engines compute in; in double where that would lose anything. Which it was."""
    return _narrowed(struct.pack(f"<{len(values)}d", *values))


def _narrowed(wide: bytes) -> tuple[bool, bytes]:
    # numpy warns of a number beyond single precision: no log-prob is, and silencing it takes as long as all the rest.
    narrow = np.frombuffer(wide, dtype="<f8").astype("<f4")
    is_exact = narrow.astype("<f8").tobytes() == wide
    return is_exact, narrow.tobytes() if is_exact else wide


def encode_float_array(values: NDArray[np.float64]) -> tuple[bool, bytes]:
    """As `encode_floats`."""
    with np.errstate(over="ignore"):  # What is too large is not equal, and kept as it is.
        narrow = values.astype("<f4")
    is_exact = bool((narrow == values).all())
    return is_exact, (narrow if is_exact else values.astype("<f8")).tobytes()


def decode_floats(data: bytes, *, is_wide: bool) -> NDArray[np.float64]:
    """What `encode_floats` was given."""
    return np.frombuffer(data, dtype="<f8" if is_wide else "<f4").astype(np.float64)
