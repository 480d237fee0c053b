"""A logged sample as plain JSON, one line of samples.jsonl: its turns, its tokens, and what it earned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from reroll.errors import RunFolderError
from reroll.types import Message, Prompt, Trajectory

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

    @model_validator(mode="after")
    def _every_token_is_whole(self) -> Self:
        if not len(self.pieces) == len(self.logp) == sum(count for _, count in self.versions):
            raise ValueError("pieces, logp and versions speak of different numbers of tokens")
        return self

    @property
    def tokens(self) -> list[Token]:
        versions = (version for version, count in self.versions for _ in range(count))
        return [Token(*token) for token in zip(self.pieces, self.logp, versions, strict=True)]


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


def read_episodes(path: Path) -> tuple[list[LoggedEpisode], list[str]]:
    """The samples of a samples.jsonl, oldest first, and a note on each line that had to be skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror} (check its permissions)") from error
    episodes, notes = [], []
    for number, line in enumerate(lines, start=1):
        try:
            episodes.append(LoggedEpisode.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(key) for key in first["loc"])
            notes.append(f"{path} line {number} is damaged and was skipped: {place + ': ' if place else ''}{first['msg']}")
    return episodes, notes


def find_run(run: str, *, runs_dir: Path = Path("runs")) -> Path:
    """The folder of a run, by its path or by its name under `runs_dir`. Raises RunFolderError with names that are close."""
    for folder in (Path(run), runs_dir / run):
        if folder.is_dir():
            return folder
    there = sorted(path.name for path in runs_dir.glob("*") if path.is_dir())
    hint = _hint(Path(run).name, there) or "give the folder of a run, e.g. runs/NAME"
    raise RunFolderError(f"there is no run {run!r}, neither as a folder nor in {runs_dir}/ ({hint})")


def logged_episodes(folder: Path) -> tuple[list[LoggedEpisode], list[str]]:
    """What `read_episodes` finds in a run. Raises RunFolderError if that is nothing."""
    episodes, notes = read_episodes(folder / "samples.jsonl")
    notes += failure_of(folder)
    if not episodes:
        damage = "".join(f"\n{note}" for note in notes)
        raise RunFolderError(
            f"{folder} has no logged samples: its first step is not finished, or its run.log_samples is 0 "
            f"(set run.log_samples to how many to write each step; only pipeline rlvr writes any){damage}"
        )
    return episodes, notes


def failure_of(folder: Path) -> list[str]:
    """Why a run failed, if it did and could say so."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if result["status"] == "failed":
            return [f"this run failed after {result['steps']} steps: {result['error']}: {result['reason']}"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # It runs, was killed, or somebody edited what it left.
    return []


def find_episode(episodes: Sequence[LoggedEpisode], id: str) -> LoggedEpisode:
    """The latest sample of this id. Raises RunFolderError with ids that are close."""
    for episode in reversed(episodes):
        if episode.id == id:
            return episode
    ids = list(dict.fromkeys(episode.id for episode in episodes))
    hint = _hint(id, ids) or f"{len(ids)} samples were logged, from {ids[0]} to {ids[-1]}: leave SAMPLE out to list them"
    raise RunFolderError(f"no sample {id!r} was logged ({hint})")


def _hint(wrong: str, known: Sequence[str]) -> str:
    close = get_close_matches(wrong, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else ""


def shade(logp: float | None) -> int:
    """How surprising a token was, from 0 (all but certain) to 4 (less than one in a hundred)."""
    probability = 0.0 if logp is None else math.exp(logp)
    return sum(probability < bound for bound in LIKELY)


def printable(text: str) -> str:
    """Control characters as pictures: what a model writes must not steer a terminal."""
    return text.translate(_PICTURES)


_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), ord(UNKNOWN)) | {0x7F: ord("␡")}


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
