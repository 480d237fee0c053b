"""Gymnasium: actions read from text, observations written as text, or shown as the pictures that it draws."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll.types import Message
from reroll_zoo.adapters.config import GymnasiumConfig
from reroll_zoo.vision.parts import message

MAX_NUMBERS = 256
"""Arrays with more numbers than this are no text that a policy could read."""

MAX_SPARES = 256
"""Environments of one kind that wait for their next episode."""

_SPARES: dict[str, list[Any]] = {}
"""Environments between two episodes, by what they were made with. Making one takes longer than many an episode, and
Gymnasium's `reset(seed=…)` makes a used one as good as new."""

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
"""Of terminals, by the last digit of their code; 3x colours the letters, 4x what is behind them."""


class Gymnasium:
    """A Gymnasium environment. Rewards, termination and truncation are its own; a decision earns the sum over its steps."""

    def __init__(self, options: GymnasiumConfig) -> None:
        self._options = options
        env_id, max_steps = options.env_id, options.max_steps
        made_with = options.options | ({"render_mode": _render_mode(options)} if _render_mode(options) else {})
        self._spares = [] if options.fresh else _SPARES.setdefault(repr((env_id, made_with, max_steps)), [])
        self.env: Any = _spare(self._spares) or _make(env_id, options=made_with, max_steps=max_steps)
        self._actions = action_reader(self.env.action_space, names=options.action_names)
        self._rules = f"{options.rules or f'You play {env_id}.'} {self._actions.grammar}"
        threshold = None if self.env.spec is None else self.env.spec.reward_threshold
        self._success_at = threshold if options.success_at is None else options.success_at
        self._is_under_way = False
        self._may_be_used_again = not options.fresh
        if not _render_mode(options):
            _check_readable(self.env.observation_space, names=options.observation_names, env_id=env_id)

    def reset(self, seed: int) -> tuple[Message, ...]:
        """The episode of this seed: a system message with the rules, a user message with what there is to see."""
        self._observation, _ = self._calling(self.env.reset, seed=seed)
        self._return = 0.0
        self._is_under_way = True
        return {"role": "system", "content": self._rules}, self._show()

    def step(self, action: str) -> StepResult:
        """Do one action, for as many steps as a decision holds."""
        if not self._is_under_way:
            raise EnvError("no episode is under way: call reset, which starts one")
        chosen = self._actions.read(action)
        before = self._observation
        reward, last_reward, terminated, truncated = 0.0, 0.0, False, False
        for _ in range(self._options.repeat):
            self._observation, paid, terminated, truncated, _ = self._calling(self.env.step, chosen)
            last_reward = float(paid)
            reward += last_reward
            if terminated or truncated:
                break
        self._return += reward
        is_over = bool(terminated or truncated)
        self._is_under_way = not is_over
        info = {"effective": float(not data_equivalence(before, self._observation, exact=True))}
        if is_over:
            pays = terminated and last_reward > 0
            info["success"] = float(pays if self._success_at is None else self._return >= self._success_at)
        shown = self._show()
        return StepResult(
            messages=() if is_over else (shown,),
            reward=reward,
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=info,
            state=_state_of(shown),
        )

    def close(self) -> None:
        """Free what the environment holds, or leave it to the next episode. Safe to call twice."""
        self._is_under_way = False
        if self._may_be_used_again and len(self._spares) < MAX_SPARES:
            self._spares.append(self.env)
        else:
            self.env.close()
        self._may_be_used_again = False

    def _calling(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What the environment answers. One that raises is not used again."""
        try:
            return method(*args, **options)
        except BaseException:
            self._may_be_used_again = False
            raise

    def _show(self) -> Message:
        options = self._options
        if options.rgb_array:
            return message("user", self.env.render())
        if options.ansi:
            return {"role": "user", "content": without_colours(cast(str, self.env.render()))}
        space = self.env.observation_space
        text = show(self._observation, space, names=options.observation_names, digits=options.digits)
        return {"role": "user", "content": text}


class DiscreteReader:
    """Actions 0, 1, …: read as numbers, or as names if there are any, in any case."""

    def __init__(self, space: spaces.Discrete, names: Sequence[str] | None) -> None:
        self._first = int(space.start)
        last = self._first + int(space.n) - 1
        if names is not None and len(names) != space.n:
            raise ValueError(f"action_names holds {len(names)} names for {space.n} actions: give one for each")
        words = names if names is not None else [str(number) for number in range(self._first, last + 1)]
        self._actions = {word.strip().lower(): self._first + place for place, word in enumerate(words)}
        if len(self._actions) < len(words):
            raise ValueError(f"action_names holds a name twice: {', '.join(words)}")
        listed = ", ".join(words)
        self.grammar = f"Answer with one of: {listed}." if names else f"Answer with a number from {self._first} to {last}."

    def read(self, text: str) -> int:
        """The action that the words name, or InvalidAction."""
        action = self._actions.get(text.strip().rstrip(".").lower())
        if action is None:
            raise _no_action(text, self.grammar)
        return action


class NumbersReader:
    """Actions of one or several numbers, each within its bounds; whole numbers where the space wants them."""

    def __init__(self, *, low: np.ndarray, high: np.ndarray, shape: tuple[int, ...], dtype: Any) -> None:
        self._low, self._high = low.astype(np.float64).ravel(), high.astype(np.float64).ravel()
        self._shape, self._dtype = shape, dtype
        self._is_whole = np.issubdtype(dtype, np.integer)
        count, number = len(self._low), "whole number" if self._is_whole else "number"
        bounds = [f"from {low:g} to {high:g}" for low, high in zip(self._low, self._high, strict=True)]
        if count == 1:
            self.grammar = f"Answer with a {number} {bounds[0]}."
        else:
            example = ", ".join(f"{low:g}" if math.isfinite(low) else "0" for low in self._low)
            each = f"each {bounds[0]}" if len(set(bounds)) == 1 else "; ".join(bounds)
            self.grammar = f"Answer with {count} {number}s in brackets, such as [{example}]: {each}."

    def read(self, text: str) -> Any:
        """The action that the numbers are, or InvalidAction."""
        try:
            numbers = np.array([float(word) for word in re.split(r"[,\s]+", text.strip().strip("[]()").strip())])
        except ValueError:
            raise _no_action(text, self.grammar) from None
        if numbers.shape != self._low.shape or not np.isfinite(numbers).all():
            raise _no_action(text, self.grammar)
        if (numbers < self._low).any() or (numbers > self._high).any():
            raise InvalidAction(f"{_cut(text)} is out of range. {self.grammar}")
        if self._is_whole and (numbers != np.round(numbers)).any():
            raise _no_action(text, self.grammar)
        return numbers.astype(self._dtype).reshape(self._shape)


def action_reader(space: spaces.Space[Any], *, names: Sequence[str] | None) -> DiscreteReader | NumbersReader:
    """What turns words into actions of a space. Raises ValueError for spaces that have no simple words."""
    if isinstance(space, spaces.Discrete):
        return DiscreteReader(space, names)
    if names is not None:
        raise ValueError(f"action_names is for discrete actions, and these are {space}: leave it out")
    if isinstance(space, spaces.Box):
        return NumbersReader(low=space.low, high=space.high, shape=space.shape, dtype=space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        high = space.start + space.nvec - 1
        return NumbersReader(low=space.start, high=high, shape=space.shape, dtype=space.dtype)
    raise ValueError(f"actions of {space} cannot be read from text: only Discrete, MultiDiscrete and Box can")


def show(observation: Any, space: spaces.Space[Any], *, names: Sequence[str] | None, digits: int) -> str:
    """An observation in words: arrays as rows of rounded numbers, named ones and dicts as one `name: value` a line."""
    if isinstance(space, spaces.Dict):
        parts = [(key, show(observation[key], part, names=None, digits=digits)) for key, part in space.spaces.items()]
        return "\n".join(f"{key}: {text}" for key, text in parts)
    if isinstance(space, spaces.Tuple):
        return "\n".join(
            show(value, part, names=None, digits=digits) for value, part in zip(observation, space.spaces, strict=True)
        )
    if isinstance(space, spaces.Discrete) and names is not None:
        return names[int(observation) - int(space.start)]
    if isinstance(observation, str):
        return observation
    array = np.asarray(observation)
    if names is not None:
        return "\n".join(f"{name}: {_rounded(value, digits)}" for name, value in zip(names, array.ravel(), strict=True))
    rows = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
    return "\n".join(" ".join(_rounded(value, digits) for value in row) for row in rows)


def without_colours(picture: str) -> str:
    """A terminal's picture as plain text. Colour carries meaning (where the player is), so it becomes `<red S>`."""
    coloured = re.compile(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m")
    while coloured.search(picture):
        picture = coloured.sub(_name_colour, picture)
    return re.sub(r"\x1b\[[\d;]*m", "", picture).strip("\n")


def _name_colour(match: re.Match[str]) -> str:
    codes = [int(code) for code in match[1].split(";") if 30 <= int(code or 0) <= 47]
    return f"<{COLOURS[codes[0] % 10]} {match[2]}>" if codes and codes[0] % 10 < len(COLOURS) else match[2]


def _rounded(value: Any, digits: int) -> str:
    if np.issubdtype(type(value), np.floating):
        return f"{round(float(value), digits) + 0.0:.{digits}f}"  # + 0.0 turns -0.0 into 0.0
    return str(int(value))


def _render_mode(options: GymnasiumConfig) -> str | None:
    return "rgb_array" if options.rgb_array else "ansi" if options.ansi else None


def _state_of(shown: Message) -> str:
    """What groups turns: what is seen, of a picture its hash."""
    images = shown.get("images")
    return hashlib.sha256(images[0].encode()).hexdigest() if images else shown["content"]


def _check_readable(space: spaces.Space[Any], *, names: Sequence[str] | None, env_id: str) -> None:
    size = int(np.prod(space.shape)) if isinstance(space, spaces.Box) else 1
    if size > MAX_NUMBERS:
        raise ValueError(
            f"{env_id} shows {size} numbers at once, too many to read: set ansi or rgb_array, or wrap it to show less"
        )
    if names is None:
        return
    if not isinstance(space, spaces.Box | spaces.Discrete):
        raise ValueError(f"observation_names is for arrays and discrete states, and {env_id} shows {space}: leave it out")
    wanted = int(space.n) if isinstance(space, spaces.Discrete) else size
    if len(names) != wanted:
        raise ValueError(f"observation_names holds {len(names)} names for the {wanted} values of {env_id}: give one for each")


def _spare(spares: list[Any]) -> Any:
    try:  # Threads share the list: another may be faster.
        return spares.pop()
    except IndexError:
        return None


def _make(env_id: str, *, options: Mapping[str, Any], max_steps: int | None) -> Any:
    try:
        return gymnasium.make(env_id, max_episode_steps=max_steps, **options)
    except gymnasium.error.Error as error:
        raise ValueError(f"Gymnasium cannot make {env_id}: {error}") from error


def _no_action(text: str, grammar: str) -> InvalidAction:
    return InvalidAction(f"{_cut(text)} is no action here. {grammar}")


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
