"""A logged sample as plain JSON, one line of samples.jsonl: its turns, its tokens, and what it earned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from reroll.types import Message, Prompt, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens by their names."""

UNKNOWN = "�"
"""What a decoder writes for bytes that are no whole character."""
_MAX_TOKENS_OF_A_CHARACTER = 4
_LOGP_DIGITS = 4


class _EpisodeRow(BaseModel):
    model_config = ConfigDict(frozen=True)


class Told(_EpisodeRow):
    """A message to the policy."""

    role: str
    content: str
    tools: tuple[str, ...] = ()
    """Names of what it may call from here on."""


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

    @model_validator(mode="after")
    def _every_token_is_whole(self) -> Self:
        if not len(self.pieces) == len(self.logp) == sum(count for _, count in self.versions):
            raise ValueError("pieces, logp and versions speak of different numbers of tokens")
        return self


class LoggedEpisode(_EpisodeRow):
    """A sample as it was logged."""

    step: int
    """How many steps were finished with the one that trained on it."""
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
    """What was measured beside the parts. Logs of earlier versions have it among them."""
    status: str
    reason: str
    num_tokens: int
    turns: tuple[EpisodeTurn, ...] | None = None
    """None in logs of earlier versions, which held words alone."""

    @property
    def exchanges(self) -> tuple[EpisodeTurn, ...]:
        """The turns; for a log of words alone, these as one turn."""
        if self.turns is not None:
            return self.turns
        words = EpisodeTurn(shown=(Told(role="user", content=self.prompt),), text=self.completion, reward=self.reward)
        return (words,)

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


def episode_of(step: int, prompt: Prompt, trajectory: Trajectory, *, decode: Decode) -> LoggedEpisode:
    """What there is to see of a trajectory that step number `step` trained on."""
    turns = trajectory.turns
    seed = prompt.extra.get("seed")
    return LoggedEpisode(
        step=step,
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
    return Told(role=message["role"], content=message["content"], tools=names)


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
