from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll_zoo.games.sokoban import Room, Sokoban, SokobanConfig, State, draw_room

LARGER: dict[str, Any] = {"rows": 8, "columns": 8, "num_boxes": 2, "search_depth": 20, "max_steps": 30}

GOLDEN_ROOM = """\
# # # # # #
# # # _ _ #
# _ # # O #
# _ # P X #
# _ _ _ _ #
# # # # # #"""

CORRIDOR = """\
# # # # # #
# P X _ O #
# # # # # #"""

TWO_BOXES = """\
# # # # # # #
# _ _ _ _ _ #
# P X O O _ #
# _ X _ _ _ #
# # # # # # #"""


def room(board: str, **options: Any) -> Sokoban:
    """A game that starts on this board."""
    rows = [line.split() for line in board.strip().splitlines()]
    columns = len(rows[0])
    cells = {row * columns + column: symbol for row, line in enumerate(rows) for column, symbol in enumerate(line)}

    def where(symbols: str) -> frozenset[int]:
        return frozenset(cell for cell, symbol in cells.items() if symbol in symbols)

    boxes = where("X√")
    game = Sokoban(
        SokobanConfig(
            rows=len(rows), columns=columns, num_boxes=len(boxes), **{"search_depth": 1, "min_solution": 1, **options}
        )
    )
    game._room = Room(columns=columns, floor=frozenset(cells) - where("#"), targets=where("O√S"))
    game._state = next(iter(where("PS"))), boxes
    game.steps_left = game.options.max_steps
    return game


def play(game: Sokoban, *actions: str) -> list[StepResult]:
    return [game.step(action) for action in actions]


def line(game: Sokoban, row: int = 1) -> str:
    return game.board.splitlines()[row]


def test_walking_into_a_box_pushes_it() -> None:
    game = room(CORRIDOR)
    outcome = game.step("Right")
    assert line(game) == "# _ P X O #"
    assert [message["content"] for message in outcome.messages] == [game.board]
    assert outcome.state == game.board
    assert outcome.info == {"effective": 1.0, "num_actions": 1.0, "success": 0.0, "dead": 0.0}


@pytest.mark.parametrize("action", ["Up", "Left", "Down"])
def test_walls_stop_the_player(action: str) -> None:
    game = room(CORRIDOR)
    outcome = game.step(action)
    assert game.board == CORRIDOR
    assert (outcome.reward, outcome.info["effective"]) == (-0.1, 0.0)


@pytest.mark.parametrize("row", ["# O P X # #", "# P X X O #", "# P X √ _ #"])
def test_a_box_before_a_wall_or_another_box_does_not_move(row: str) -> None:
    game = room(f"# # # # # #\n{row}\n# # # # # #")
    assert game.step("Right").info["effective"] == 0.0
    assert line(game) == row


def test_boxes_are_never_pulled() -> None:
    game = room("# # # # # #\n# _ P X O #\n# # # # # #")
    game.step("Left")
    assert line(game) == "# P _ X O #"


def test_the_last_box_on_its_target_ends_the_episode() -> None:
    _, last = play(room(CORRIDOR), "Right", "Right")
    assert (last.terminated, last.truncated, last.messages, last.info["success"]) == (True, False, (), 1.0)


def test_the_step_limit_truncates() -> None:
    first, last = play(room(CORRIDOR, max_steps=2), "Up", "Up")
    assert not first.truncated
    assert (last.terminated, last.truncated, last.messages, last.info["success"]) == (False, True, (), 0.0)


def test_the_player_shows_the_target_under_its_feet() -> None:
    game = room("# # # # # #\n# P O X _ #\n# # # # # #")
    game.step("Right")
    assert line(game) == "# _ S X _ #"


def test_a_turn_of_several_actions_stops_at_the_solution() -> None:
    outcome = room(CORRIDOR, actions_per_turn=4).step("Up, Right, Right, Left")
    assert outcome.reward == pytest.approx(-0.3 + 1 + 10)
    assert outcome.info == {"effective": pytest.approx(2 / 3), "num_actions": 3.0, "success": 1.0, "dead": 0.0}


