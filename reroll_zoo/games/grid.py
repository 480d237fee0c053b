"""What games on a grid share: four directions, turns of one or several actions, a step limit, demonstrations."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from reroll.config.base import Node
from reroll.config.env_base import EnvConfig
from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll.types import Message

ACTIONS = ("Up", "Right", "Down", "Left")
"""Clockwise, so that the neighbours of a direction in this list are perpendicular to it. A direction is its place here."""

Cell = tuple[int, int]
"""Row and column, from the top left."""

STEPS: tuple[Cell, ...] = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""What each direction adds to a cell."""


Symbol = Annotated[str, Field(pattern=r"^\S$")]
"""How a cell is drawn: one visible character."""


class SymbolsConfig(Node):
    """One character for each kind of cell, no two alike."""

    @model_validator(mode="after")
    def _all_different(self) -> Self:
        drawn = self.model_dump()
        if len(set(drawn.values())) < len(drawn):
            listed = ", ".join(f"{cell} {symbol}" for cell, symbol in drawn.items())
            raise ValueError(f"two kinds of cell look alike ({listed}): give each a character of its own")
        return self


class GridGameConfig(EnvConfig):
    """What all games on a grid share."""

    max_steps: int = Field(default=20, ge=1)
    """Actions until the episode is cut. Every instance can be won within them."""
    actions_per_turn: int = Field(default=1, ge=1)
    """How many actions one answer may hold, separated by commas or line breaks."""
    rules: bool = True
    """Say the rules first. Small models that were warmed up on demonstrations do without."""
    shown: Literal["text", "picture"] = "text"
    """How the board is shown: as lines of symbols, or as a picture, for models that see."""
    cell_pixels: int = Field(default=16, ge=6)
    """Of a picture: the height and width of a cell."""
    symbols: SymbolsConfig


def parse_actions(text: str, *, at_most: int) -> list[int]:
    """The directions that the words name. Raises InvalidAction for all other words.

    An action is `Up`, `Down`, `Left` or `Right` in any case, with or without `move` before it. Several are separated by
    commas or line breaks. A comma or full stop at the end does not matter.
    """
    words = [word.strip().lower().removeprefix("move ").strip() for word in re.split(r"[,\n]\s*", text.strip().rstrip(".,"))]
    known = {action.lower(): direction for direction, action in enumerate(ACTIONS)}
    if len(words) > at_most or not all(word in known for word in words):
        said = text if len(text) <= 60 else f"{text[:60]}…"
        raise InvalidAction(f"{said!r} is no action here. {grammar(at_most)}")
    return [known[word] for word in words]


def grammar(at_most: int) -> str:
    """How to act, in the words of the rules."""
    if at_most == 1:
        return "Answer with one action: Up, Down, Left or Right."
    return f"Answer with 1 to {at_most} actions out of Up, Down, Left and Right, separated by commas."


class GridGame(ABC):
    """A game on a grid whose actions are the four directions. Holds the turns, the step limit and the demonstrations.

    A game brings its rules, its board, when it is won, and how instances are drawn, played and solved. A turn of several
    actions stops where the episode ends; its `effective` is the share of its actions that changed anything.
    """

    def __init__(self, options: GridGameConfig) -> None:
        self._max_steps = options.max_steps
        self._actions_per_turn = options.actions_per_turn
        self._tells_rules = options.rules
        self._symbols: dict[str, str] = options.symbols.model_dump()
        self._cell_pixels = options.cell_pixels if options.shown == "picture" else None
        self.steps_left = 0

    def reset(self, seed: int) -> tuple[Message, ...]:
        """The instance of this seed: a system message with the rules, if they are told, and a user message with the board."""
        self._begin(random.Random(seed))
        self.steps_left = self._max_steps
        board = self._board_message()
        if not self._tells_rules:
            return (board,)
        limits = f"You have at most {self._max_steps} actions. {grammar(self._actions_per_turn)}"
        return {"role": "system", "content": f"{self.rules} {limits}"}, board

    def step(self, action: str) -> StepResult:
        """Do the actions of one turn."""
        if self._is_over():
            raise EnvError("no episode is under way: call reset, which starts one")
        reward, num_actions, num_effective = 0.0, 0, 0
        for direction in parse_actions(action, at_most=self._actions_per_turn):
            gained, changed = self._act(direction)
            self.steps_left -= 1
            reward, num_actions, num_effective = reward + gained, num_actions + 1, num_effective + changed
            if self._is_over():
                break
        terminated = self.won or self.lost
        info = {"effective": num_effective / num_actions, "num_actions": float(num_actions), "success": float(self.won)}
        return StepResult(
            messages=() if self._is_over() else (self._board_message(),),
            reward=reward,
            terminated=terminated,
            truncated=self._is_over() and not terminated,
            info=info | self._more_info(),
            state=self.board,
        )

    def close(self) -> None:
        """End the episode."""
        self.steps_left = 0

    def solve(self) -> list[str]:
        """The fewest actions that win from here, one by one; empty if no actions win in the steps that are left."""
        way = [] if self._is_over() else self._shortest_way()
        return [ACTIONS[direction] for direction in way] if len(way) <= self.steps_left else []

    def demonstration(self, seed: int, *, answer: str = "<answer>{action}</answer>") -> list[Message]:
        """The conversation of an episode played well: rules, board, what to say, next board, …, what to say last.

        What is said is `answer` with the turn's actions in the place of `{action}`. Starts an episode of its own.
        """
        conversation = list(self.reset(seed))
        while not self._is_over():
            said = ", ".join(self._advice()[: self._actions_per_turn])
            conversation.append({"role": "assistant", "content": answer.replace("{action}", said)})
            conversation += self.step(said).messages
        return conversation

    @property
    def look(self) -> Mapping[str, str]:
        """How the rules call what each kind of cell looks like."""
        if self._cell_pixels is None:
            return self._symbols
        from reroll_zoo.games.picture import LOOKS  # Here, or every config would load Pillow.

        return LOOKS

    def _board_message(self) -> Message:
        if self._cell_pixels is None:
            return {"role": "user", "content": self.board}
        from reroll_zoo.games.picture import draw_board
        from reroll_zoo.vision.parts import message

        kinds = {symbol: kind for kind, symbol in self._symbols.items()}
        return message("user", draw_board(self.board, kinds, cell_pixels=self._cell_pixels))

    def _is_over(self) -> bool:
        return self.steps_left == 0 or self.won or self.lost

    @property
    @abstractmethod
    def rules(self) -> str:
        """What the game is about, and the legend of the board."""

    @property
    @abstractmethod
    def board(self) -> str:
        """One line a row, one symbol a cell."""

    @property
    @abstractmethod
    def won(self) -> bool:
        """The aim is reached."""

    @property
    def lost(self) -> bool:
        """The episode has ended without it."""
        return False

    @abstractmethod
    def _begin(self, rng: random.Random) -> None:
        """Draw an instance that can be won."""

    @abstractmethod
    def _act(self, direction: int) -> tuple[float, bool]:
        """Do one action; its reward, and whether it changed anything."""

    @abstractmethod
    def _shortest_way(self) -> list[int]:
        """The fewest moves that win from here, however many steps are left; empty if none do."""

    def _advice(self) -> list[str]:
        """What a demonstration does next: at least one action."""
        return self.solve()

    def _more_info(self) -> dict[str, float]:
        return {}
