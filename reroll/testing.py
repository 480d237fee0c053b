"""Trajectories made of text alone, to try rewards with and to test them."""

from __future__ import annotations

import re

from reroll.types import Completion, FinishReason, Status, Trajectory, Turn

_TOKEN = re.compile(r"\w+|[^\w\s]")


def trajectory_of(*texts: str, earned: float = 0.0) -> Trajectory:
    """As if the policy had written these texts, one a turn, and the episode had earned so much by itself.

    There is no tokenizer here: a word or a mark counts as one token.
    """
    return Trajectory(id="text", turns=tuple(_turn(text) for text in texts), status=Status.COMPLETED, reward=earned)


def _turn(text: str) -> Turn:
    tokens = len(_TOKEN.findall(text))
    completion = Completion(
        token_ids=(0,) * tokens, logprobs=(0.0,) * tokens, finish_reason=FinishReason.STOP, versions=((0, tokens),)
    )
    return Turn(prompt_ids=(0,), completion=completion, text=text)
