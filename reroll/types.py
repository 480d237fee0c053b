"""The nouns that flow through a run, from a prompt to a training row. No torch here: the controller moves plain data.

Prompt -> Trajectory[Turn] -> Group -> Sample -> tokens.Batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

ToolSchema = dict[str, Any]
"""A tool as OpenAI describes it: `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`."""


class _Plain:
    """Base of slotted dataclasses that pickle as a plain tuple of values. The default pickling looks up the fields on every
    call and takes several times as long; thousands of these cross process boundaries every second."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        made: Any = type(self)
        read, _ = _access(made)
        return _rebuilt, (made, read(self))


def _rebuilt(made: Any, values: tuple[Any, ...]) -> _Plain:
    plain: _Plain = object.__new__(made)
    _, writers = _access(made)
    for write, value in zip(writers, values, strict=True):
        write(plain, value)
    return plain


@cache
def _access(made: Any) -> tuple[Callable[[_Plain], tuple[Any, ...]], list[Callable[[_Plain, Any], None]]]:
    """A getter for all slots at once, and a setter for each slot that bypasses a frozen class's guard."""
    names = [field.name for field in fields(made)]
    return attrgetter(*names), [getattr(made, name).__set__ for name in names]


class Message(TypedDict):
    """One chat message, as chat templates take it.

    Data, environments and agents may give the content as a list of parts, text and pictures; it becomes this where it enters.
    """

    role: str
    content: str
    images: NotRequired[list[str]]
    """The pictures in it, one for each U+FFFC in the content: data URLs, files, or names of kept ones."""
    tools: NotRequired[list[ToolSchema]]
    """Only on the first message of a conversation: the tools that the assistant may call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(_Plain):
    """A task for the policy: the opening messages, and the data needed to judge the answer."""

    id: str
    """Unique and stable within its source, e.g. `math/17`."""
    messages: tuple[Message, ...]
    domain: str
    """Selects the reward, and the settings by domain."""
    answer: str | None = None
    """The reference answer, where the task has one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row: a reward or an environment may read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_Plain):
    """Sampling settings of one completion."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion. The tokens that complete the string are kept."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTokens(_Plain):
    """The tokens generated so far of an unfinished completion: ids, log-probs and versions as in `Completion`."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(_Plain):
    """A request to an engine for one completion."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    written: WrittenTokens = WrittenTokens()
    """Tokens generated earlier, by this engine or another: the completion starts with them and continues. A token depends on
    (seed, position, weights) only, so the result is the same as if it had been generated in one go."""
    num_routed: int = 0
    """The expert choices of this many leading tokens are known already: an engine that reports them starts after those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBlock(_Plain):
    """Tokens that an engine has generated for several requests since its last report.

    Row i is a run of `counts[i]` tokens of one request under one weight version; the arrays concatenate the rows.
    """

    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    """Position of each row's first token in its completion."""
    counts: tuple[int, ...]
    versions: tuple[int, ...]
    token_ids: NDArray[np.uint32]
    logprobs: NDArray[np.float64]


class PartialCompletion:
    """A completion in progress, as far as its engine has reported it."""

    __slots__ = ("_ids", "_logprobs", "num_tokens", "versions")

    def __init__(self, written: WrittenTokens | None = None) -> None:
        self._ids: list[NDArray[np.uint32]] = []
        self._logprobs: list[NDArray[np.float64]] = []
        self.num_tokens = 0
        self.versions: list[tuple[int, int]] = []
        """As in `Completion`."""
        if written is not None and written.token_ids:
            self._ids.append(np.array(written.token_ids, dtype=np.uint32))
            self._logprobs.append(np.array(written.logprobs))
            self.num_tokens = len(written.token_ids)
            self.versions += written.versions

    def add(self, ids: NDArray[np.uint32], logprobs: NDArray[np.float64], version: int) -> None:
        """Append the next tokens; without any, nothing changes."""
        if not len(ids):
            return
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        self.num_tokens += len(ids)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + len(ids))
        else:
            self.versions.append((version, len(ids)))

    def written(self) -> WrittenTokens:
        """Everything so far, in the form that `Request.written` takes."""
        if not self._ids:
            return WrittenTokens()
        return WrittenTokens(
            token_ids=tuple(np.concatenate(self._ids).tolist()),
            logprobs=tuple(np.concatenate(self._logprobs).tolist()),
            versions=tuple(self.versions),
        )


class FinishReason(StrEnum):
    """Why the engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(_Plain):
    """An engine's output for one request."""

    token_ids: tuple[int, ...]
    """Includes the stop token, if one ended it: the policy sampled it and is trained on it."""
    logprobs: tuple[float, ...]
    """Log-prob of each token under softmax(logits / temperature), before top-p and top-k cut it (greedy: temperature 1).
    It is the quantity the trainer computes for the same tokens."""
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    """Runs of (weight version, number of tokens generated under it), oldest first."""
    routes: NDArray[Any] | None = field(default=None, compare=False)
    """[R, layers, top_k] the experts chosen for the last R tokens that the engine has read: tokens of prompt and completion up
    to the one before the newest. uint8, or int16 if a layer has too many experts for that. None: not reported."""


