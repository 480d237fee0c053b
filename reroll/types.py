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
    """A dataclass with slots that is pickled as its values alone. Dataclasses themselves look up their fields each time,
    which takes several times as long, and these travel between processes by the thousand a second."""

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
    """What reads all slots at once, and what writes each, past a frozen class's own guard."""
    names = [field.name for field in fields(made)]
    return attrgetter(*names), [getattr(made, name).__set__ for name in names]


class Message(TypedDict):
    """One chat message, as chat templates take it."""

    role: str
    content: str
    tools: NotRequired[list[ToolSchema]]
    """On the first message of a conversation: what the assistant may call in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(_Plain):
    """A task for the policy: what to say to it, and what is needed to judge what it says back."""

    id: str
    """Unique and stable within its source, e.g. `math/17`."""
    messages: tuple[Message, ...]
    domain: str
    """Chooses the reward."""
    answer: str | None = None
    """The reference answer, where the task has one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row: a reward or an environment may read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_Plain):
    """How a completion is drawn."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; the tokens that complete the string stay in it."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTokens(_Plain):
    """The beginning of a completion that is not over yet: ids, log-probs and versions as in `Completion`."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(_Plain):
    """One completion asked of an engine."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    written: WrittenTokens = WrittenTokens()
    """Written already, by this engine or another: the completion begins with it and goes on after it, and since a token is
    drawn from (seed, position, weights), comes out as if it had been written in one go."""
    num_routed: int = 0
    """Of so many leading tokens the experts are known: an engine that tells of them begins after those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBlock(_Plain):
    """Tokens that an engine has written for several requests since it last told of them.

    Row i is a run of `counts[i]` tokens of one request under one version of the weights; the arrays hold them row by row.
    """

    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    """Place of a row's first token in its completion."""
    counts: tuple[int, ...]
    versions: tuple[int, ...]
    token_ids: NDArray[np.uint32]
    logprobs: NDArray[np.float64]


class PartialCompletion:
    """A completion that is being written, as far as it was told."""

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
        """The tokens that come next; none is no news."""
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
        """All of it, as a request takes it."""
        if not self._ids:
            return WrittenTokens()
        return WrittenTokens(
            token_ids=tuple(np.concatenate(self._ids).tolist()),
            logprobs=tuple(np.concatenate(self._logprobs).tolist()),
            versions=tuple(self.versions),
        )


class FinishReason(StrEnum):
    """Why the engine stopped writing."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(_Plain):
    """What an engine wrote for one request."""

    token_ids: tuple[int, ...]
    """Includes the stop token, if one ended it: the policy sampled it and is trained on it."""
    logprobs: tuple[float, ...]
    """Log-prob of each token under softmax(logits / temperature), before top-p and top-k cut it (greedy: temperature 1).
    It is the quantity the trainer computes for the same tokens."""
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    """Runs of (weight version, number of tokens written under it), oldest first."""
    routes: NDArray[Any] | None = field(default=None, compare=False)
    """[R, layers, top_k] the experts to which the last R tokens went that the engine read: those before the newest, in prompt
    and completion. uint8, or int16 where they are many. None: it did not tell."""


class Versions(NamedTuple):
    """The oldest and the newest weights that wrote any token of a sample."""

    oldest: int
    newest: int


class Status(StrEnum):
    """How a trajectory ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(_Plain):
    """One exchange: what the policy was shown, what it wrote, what came of it."""

    prompt_ids: tuple[int, ...]
    """Everything before the completion, earlier turns included."""
    completion: Completion
    text: str
    """The completion as text, special tokens dropped: what rewards and environments read."""
    shown: tuple[Message, ...] = ()
    """What the policy was told since it last spoke: the opening, then what it is answered."""
    reply: tuple[Message, ...] = ()
    """The environment's answer; empty when the episode ended here."""
    reward: float = 0.0
    info: Mapping[str, float] = field(default_factory=dict)
    """What else the environment measured, e.g. `effective` and `success`."""
    state: str | None = None
    """The environment's name for the state the policy spoke in; None: what it had just been shown stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(_Plain):
    """A reward's verdict on one trajectory."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """The rewards that it is made of, by name, before they are weighed. Estimators may train on each by itself (`gdpo`)."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """What a part counts, by its name; a part that is not named counts once."""
    info: Mapping[str, float] = field(default_factory=dict)
    """What else was measured, by name: logged beside the parts, never trained on."""
    answer: str | None = None
    """What it took for the policy's final answer, written in one way: equal answers are equal strings. None: it looked for
    none, or found none."""

    @property
    def named(self) -> dict[str, float]:
        """All that has a name: the parts, and what else was measured."""
        return {**self.parts, **self.info}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(_Plain):
    """One sample's whole life with the policy: its turns, how it ended, and what it earned."""

    id: str
    turns: tuple[Turn, ...]
    status: Status
    reason: str = ""
    """Why it failed or was truncated; empty otherwise."""
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The rewards that it is made of; this and the next two as in `Score`."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    reward_info: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    """The final answer, as the reward read it."""

    def scored(self, score: Score) -> Trajectory:
        """The same trajectory with what a reward said about it."""
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
        """What a reward, its environment or its agent said about it."""
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
        """The weights that its tokens were written under. It must have tokens."""
        versions = [version for turn in self.turns for version, _ in turn.completion.versions]
        return Versions(min(versions), max(versions))

    @property
    def text(self) -> str:
        """The policy's last words."""
        return self.turns[-1].text if self.turns else ""

    @property
    def is_usable(self) -> bool:
        """Whether it may be trained on: it ended by itself or at a limit, and was scored."""
        return self.status in (Status.COMPLETED, Status.TRUNCATED) and self.num_completion_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(_Plain):
    """One prompt and its sibling trajectories: the unit of scheduling, scoring and filtering."""

    number: int
    """The scheduler's name for this group: inside its domain, in the order of admission."""
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    version: int
    """The weight version that was current when the group was admitted."""
    baseline: float | None = None
    """What the policy's greedy answer earned, where the algorithm asks for one."""

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def has_signal(self) -> bool:
        """Whether a group baseline would leave any gradient: false when all rewards are equal in single precision, in which
        advantages are taken from them (0.3 and 0.1 + 0.2 are)."""
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
    """[L] the oldest weights that had a hand in the token's turn; -1 off the mask and where nobody knows. None: of none."""
    routes: NDArray[Any] | None = None
    """[L, layers, top_k] the experts that each token went to when it was first read; the type's largest number where nobody
    knows. None: of none."""
