"""A trajectory as a conversation: what models that judge it are shown."""

from __future__ import annotations

from collections.abc import Sequence

from reroll.types import Message, Prompt, Trajectory


def opening(prompt: Prompt, trajectory: Trajectory) -> tuple[Message, ...]:
    """What the policy was told before it first spoke; in an environment only the trajectory knows."""
    return (trajectory.turns[0].shown if trajectory.turns else ()) or prompt.messages


def conversation(prompt: Prompt, trajectory: Trajectory) -> list[Message]:
    """Everything that was said, up to the policy's last words."""
    messages = list(opening(prompt, trajectory))
    for number, turn in enumerate(trajectory.turns):
        messages += turn.shown if number else ()
        messages.append(Message(role="assistant", content=turn.text))
    return messages


def as_text(messages: Sequence[Message]) -> str:
    """Messages as a reader sees them; a single one is its words alone."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