class Versions(NamedTuple):
    """The oldest and the newest weight version behind the tokens of a sample."""

    oldest: int
    newest: int


class Status(StrEnum):
    """How a trajectory ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_ENDED, _TOKEN_IDS = (Status.COMPLETED, Status.TRUNCATED), attrgetter("completion.token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(_Plain):
    """One exchange: the prompt, the completion, and the environment's reply."""

    prompt_ids: tuple[int, ...]
    """Everything before the completion, earlier turns included."""
    completion: Completion
    text: str
    """The completion as text, special tokens dropped: what rewards and environments read."""
    shown: tuple[Message, ...] = ()
    """The messages since the previous completion: the opening in the first turn, the environment's reply after that."""
    reply: tuple[Message, ...] = ()
    """The environment's reply to this turn; empty if the episode ended here."""
    reward: float = 0.0
    info: Mapping[str, float] = field(default_factory=dict)
    """Further measurements of the environment, e.g. `effective` and `success`."""
    state: str | None = None
    """The environment's name for the state in which the policy acted. None: the messages just shown identify it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(_Plain):
    """A reward's verdict on one trajectory."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """The component rewards by name, before weighting. Estimators may train on each by itself (`gdpo`)."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each part, by name; 1 for a part that is not listed."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Further measurements, by name: logged beside the parts, never trained on."""
    answer: str | None = None
    """The policy's final answer as the reward extracted it, in a canonical form: equal answers are equal strings. None: not
    looked for, or not found."""

    @property
    def named(self) -> dict[str, float]:
        """The parts and the further measurements in one dict."""
        return {**self.parts, **self.info}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(_Plain):
    """One sample from start to end: its turns, how it ended, and its reward."""

    id: str
    turns: tuple[Turn, ...]
    status: Status
    reason: str = ""
    """Why it failed or was truncated; empty otherwise."""
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The component rewards. This field and the next two are as in `Score`."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    reward_info: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    """The final answer, as the reward extracted it."""

    def scored(self, score: Score) -> Trajectory:
        """A copy of the trajectory with this score."""
        return replace(
            self,
            reward=score.value,
            reward_parts=score.parts,
            part_weights=score.weights,
            reward_info=score.info,
            answer=score.answer,
        )

    @property
    def score(self) -> Score:
        """Its reward with parts and measurements, whoever gave it: a reward, an environment or an agent."""
        return Score(
            value=self.reward,
            parts=self.reward_parts,
            weights=self.part_weights,
            info=self.reward_info,
            answer=self.answer,
        )

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def versions(self) -> Versions:
        """The range of weight versions of its tokens. It must have tokens."""
        versions = [version for turn in self.turns for version, _ in turn.completion.versions]
        return Versions(min(versions), max(versions))

    @property
    def text(self) -> str:
        """The text of the last turn; empty without turns."""
        return self.turns[-1].text if self.turns else ""

    @property
    def is_usable(self) -> bool:
        """Whether it may be trained on: it ended by itself or at a limit, and was scored."""
        return self.status in _ENDED and any(map(_TOKEN_IDS, self.turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(_Plain):
    """One prompt and its sibling trajectories: the unit of scheduling, scoring and filtering."""

    number: int
    """The scheduler's number for this group: unique, and growing with admission within its domain."""
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    version: int
    """The weight version that was current when the group was admitted."""
    baseline: float | None = None
    """The reward of the policy's greedy answer, for algorithms that use it as a baseline."""

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def has_signal(self) -> bool:
        """Whether a group baseline leaves any gradient: false if all rewards are equal in single precision, in which
        advantages are computed (0.3 and 0.1 + 0.2 are equal there)."""
        return len(set(np.array(self.rewards, dtype=np.float32).tolist())) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One flat training row. Entry t of every array talks about token t, given the tokens before it."""

    ids: NDArray[np.int64]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L] True on tokens the policy wrote; never on the first token, which nothing predicts."""
    logp: NDArray[np.float32]
    """[L] log-prob as sampled; 0 off the mask."""
    turn: NDArray[np.int64]
    """[L] which of the trajectory's turns wrote the token, from 0; -1 off the mask."""
    version: NDArray[np.int64] | None = None
    """[L] the oldest weight version behind the token's turn; -1 off the mask and where unknown. None: unknown for all."""
    routes: NDArray[Any] | None = None
    """[L, layers, top_k] the experts chosen for each token when it was first read; the dtype's largest value where unknown.
    None: unknown for all."""
