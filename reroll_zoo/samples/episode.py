"""A sample as people look at it: its turns, its tokens by their texts, and what it earned. Plain data, for a page too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from reroll.errors import printable
from reroll.types import Message, Prompt, Trajectory
from reroll_zoo.samples.pictures import kept_name

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens by their names."""

UNKNOWN = "�"
"""What a decoder writes for bytes that are no whole character."""
_MAX_TOKENS_OF_A_CHARACTER = 4
_LOGP_DIGITS = 4

LIKELY = (0.9, 0.5, 0.1, 0.01)
"""Where one shade of a token's probability ends and the next begins."""


class _EpisodeRow(BaseModel):
    model_config = ConfigDict(frozen=True)


class Told(_EpisodeRow):
    """A message to the policy."""

    role: str
    content: str
    """With U+FFFC where a picture stands."""
    images: tuple[str, ...] = ()
    """The names of its pictures, empty for one that is not kept with the run."""
    tools: tuple[str, ...] = ()
    """Names of what it may call from here on."""


class Token(NamedTuple):
    """A token that the policy wrote."""

    text: str
    """Empty where a character takes several tokens, but for the last of them."""
    logp: float | None
    """As sampled; None if it was not finite."""
    version: int
    """Version of the weights that sampled it."""

    @property
    def visible(self) -> str:
        """Its text so that every token can be seen and pointed at, one of a line break too."""
        return printable(self.text).replace("\n", "↵\n") or "·"


class EpisodeTurn(_EpisodeRow):
    """What the policy was shown, what it wrote, what came of it."""

    shown: tuple[Told, ...]
    """What it was told since it last spoke."""
    is_rendered_afresh: bool = False
    """Its prompt does not continue the turn before it (the history was cut, edited or left): a training row starts here."""
    text: str
    pieces: tuple[str, ...] = ()
    """The same token by token, special tokens with it."""
    logp: tuple[float | None, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()
    """Runs of (weight version, number of tokens)."""
    finish_reason: str = ""
    reward: float | None = 0.0
    info: dict[str, float | None] = {}
    state: str | None = None

    @property
    def tokens(self) -> list[Token]:
        versions = (version for version, count in self.versions for _ in range(count))
        return [Token(*token) for token in zip(self.pieces, self.logp, versions, strict=True)]


class LoggedEpisode(_EpisodeRow):
    """A sample as its run logged it."""

    step: int | None
    """How many steps were finished with the one that trained on it; None if none has."""
    fate: str = ""
    """What else has become of it, or what it waits for."""
    id: str
    prompt_id: str
    domain: str
    seed: int | None = None
    """Seed of the environment's instance."""
    prompt: str
    completion: str
    answer: str | None
    reward: float | None
    parts: dict[str, float | None]
    info: dict[str, float | None] = {}
    """What was measured beside the parts."""
    status: str
    reason: str
    num_tokens: int
    turns: tuple[EpisodeTurn, ...]

    @property
    def measured(self) -> dict[str, float | None]:
        """All that the reward told by name."""
        return {**self.parts, **self.info}

    @property
    def success(self) -> bool | None:
        """Whether the task was done, where the environment or the reward says so."""
        last = self.turns[-1].info if self.turns else {}
        value = last.get("success", self.measured.get("success"))
        return None if value is None else value > 0


def episode_of(step: int | None, prompt: Prompt, trajectory: Trajectory, *, fate: str = "", decode: Decode) -> LoggedEpisode:
    """What there is to see of a trajectory that step number `step` trained on."""
    turns = trajectory.turns
    seed = prompt.extra.get("seed")
    return LoggedEpisode(
        step=step,
        fate=fate,
        id=trajectory.id,
        prompt_id=prompt.id,
        domain=prompt.domain,
        seed=seed if isinstance(seed, int) else None,
        prompt=render_messages(prompt.messages or (turns[0].shown if turns else ())),
        completion=render_completion(trajectory),
        answer=prompt.answer,
        reward=trajectory.reward,
        parts=dict(trajectory.reward_parts),
        info=dict(trajectory.reward_info),
        status=str(trajectory.status),
        reason=trajectory.reason,
        num_tokens=trajectory.num_completion_tokens,
        turns=tuple(_turns_of(trajectory, decode)),
    )


def _turns_of(trajectory: Trajectory, decode: Decode) -> Iterator[EpisodeTurn]:
    before: tuple[int, ...] = ()
    for turn in trajectory.turns:
        completion = turn.completion
        yield EpisodeTurn(
            shown=tuple(_told(message) for message in turn.shown),
            is_rendered_afresh=turn.prompt_ids[: len(before)] != before,
            text=turn.text,
            pieces=tuple(pieces_of(completion.token_ids, decode)),
            logp=tuple(round(logp, _LOGP_DIGITS) for logp in completion.logprobs),
            versions=completion.versions,
            finish_reason=str(completion.finish_reason),
            reward=turn.reward,
            info=dict(turn.info),
            state=turn.state,
        )
        before = (*turn.prompt_ids, *completion.token_ids)


def _told(message: Message) -> Told:
    names = tuple(str(tool["function"]["name"]) for tool in message.get("tools", ()))
    images = tuple(kept_name(image) for image in message.get("images", ()))
    return Told(role=message["role"], content=message["content"], images=images, tools=names)


def pieces_of(ids: Sequence[int], decode: Decode) -> list[str]:
    """Each token's own text. Of tokens that only together make a character, the last has it and the others are empty."""
    known: dict[int, str] = {}
    for token in ids:
        if token not in known:  # Seen after itself, a token keeps the space that some decoders drop at the start of a text.
            known[token] = decode((token, token))[len(decode((token,))) :]
    pieces: list[str] = []
    while len(pieces) < len(ids):
        start = len(pieces)
        pieces.append(known[ids[start]])
        for end in range(start + 2, min(start + _MAX_TOKENS_OF_A_CHARACTER, len(ids)) + 1):
            if UNKNOWN not in pieces[start]:
                break
            if UNKNOWN not in (whole := decode(ids[start:end])):
                pieces[start:] = [*[""] * (end - start - 1), whole]
                break
    return pieces


def shade(logp: float | None) -> int:
    """How surprising a token was, from 0 (all but certain) to 4 (less than one in a hundred)."""
    probability = 0.0 if logp is None else math.exp(logp)
    return sum(probability < bound for bound in LIKELY)


def render_messages(messages: tuple[Message, ...]) -> str:
    """A lone user message as it is; a dialogue with its roles."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "\n\n".join(f"[{message['role']}] {message['content']}" for message in messages)


def render_completion(trajectory: Trajectory) -> str:
    """The policy's words; over several turns, with the environment's replies between them."""
    if len(trajectory.turns) <= 1:
        return trajectory.text
    messages: list[Message] = []
    for turn in trajectory.turns:
        messages += [Message(role="assistant", content=turn.text), *turn.reply]
    return render_messages(tuple(messages))