@pytest.mark.parametrize("words", ["", "push", "Right Right", "Right, Right"])
def test_other_words_are_refused_and_change_nothing(words: str) -> None:
    game = room(CORRIDOR)
    with pytest.raises(InvalidAction, match="Up, Down, Left or Right"):
        game.step(words)
    assert (game.board, game.steps_left) == (CORRIDOR, 20)


def test_boxes_on_and_off_targets_pay_as_in_gym_sokoban() -> None:
    outcomes = play(room(TWO_BOXES), "Right", "Right", "Right")
    assert [outcome.reward for outcome in outcomes] == pytest.approx([0.9, -0.1, -1.1])


def test_the_last_box_also_pays_for_the_solution() -> None:
    assert [outcome.reward for outcome in play(room(CORRIDOR), "Right", "Right")] == pytest.approx([-0.1, 10.9])


def test_options_change_every_reward() -> None:
    paid = {"step_penalty": 0.5, "box_on_reward": 2.0, "box_off_penalty": 4.0, "solved_reward": 8.0}
    outcomes = play(room(TWO_BOXES, **paid), "Right", "Right", "Right")
    assert [outcome.reward for outcome in outcomes] == [1.5, -0.5, -4.5]
    assert play(room(CORRIDOR, **paid), "Right", "Right")[-1].reward == 9.5


@pytest.mark.parametrize(
    ("board", "dead"),
    [
        ("# # # # #\n# P X _ #\n# _ _ O #\n# # # # #", 1.0),  # pushed into a corner
        ("# # # # #\n# _ _ _ #\n# P X O #\n# # # # #", 0.0),  # pushed into the corner that is the target
    ],
)
def test_a_box_that_is_lost_makes_the_state_dead(board: str, dead: float) -> None:
    game = room(board)
    assert game.step("Right").info["dead"] == dead
    assert game.solve() == []


def test_the_solver_finds_the_shortest_way() -> None:
    assert room(CORRIDOR).solve() == ["Right", "Right"]
    assert room("# # # # #\n# _ _ _ #\n# O X P #\n# # # # #").solve() == ["Left"]
    around = room("# # # # #\n# _ _ _ #\n# P X _ #\n# O _ _ #\n# # # # #")
    assert around.solve() == ["Up", "Right", "Down", "Right", "Down", "Left"]


@pytest.mark.parametrize(("rows", "columns", "num_boxes", "seed"), [(6, 6, 1, 0), (6, 6, 1, 1), (5, 6, 2, 2), (6, 7, 2, 3)])
def test_forward_search_agrees_with_play_backwards_from_every_state(rows: int, columns: int, num_boxes: int, seed: int) -> None:
    options = SokobanConfig(rows=rows, columns=columns, num_boxes=num_boxes)
    drawn, _ = draw_room(random.Random(seed), options)
    distances = drawn.distances(at_most=10**6)
    states = reachable(drawn, starts=distances)
    random.Random(seed).shuffle(states)
    for state in states[:400]:
        assert len(drawn.solution(state)) == distances.get(state, 0)


def test_the_solver_gives_nothing_when_the_steps_left_do_not_suffice() -> None:
    game = room(CORRIDOR, max_steps=2)
    game.step("Up")
    assert game.solve() == []


def test_a_seed_gives_the_same_room_on_every_machine() -> None:
    assert Sokoban(SokobanConfig()).reset(7) == Sokoban(SokobanConfig()).reset(7)
    assert Sokoban(SokobanConfig()).reset(7)[1]["content"] == GOLDEN_ROOM


def test_seeds_give_different_rooms() -> None:
    game = Sokoban(SokobanConfig())
    assert len({game.reset(seed)[1]["content"] for seed in range(300)}) > 295


