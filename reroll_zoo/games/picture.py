"""Boards as pictures."""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image, ImageDraw

LOOKS = {
    "player": "the red disc",
    "ice": "light blue",
    "hole": "a dark disc",
    "goal": "a green flag",
    "wall": "dark grey",
    "floor": "light grey",
    "target": "a pink diamond",
    "box": "a brown square",
    "box_on_target": "a brown square with a pink diamond in it",
    "player_on_target": "the red disc with a pink diamond in it",
}
"""What each kind of cell looks like, in the words of the rules."""

_ICE, _FLOOR, _WALL = (200, 228, 245), (222, 222, 222), (70, 70, 70)
_RED, _DARK, _GREEN, _PINK, _BROWN = (220, 40, 30), (20, 30, 80), (20, 150, 60), (250, 90, 190), (140, 85, 35)


def draw_board(board: str, kinds: Mapping[str, str], *, cell_pixels: int) -> Image.Image:
    """The picture of a board of lines of symbols. `kinds` says what each symbol is."""
    rows = [[kinds[symbol] for symbol in line.split(" ")] for line in board.split("\n")]
    on_ice = "ice" in kinds.values()
    picture = Image.new("RGB", (len(rows[0]) * cell_pixels, len(rows) * cell_pixels), _ICE if on_ice else _FLOOR)
    pen = ImageDraw.Draw(picture)
    for row, line in enumerate(rows):
        for column, kind in enumerate(line):
            _draw_cell(pen, kind, column * cell_pixels, row * cell_pixels, cell_pixels)
    return picture


def _draw_cell(pen: ImageDraw.ImageDraw, kind: str, left: int, top: int, size: int) -> None:
    def at(*shares: float) -> list[float]:
        """Places in the cell, by their share of its size: x, y, x, y, …"""
        return [(left, top)[place % 2] + share * (size - 1) for place, share in enumerate(shares)]

    if kind == "wall":
        pen.rectangle(at(0, 0, 1, 1), fill=_WALL)
    elif kind == "hole":
        pen.ellipse(at(0.1, 0.1, 0.9, 0.9), fill=_DARK)
    elif kind == "goal":
        pen.polygon(at(0.2, 0.05, 0.95, 0.3, 0.35, 0.55, 0.35, 0.95, 0.2, 0.95), fill=_GREEN)
    elif kind.startswith("player"):
        pen.ellipse(at(0.1, 0.1, 0.9, 0.9), fill=_RED)
    elif kind.startswith("box"):
        pen.rectangle(at(0.1, 0.1, 0.9, 0.9), fill=_BROWN)
    if kind.endswith("target"):
        pen.polygon(at(0.5, 0.25, 0.75, 0.5, 0.5, 0.75, 0.25, 0.5), fill=_PINK)
