"""How the policy's words become an action."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reroll.config.base import Node, Pattern


class ActionFormConfig(Node):
    """What all forms of an action share."""

    thinking: Literal["strip", "keep"] = "strip"
    """`strip` looks only at what follows `</think>`; a turn that opens `<think>` and does not close it has no action."""


class TagActionConfig(ActionFormConfig):
    """The action stands in a tag, `<answer>…</answer>`; the last one counts."""

    kind: Literal["tag"]
    tag: str = Field(default="answer", pattern=r"^[A-Za-z][\w-]*$", examples=["answer"])
    """The tag's name."""


class LastLineActionConfig(ActionFormConfig):
    """The action is the last line that is not blank."""

    kind: Literal["last_line"]


class RegexActionConfig(ActionFormConfig):
    """The action is the first group of a regular expression, or all of its match if it has none; the last match counts."""

    kind: Literal["regex"]
    pattern: Pattern
    """A turn that it searches for more than a second holds no action."""
    rule: str = Field(min_length=1)
    """How the policy is told to write an action, e.g. `Write your action as ACTION: move.`"""


class TextActionConfig(ActionFormConfig):
    """All that the policy writes is the action. Environments with tools need this form."""

    kind: Literal["text"]


ActionConfig = Annotated[
    TagActionConfig | LastLineActionConfig | RegexActionConfig | TextActionConfig, Field(discriminator="kind")
]
