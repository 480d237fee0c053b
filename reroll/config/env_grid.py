"""The bundled games on a grid: their options, which are also the keyword arguments of their classes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from reroll.config.base import Node

Symbol = Annotated[str, Field(pattern=r"^\S$")]
"""How a cell is drawn: one visible character."""


class Symbols(Node):
    """One character for each kind of cell, no two alike."""

    @model_validator(mode="after")
    def _all_different(self) -> Self:
        drawn = self.model_dump()
        if len(set(drawn.values())) < len(drawn):
            listed = ", ".join(f"{cell} {symbol}" for cell, symbol in drawn.items())
            raise ValueError(f"two kinds of cell look alike ({listed}): give each a character of its own")
        return self


class FrozenLakeSymbols(Symbols):
    """How the lake is drawn."""

    player: Symbol = "P"
    ice: Symbol = "_"
    hole: Symbol = "O"
    goal: Symbol = "G"


class SokobanSymbols(Symbols):
    """How the room is drawn. A model whose tokenizer knows ASCII alone needs another `box_on_target`."""

    wall: Symbol = "#"
    floor: Symbol = "_"
    target: Symbol = "O"
    box: Symbol = "X"
    box_on_target: Symbol = "√"
    player: Symbol = "P"
    player_on_target: Symbol = "S"


class GridGameOptions(Node):
    """What all games on a grid share."""

    max_steps: int = Field(default=20, ge=1)
    """Actions until the episode is cut. Every instance can be won within them."""
    actions_per_turn: int = Field(default=1, ge=1)
    """How many actions one answer may hold, separated by commas or line breaks."""
    rules: bool = True
    """Say the rules first. Small models that were warmed up on demonstrations do without."""


class FrozenLakeEnv(GridGameOptions):
    """Cross the ice to the goal and fall into no hole. The goal pays 1 and ends the episode, a hole ends it with nothing."""

    kind: Literal["frozen_lake"]
    size: int = Field(default=4, ge=2)
    """Rows, and columns."""
    hole_probability: float = Field(default=0.2, ge=0, le=1)
    """Chance of a hole, for each cell but start and goal; fewer where more would cut the way to the goal."""
    num_holes: int | None = Field(default=None, ge=0)
    """Exactly so many holes instead."""
    slippery: bool = False
    """A move goes where it is meant to, or to the one or other side of that direction: each one time in three."""
    step_penalty: float = Field(default=0.0, ge=0)
    """What every action costs."""
    symbols: FrozenLakeSymbols = Field(default_factory=FrozenLakeSymbols)

    @model_validator(mode="after")
    def _holes_fit(self) -> Self:
        most = self.size**2 - 2
        if self.num_holes is not None and self.num_holes > most:
            raise ValueError(
                f"num_holes {self.num_holes} leaves no room for start and goal on {self.size}×{self.size} cells: "
                f"set it to at most {most}"
            )
        return self


class SokobanEnv(GridGameOptions):
    """Push every box onto a target. The rewards are gym-sokoban's.

    The defaults are the simple game; a larger one is `{rows: 8, columns: 8, num_boxes: 2, search_depth: 20, max_steps: 30}`.
    """

    kind: Literal["sokoban"]
    rows: int = Field(default=6, ge=3)
    """Counts the wall around the room."""
    columns: int = Field(default=6, ge=3)
    """Counts the wall around the room."""
    num_boxes: int = Field(default=1, ge=1)
    search_depth: int = Field(default=12, ge=1)
    """How many moves a room is played backwards from its solution: no shortest solution is longer."""
    min_solution: int = Field(default=2, ge=1)
    """No shortest solution is shorter, in moves."""
    step_penalty: float = Field(default=0.1, ge=0)
    """What every action costs."""
    box_on_reward: float = Field(default=1.0, ge=0)
    """For a box that comes onto a target."""
    box_off_penalty: float = Field(default=1.0, ge=0)
    """For a box that leaves the targets."""
    solved_reward: float = Field(default=10.0, ge=0)
    """For the last box, on top of its own reward."""
    symbols: SokobanSymbols = Field(default_factory=SokobanSymbols)

    @model_validator(mode="after")
    def _solutions_fit(self) -> Self:
        if self.search_depth > self.max_steps:
            raise ValueError(
                f"a solution of search_depth {self.search_depth} moves does not fit into max_steps {self.max_steps}: "
                "lower the first or raise the second"
            )
        if self.min_solution > self.search_depth:
            raise ValueError(
                f"min_solution {self.min_solution} is more than search_depth {self.search_depth}, the longest solution made: "
                "lower the first or raise the second"
            )
        return self
