"""Sokoban: push every box onto a target. Rooms are made by playing backwards from their solution, so all can be solved.

A cell is a number, row × columns + column. The wall around the room keeps sums of a floor cell and a direction inside.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from reroll.errors import EnvError
from reroll_zoo.games.grid import STEPS, GridGame, GridGameConfig, Symbol, SymbolsConfig

State = tuple[int, frozenset[int]]
"""The cell of the player, and those of the boxes."""

_MAX_ROOMS_TRIED = 300
_MAX_STATES = 30_000
"""How many states of a room are looked at: all of a small one, the nearest to the solution of a large one."""


class SokobanSymbolsConfig(SymbolsConfig):
    """How the room is drawn. A model whose tokenizer knows ASCII alone needs another `box_on_target`."""

    wall: Symbol = "#"
    floor: Symbol = "_"
    target: Symbol = "O"
    box: Symbol = "X"
    box_on_target: Symbol = "√"
    player: Symbol = "P"
    player_on_target: Symbol = "S"


class SokobanConfig(GridGameConfig):
    """Push every box onto a target. The rewards are gym-sokoban's.

    The defaults are the simple game; a larger one is `{rows: 8, columns: 8, num_boxes: 2, search_depth: 20, max_steps: 30}`.
    """

    runs: ClassVar[str] = "reroll_zoo.games.sokoban:Sokoban"

    kind: Literal["sokoban"] = "sokoban"
    rows: int = Field(default=6, ge=3)
    """Counts the wall around the room."""
    columns: int = Field(default=6, ge=3)
    """Counts the wall around the room."""
    num_boxes: int = Field(default=1, ge=1)
    """Boxes in a room, and targets for them."""
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
    symbols: SokobanSymbolsConfig = Field(default_factory=SokobanSymbolsConfig)

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


class Sokoban(GridGame):
    """Push every box onto a target.

    `info` also tells `dead`: 1 when some box stands where no pushes can bring it to a target, so that all is lost.
    """

    def __init__(self, options: SokobanConfig) -> None:
        self.options = options
        super().__init__(options)

    @property
    def rules(self) -> str:
        look = self.look
        return (
            f"You push boxes onto targets: {look['player']} is you, {look['player_on_target']} you on a target, {look['box']} "
            f"a box, {look['box_on_target']} a box on a target, {look['target']} a target, {look['wall']} wall, "
            f"{look['floor']} floor. Move into a box to "
            "push it, if the cell behind it is free. You cannot pull. Bring every box onto a target."
        )

    @property
    def board(self) -> str:
        s, (player, boxes), targets = self.options.symbols, self._state, self._room.targets
        drawn = dict.fromkeys(self._room.floor, s.floor) | dict.fromkeys(targets, s.target)
        drawn |= {box: s.box_on_target if box in targets else s.box for box in boxes}
        drawn[player] = s.player_on_target if player in targets else s.player
        width = self.options.columns
        lines = (range(row * width, (row + 1) * width) for row in range(self.options.rows))
        return "\n".join(" ".join(drawn.get(cell, s.wall) for cell in line) for line in lines)

    @property
    def won(self) -> bool:
        return self._state[1] == self._room.targets

    def _begin(self, rng: random.Random) -> None:
        self._room, self._state = draw_room(rng, self.options)

    def _act(self, direction: int) -> tuple[float, bool]:
        options, before = self.options, self._state
        self._state = self._room.after(before, direction) or before
        gained = len(self._state[1] & self._room.targets) - len(before[1] & self._room.targets)
        reward = gained * (options.box_on_reward if gained > 0 else options.box_off_penalty)
        return reward + options.solved_reward * self.won - options.step_penalty, self._state != before

    def _shortest_way(self) -> list[int]:
        return self._room.solution(self._state)

    def _more_info(self) -> dict[str, float]:
        return {"dead": float(any(box not in self._room.pushes_needed for box in self._state[1]))}


class Room:
    """The part of a game that does not move, and the rules that follow from it."""

    def __init__(self, *, columns: int, floor: frozenset[int], targets: frozenset[int]) -> None:
        self.floor = floor
        """All that is no wall: targets too."""
        self.targets = targets
        self.directions = (-columns, 1, columns, -1)
        """What to add to a cell for each of ACTIONS."""
        self.pushes_needed = self._count_pushes()
        """The fewest pushes that bring a box from a cell to a target if no other box is in the way and the player gets
        anywhere. Cells from which none do are left out: a box there is lost."""

    def after(self, state: State, direction: int) -> State | None:
        """The state that a move leads to; None if something is in the way."""
        player, boxes = state
        ahead = player + self.directions[direction]
        if ahead not in self.floor:
            return None
        if ahead not in boxes:
            return ahead, boxes
        behind = ahead + self.directions[direction]
        if behind not in self.floor or behind in boxes:
            return None
        return ahead, boxes - {ahead} | {behind}

    def solution(self, start: State) -> list[int]:
        """The fewest moves that solve the room, by A* over (player, boxes); empty if it is solved or cannot be."""
        # A way is never shorter than the pushes its boxes need, and a move lowers those by one at most: A* is exact.
        frontier: list[tuple[float, int, State, list[int]]] = [(self._at_least(start), 0, start, [])]
        order = itertools.count(-1, -1)
        done: set[State] = set()
        while frontier:
            _, _, state, way = heapq.heappop(frontier)
            if state[1] == self.targets:
                return way
            if state in done:
                continue
            done.add(state)
            for direction in range(4):
                after = self.after(state, direction)
                if after is not None and after not in done and (at_least := self._at_least(after)) < math.inf:
                    heapq.heappush(frontier, (len(way) + 1 + at_least, next(order), after, [*way, direction]))
        return []

    def distances(self, *, at_most: int) -> dict[State, int]:
        """The states that can be solved in `at_most` moves, each with the fewest that do: the game played backwards."""
        found: dict[State, int] = {(player, self.targets): 0 for player in sorted(self.floor - self.targets)}
        queue = deque(found)
        while queue and len(found) < _MAX_STATES:
            state = queue.popleft()
            if found[state] == at_most:
                break
            for earlier in self._before(state):
                if earlier not in found:
                    found[earlier] = found[state] + 1
                    queue.append(earlier)
        return found

    def _before(self, state: State) -> Iterator[State]:
        """The states that one move turns into this one: the player steps back, and may have pushed the box ahead."""
        player, boxes = state
        for step in self.directions:
            back, ahead = player - step, player + step
            if back in self.floor and back not in boxes:
                yield back, boxes
                if ahead in boxes:
                    yield back, boxes - {ahead} | {player}

    def _at_least(self, state: State) -> float:
        """A lower bound on the moves left; infinite if a box is lost."""
        return sum(self.pushes_needed.get(box, math.inf) for box in state[1])

    def _count_pushes(self) -> dict[int, int]:
        needed = dict.fromkeys(sorted(self.targets), 0)
        queue = deque(needed)
        while queue:
            box = queue.popleft()
            for step in self.directions:
                earlier, pusher = box - step, box - 2 * step
                if earlier in self.floor and pusher in self.floor and earlier not in needed:
                    needed[earlier] = needed[box] + 1
                    queue.append(earlier)
        return needed


def draw_room(rng: random.Random, options: SokobanConfig) -> tuple[Room, State]:
    """A room and where its game starts: no box on a target, and a shortest solution of a length that was asked for."""
    for _ in range(_MAX_ROOMS_TRIED):
        floor = _carve(rng, rows=options.rows, columns=options.columns)
        if len(floor) <= 2 * options.num_boxes:
            continue
        targets = frozenset(rng.sample(sorted(floor), options.num_boxes))
        room = Room(columns=options.columns, floor=floor, targets=targets)
        distances = room.distances(at_most=options.search_depth)
        starts = [state for state, moves in distances.items() if moves >= options.min_solution and targets.isdisjoint(state[1])]
        if starts:
            return room, rng.choice(starts)
    raise EnvError(
        f"{_MAX_ROOMS_TRIED} rooms of {options.rows}×{options.columns} with num_boxes {options.num_boxes} had no start "
        f"min_solution {options.min_solution} moves or more from its solution: lower one of the two, or enlarge the room"
    )


def _carve(rng: random.Random, *, rows: int, columns: int) -> frozenset[int]:
    """A connected floor of 60 to 90 % of what the outer wall holds: where someone walked who likes to go straight."""
    height, width = rows - 2, columns - 2
    num_cells = round(rng.uniform(0.6, 0.9) * height * width)
    row, column = rng.randrange(height), rng.randrange(width)
    down, right = rng.choice(STEPS)
    floor = {(row, column)}
    while len(floor) < num_cells:
        if rng.random() < 0.4:
            down, right = rng.choice(STEPS)
        row, column = min(max(row + down, 0), height - 1), min(max(column + right, 0), width - 1)
        floor.add((row, column))
    return frozenset((row + 1) * columns + column + 1 for row, column in floor)
