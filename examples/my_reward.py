"""A reward of your own: a function of the prompt and the trajectory. Use it with

rewards: {default: {kind: import, path: my_reward:short_and_right, options: {limit: 40}}}
"""

from __future__ import annotations

from reroll.types import Prompt, Score, Trajectory


def short_and_right(prompt: Prompt, trajectory: Trajectory, *, limit: int = 40) -> Score:
    """One point for the right answer in the text, and a little more for saying it in few words."""
    right = float(prompt.answer is not None and prompt.answer in trajectory.text)
    brief = 0.1 * right * (len(trajectory.text.split()) <= limit)
    return Score(value=right + brief, parts={"right": right, "brief": brief})
