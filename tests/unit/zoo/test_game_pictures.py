"""Games on a grid shown as pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reroll.envs.make import make_env
from reroll.types import Message
from reroll_zoo.games.frozen_lake import FrozenLake, FrozenLakeConfig, FrozenLakeSymbolsConfig
from reroll_zoo.games.picture import LOOKS, draw_board
from reroll_zoo.games.sokoban import Sokoban, SokobanConfig, SokobanSymbolsConfig
from reroll_zoo.vision.parts import opened
from reroll_zoo.vision.store import MARK, PICTURES


def pixels(message: Message) -> np.ndarray[Any, Any]:
    (image,) = message["images"]
    return np.asarray(opened(PICTURES.find(PICTURES.read(image))))


def cells(picture: np.ndarray[Any, Any], size: int) -> list[list[bytes]]:
    rows, columns = (side // size for side in picture.shape[:2])
    return [
        [picture[row * size : (row + 1) * size, column * size : (column + 1) * size].tobytes() for column in range(columns)]
        for row in range(rows)
    ]


@pytest.mark.parametrize("symbols", [FrozenLakeSymbolsConfig(), SokobanSymbolsConfig()], ids=["lake", "room"])
@pytest.mark.parametrize("size", [6, 9, 16])
def test_every_kind_of_cell_looks_like_no_other(symbols: Any, size: int) -> None:
    drawn = {symbol: kind for kind, symbol in symbols.model_dump().items()}
    assert set(drawn.values()) <= set(LOOKS)
    picture = np.asarray(draw_board(" ".join(drawn), drawn, cell_pixels=size))
    assert len(set(cells(picture, size)[0])) == len(drawn)


@pytest.mark.parametrize("kind", [FrozenLakeConfig, SokobanConfig])
def test_a_picture_shows_what_the_board_tells(kind: Any) -> None:
    game = make_env(kind(shown="picture", cell_pixels=8))
    assert isinstance(game, FrozenLake | Sokoban)
    looks: dict[str, bytes] = {}
    for seed in range(10):
        messages = game.reset(seed)
        assert messages[-1]["content"] == MARK
        board = [line.split(" ") for line in game.board.splitlines()]
        for line, drawn in zip(board, cells(pixels(messages[-1]), 8), strict=True):
            for symbol, look in zip(line, drawn, strict=True):
                assert looks.setdefault(symbol, look) == look
    assert len(set(looks.values())) == len(looks) >= 4


def test_the_rules_name_what_is_seen() -> None:
    for shown, player in (("picture", "the red disc"), ("text", "P")):
        for game in (FrozenLake(FrozenLakeConfig(shown=shown)), Sokoban(SokobanConfig(shown=shown))):
            assert f"{player} is you" in game.reset(0)[0]["content"]


def test_a_step_shows_the_next_picture_and_a_demonstration_has_them_all() -> None:
    game = FrozenLake(FrozenLakeConfig(shown="picture", rules=False))
    talk = game.demonstration(3)
    shown = [message["images"][0] for message in talk if message["role"] == "user"]
    assert len(shown) == len(set(shown)) == len(talk) // 2
    assert all("images" not in message for message in talk if message["role"] == "assistant")
    game.reset(3)
    outcome = game.step(talk[1]["content"].removeprefix("<answer>").removesuffix("</answer>"))
    assert outcome.messages[0]["images"] == [shown[1]]
    assert outcome.state == game.board, "turns are grouped by what is there, not by its pixels"
