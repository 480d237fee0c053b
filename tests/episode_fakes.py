"""A tokenizer whose tokens are words or bytes, and short episodes to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reroll.types import Completion, FinishReason, Message, Prompt, Status, Trajectory, Turn
from reroll_zoo.samples.episode import LoggedEpisode, episode_of
from reroll_zoo.samples.run_samples import RunSamples

PROMPT = Prompt(id="lake/7", messages=(), domain="lake", extra={"seed": 7})


class Words:
    """Every new word gets the next id."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, words: Sequence[str]) -> tuple[int, ...]:
        self.words += [word for word in dict.fromkeys(words) if word not in self.words]
        return tuple(self.words.index(word) for word in words)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[id] for id in ids)


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def user(content: str) -> Message:
    return Message(role="user", content=content)


def play(*turns: dict[str, Any], prompt: Prompt = PROMPT, **ending: Any) -> LoggedEpisode:
    """An episode of turns `{"said": words, "logp": …, "shown": text, …fields of Turn}`, logged at step 3."""
    tokenizer = Words()
    played: list[Turn] = []
    ids: tuple[int, ...] = (0,)
    for number, given in enumerate(turns):
        fields = {"logp": None, "shown": "", "prompt_ids": ids, "versions": None} | given
        said, logp, shown, versions = (fields.pop(name) for name in ("said", "logp", "shown", "versions"))
        written = tokenizer.encode(said)
        completion = Completion(
            token_ids=written,
            logprobs=tuple(logp or [0.0] * len(written)),
            finish_reason=FinishReason.STOP,
            versions=versions or ((number, len(written)),),
        )
        told = shown if isinstance(shown, tuple) else (user(shown),)
        played.append(Turn(completion=completion, text="".join(said), shown=told, **fields))
        ids = (*played[-1].prompt_ids, *written)
    ending = {"id": "12.0", "status": Status.COMPLETED, "reward": sum(turn.reward for turn in played)} | ending
    return episode_of(3, prompt, Trajectory(turns=tuple(played), **ending), decode=tokenizer.decode)


def trained_samples(folder: Path) -> list[LoggedEpisode]:
    """Those that a run was trained on, oldest first."""
    samples = RunSamples(folder)
    return [samples.read(life) for life in samples.lives if life.trained_version is not None]
