"""FrozenLake: cross the ice to the goal and fall into no hole. Every lake can be crossed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from reroll_zoo.games.grid import ACTIONS, STEPS, Cell, GridGame, GridGameConfig, Symbol, SymbolsConfig


class FrozenLakeSymbolsConfig(SymbolsConfig):
    """How the lake is drawn."""

    player: Symbol = "P"
    ice: Symbol = "_"
    hole: Symbol = "O"
    goal: Symbol = "G"


class FrozenLakeConfig(GridGameConfig):
    """Cross the ice to the goal and fall into no hole. The goal pays 1 and ends the episode, a hole ends it with nothing."""

    runs: ClassVar[str] = "reroll_zoo.games.frozen_lake:FrozenLake"

    kind: Literal["frozen_lake"] = "frozen_lake"
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
    symbols: FrozenLakeSymbolsConfig = Field(default_factory=FrozenLakeSymbolsConfig)

    @model_validator(mode="after")
    def _holes_fit(self) -> Self:
        most = self.size**2 - 2
        if self.num_holes is not None and self.num_holes > most:
            raise ValueError(
                f"num_holes {self.num_holes} leaves no room for start and goal on {self.size}×{self.size} cells: "
                f"set it to at most {most}"
            )
        return self


class FrozenLake(GridGame):
    """Cross the ice to the goal and fall into no hole.

    On slippery ice the slips of an episode are drawn with its map: step n slips alike whatever is done.
    """

    def __init__(self, options: FrozenLakeConfig) -> None:
        self.options = options
        super().__init__(options)

    @property
    def rules(self) -> str:
        look = self.look
        text = (
            f"You cross a frozen lake: {look['player']} is you, {look['ice']} ice, {look['hole']} a hole, {look['goal']} the "
            f"goal. Reach {look['goal']}. If you enter {look['hole']}, you lose. At the edge you stay where you are."
        )
        if self.options.slippery:
            text += " The ice is slippery: two times in three you move to one side of the direction you chose."
        return text

    @property
    def board(self) -> str:
        symbols = self.options.symbols
        drawn = dict.fromkeys(self.holes, symbols.hole) | {self.goal: symbols.goal, self.player: symbols.player}
        size = range(self.options.size)
        return "\n".join(" ".join(drawn.get((row, column), symbols.ice) for column in size) for row in size)

    @property
    def won(self) -> bool:
        return self.player == self.goal

    @property
    def lost(self) -> bool:
        return self.player in self.holes

    def solve(self) -> list[str]:
        """The fewest actions that win from here; empty if none do. On slippery ice they allow for the slips to come."""
        slips = self._slips[-self.steps_left :]
        return [ACTIONS[(ACTIONS.index(move) - slip) % 4] for move, slip in zip(super().solve(), slips, strict=False)]

    def _begin(self, rng: random.Random) -> None:
        options = self.options
        self.player, self.goal, self.holes = _draw_lake(rng, options)
        while len(self._shortest_way()) > options.max_steps:
            self.player, self.goal, self.holes = _draw_lake(rng, options)
        self._slips = [rng.choice((-1, 0, 1)) if options.slippery else 0 for _ in range(options.max_steps)]
        self._chances: list[dict[Cell, float]] = [{self.goal: 1.0}]
        """Entry n: from each cell, the best chance of reaching the goal in n steps. Filled as far as demonstrations ask."""

    def _act(self, direction: int) -> tuple[float, bool]:
        before = self.player
        self.player = _beside(before, direction + self._slips[-self.steps_left], size=self.options.size)
        return float(self.won) - self.options.step_penalty, self.player != before

    def _shortest_way(self) -> list[int]:
        return _shortest_way(self.player, self.goal, size=self.options.size, holes=self.holes)

    def _advice(self) -> list[str]:
        # To copy someone who knows the slips to come would teach nothing: play the best odds, which may lose.
        return [self._best_odds()] if self.options.slippery else self.solve()

    def _best_odds(self) -> str:
        """The action most likely to win in the steps left, given the three ways each may go."""
        size = self.options.size
        ice = [cell for cell in _cells(size) if cell not in self.holes]
        while len(self._chances) < self.steps_left:
            later = self._chances[-1]
            self._chances.append({cell: max(_odds(cell, later, size=size)) for cell in ice} | {self.goal: 1.0})
        odds = _odds(self.player, self._chances[self.steps_left - 1], size=size)
        return ACTIONS[odds.index(max(odds))]


def _cells(size: int) -> list[Cell]:
    return [(row, column) for row in range(size) for column in range(size)]


def _beside(cell: Cell, direction: int, *, size: int) -> Cell:
    """The next cell in that direction; the same one at the edge."""
    down, right = STEPS[direction % 4]
    row, column = cell[0] + down, cell[1] + right
    return (row, column) if 0 <= row < size and 0 <= column < size else cell


def _odds(cell: Cell, chances: Mapping[Cell, float], *, size: int) -> list[float]:
    """For each action on slippery ice, the chance of winning if `chances` are those of the cells it may lead to."""
    beside = [chances.get(_beside(cell, direction, size=size), 0.0) for direction in range(4)]
    return [(beside[aim - 1] + beside[aim] + beside[(aim + 1) % 4]) / 3 for aim in range(4)]


def _draw_lake(rng: random.Random, options: FrozenLakeConfig) -> tuple[Cell, Cell, frozenset[Cell]]:
    """Start, goal and holes. Holes come one by one, in random places that leave a way from start to goal."""
    while True:
        cells = _cells(options.size)
        rng.shuffle(cells)
        start, goal, *others = cells
        num_holes = options.num_holes
        if num_holes is None:
            num_holes = sum(rng.random() < options.hole_probability for _ in others)
        holes: set[Cell] = set()
        for cell in others:
            if len(holes) < num_holes and _shortest_way(start, goal, size=options.size, holes=holes | {cell}):
                holes.add(cell)
        # Start and goal side by side leave room for any number, so this ends.
        if options.num_holes in (None, len(holes)):
            return start, goal, frozenset(holes)


def _shortest_way(start: Cell, goal: Cell, *, size: int, holes: Collection[Cell]) -> list[int]:
    """Directions from start to goal around the holes, by breadth-first search; empty if there is no way."""
    ways: dict[Cell, list[int]] = {start: []}
    queue = deque([start])
    while queue and goal not in ways:
        cell = queue.popleft()
        for direction in range(4):
            beside = _beside(cell, direction, size=size)
            if beside not in ways and beside not in holes:
                ways[beside] = [*ways[cell], direction]
                queue.append(beside)
    return ways.get(goal, [])