@pytest.mark.parametrize(("options", "num_seeds"), [({}, 150), (LARGER, 25)])
def test_the_solver_solves_every_room_within_the_bounds_asked_for(options: dict[str, Any], num_seeds: int) -> None:
    game = Sokoban(SokobanConfig(**options))
    for seed in range(num_seeds):
        game.reset(seed)
        assert "√" not in game.board
        actions = game.solve()
        assert game.options.min_solution <= len(actions) <= game.options.search_depth
        outcomes = play(game, *actions)
        assert outcomes[-1].info["success"] == 1.0
        assert not any(outcome.info["dead"] for outcome in outcomes)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**9), rows=st.integers(5, 7), columns=st.integers(5, 7), min_solution=st.integers(1, 5))
def test_a_room_is_walled_in_and_starts_with_every_box_off_target(seed: int, **options: int) -> None:
    game = Sokoban(SokobanConfig(**options))
    rows = [row.split() for row in game.reset(seed)[1]["content"].splitlines()]
    assert (len(rows), {len(row) for row in rows}) == (options["rows"], {options["columns"]})
    border = [*rows[0], *rows[-1], *(row[0] for row in rows), *(row[-1] for row in rows)]
    assert set(border) == {"#"}
    cells = [cell for row in rows for cell in row]
    assert (cells.count("X"), cells.count("√"), cells.count("O") + cells.count("S")) == (1, 0, 1)
    assert len(game.solve()) >= options["min_solution"]


def test_random_play_seldom_solves_a_room() -> None:
    rng, game, num_solved = random.Random(0), Sokoban(SokobanConfig()), 0
    for seed in range(200):
        game.reset(seed)
        while game.steps_left and not game.won:
            game.step(rng.choice(["Up", "Down", "Left", "Right"]))
        num_solved += game.won
    assert 0 < num_solved < 100


def test_a_room_that_cannot_be_made_is_an_error_with_the_fix() -> None:
    with pytest.raises(EnvError, match="enlarge the room"):
        Sokoban(SokobanConfig(rows=4, columns=4)).reset(0)


def test_the_rules_tell_the_legend_the_grammar_and_the_limit() -> None:
    rules = Sokoban(SokobanConfig()).reset(0)[0]["content"]
    for words in ("P is you", "X a box", "√ a box on a target", "O a target", "# wall", "_ floor", "at most 20 actions"):
        assert words in rules
    assert "Up, Down, Left or Right" in rules


def test_symbols_change_the_board_and_the_legend_alone() -> None:
    names = {
        "wall": "w",
        "floor": ".",
        "target": "t",
        "box": "b",
        "box_on_target": "+",
        "player": "@",
        "player_on_target": "*",
    }
    rules, board = (message["content"] for message in Sokoban(SokobanConfig(symbols=names)).reset(7))
    assert board.translate(str.maketrans("w.tb+@*", "#_OX√PS")) == GOLDEN_ROOM
    assert "@ is you, * you on a target, b a box, + a box on a target, t a target, w wall, . floor" in rules


def test_a_demonstration_is_the_solvers_game() -> None:
    game = Sokoban(SokobanConfig())
    game.reset(7)
    actions = game.solve()
    conversation = game.demonstration(7)
    assert game.won
    assert [message["content"] for message in conversation[2::2]] == [f"<answer>{action}</answer>" for action in actions]
    assert [message["role"] for message in conversation] == ["system", *["user", "assistant"] * len(actions)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_steps": 5}, "does not fit into max_steps 5"),
        ({"min_solution": 13}, "min_solution 13 is more than search_depth 12"),
        ({"num_boxes": 0}, "greater than or equal to 1"),
        ({"symbols": {"box": "O"}}, "look alike"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_reason(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Sokoban(SokobanConfig(**options))


def reachable(drawn: Room, *, starts: Iterable[State]) -> list[State]:
    """All states that moves lead to from these, lost ones too."""
    found = dict.fromkeys(starts)
    frontier = list(found)
    while frontier:
        state = frontier.pop()
        for direction in range(4):
            after = drawn.after(state, direction)
            if after is not None and after not in found:
                found[after] = None
                frontier.append(after)
    return list(found)
