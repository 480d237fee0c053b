"""How an answer is put together: lists, sets, tuples, intervals and unions; names before `=`; units behind a value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_OPEN, _CLOSE = "([{", ")]}"
_WORD_SEPARATOR = re.compile(r"\s*(?:,\s*)?\b(?:and|or)\b\s*", re.IGNORECASE)
_NAME = r"(?:\\?[A-Za-z]+'?|\\?[A-Za-z]+\s*_\s*(?:\w|\{\s*\w+\s*\}))"
_NAMED = re.compile(
    rf"(?P<name>{_NAME}(?:\s*\([^()=]*\))?|\(\s*{_NAME}(?:\s*,\s*{_NAME})+\s*\))\s*(?:=|\\in(?![a-z]))\s*(?P<value>.+)",
    re.DOTALL,
)
_BASE = re.compile(r"(?P<value>-?[\dA-F.]+)\s*_\s*\{?\s*(?P<base>\d+|[a-z]+)\s*\}?")
_UNIT = re.compile(
    r"(?P<value>.*(?:[\d})]|\\pi))\s*(?P<unit>(?<=[\s\d})])(?:(?:square|cubic|sq\.?|cu\.?)\s+)?"
    r"[A-Za-z]+(?:[\s/.-]+[A-Za-z]+\.?)*\.?\s*(?:\^\s*\{?\s*[23]\s*\}?)?)",
    re.DOTALL,
)
_UNIT_NAMES = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre", "km": "km kilometer kilometre",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile", "km/h": "km/h kmh kph", "mph": "mph",
    "m/s": "m/s", "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "lb": "lb pound", "ml": "ml milliliter millilitre",
    "l": "l liter litre", "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week",
    "month": "month", "year": "year yr", "am": "am", "pm": "pm", "degree": "degree deg", "radian": "radian rad",
    "dollar": "dollar usd", "cent": "cent", "unit": "unit",
}  # fmt: skip
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
    "sixteen": "16",
}
_COLUMN = re.compile(r"\\begin\{[pbvBV]?matrix\}(?P<entries>[^&]*)\\end\{[pbvBV]?matrix\}")
_INEQUALITY = re.compile(r"[<>]|\\[lg]eq(?![A-Za-z])")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_NOUN = re.compile(r"[A-Za-z]{3,}(?:[\s/-]+[A-Za-z]+)*\.?")
_UNITS = {alias: unit for unit, aliases in _UNIT_NAMES.items() for alias in aliases.split()}


@dataclass(frozen=True, slots=True)
class Listing:
    """Several values in one answer."""

    kind: Literal["bare", "set", "bracketed"]
    items: tuple[str, ...]
    ends: str = ""
    """The brackets of a bracketed one: `[)` is half open."""


def read_listing(text: str) -> Listing | None:
    """The values an answer lists; None if it is one value. Redundant brackets around one value are none of its own."""
    if r"\begin" in text:
        return None
    for opening, closing in ((r"\{", r"\}"), (r"\langle", r"\rangle")):
        if text.startswith(opening) and text.endswith(closing) and _first_closes_last(text):
            inner = text[len(opening) : -len(closing)]
            kind: Literal["set", "bracketed"] = "set" if opening == r"\{" else "bracketed"
            return Listing(kind, tuple(_split(inner)), "" if kind == "set" else "()")
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _first_closes_last(text):
        items = _split(text[1:-1])
        return Listing("bracketed", tuple(items), text[0] + text[-1]) if len(items) > 1 else None
    items = _split(text)
    if len(items) > 1:
        return Listing("bare", tuple(items))
    if text.count(":") > 1:
        return Listing("bracketed", tuple(text.split(":")), "::")
    if text.count(r"\pm") == 1 and r"\in" not in text:
        before, _, after = text.partition(r"\pm")
        return Listing("bare", (f"{before}+{after}".lstrip("+"), f"{before}-{after}"))
    return None


def read_column(text: str) -> Listing | None:
    """The entries of a column vector, as a tuple; None if it is anything else."""
    match = _COLUMN.fullmatch(text)
    if match is None:
        return None
    return Listing("bracketed", tuple(entry.strip() for entry in match["entries"].split(r"\\") if entry.strip()), "()")


def read_alternatives(text: str) -> list[str] | None:
    r"""The parts of `A \cup B`, or of `x < 1 or x > 2`; None if it is neither."""
    parts = [part.strip() for part in _split_at(text.replace(r"\cup", "\0"), "\0")]
    if len(parts) == 1:
        parts = [part if _INEQUALITY.search(part) else "" for part in _split(text)]
    return parts if len(parts) > 1 and all(parts) else None


def without_brackets(text: str) -> str:
    """`(3)` is 3."""
    while text[:1] + text[-1:] in ("()", "[]", "{}") and _first_closes_last(text) and len(_split(text[1:-1])) == 1:
        text = text[1:-1].strip()
    return text


def split_name(text: str) -> tuple[str, str]:
    """`x` and `3` of `x = 3`; the name is empty where there is none. Of a chain of equations the last side counts."""
    match = _NAMED.fullmatch(text)
    if match is None:
        return "", text
    return re.sub(r"\s+", "", match["name"]), match["value"].rpartition("=")[2].strip()


def split_unit(text: str) -> tuple[str, str]:
    """`10` and `cm` of `10 cm`; the unit is empty where there is none, and for words that measure nothing (`5 apples`)."""
    if base := _BASE.fullmatch(text):
        return base["value"], f"base {_BASES.get(base['base'], base['base'])}"
    match = _UNIT.fullmatch(text)
    if match is None or re.search(r"\b(?:and|or|not|but)\b|\\(?:sin|cos|tan)(?![a-z])", text):
        return text, ""
    value, unit = match["value"], match["unit"].strip()
    measured = _measured(unit)
    has_gap = text[len(value)] == " "
    if len(unit) == 1:  # Behind a gap, and of a number: in `x + 3 m` it is a variable.
        is_unit = measured is not None and has_gap and not _LETTER.search(value)
    else:
        is_unit = measured is not None or (has_gap and _NOUN.fullmatch(unit) is not None)
    if not is_unit:
        return text, ""
    return value.strip(), "" if measured in (None, "unit") else str(measured)


def in_radians(value: str, unit: str) -> str:
    """An angle without its unit: `30` degrees as a multiple of pi."""
    return rf"({value}) \cdot \frac{{\pi}}{{180}}" if unit == "degree" else value


def _measured(unit: str) -> str | None:
    """The unit under the name we use for it, with its power: `cm2` for `square centimeters`. None: not one we know."""
    text = unit.casefold().replace(".", "").strip()
    power = ""
    for prefix, exponent in (("square ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if text.startswith(prefix):
            text, power = text.removeprefix(prefix), exponent
    if raised := re.search(r"\s*\^\s*\{?\s*([23])\s*\}?$", text):
        text, power = text[: raised.start()], raised[1]
    text = text.replace(" per ", "/").replace(" ", "")
    name = _UNITS.get(text) or _UNITS.get(text.removesuffix("s"))
    return None if name is None else name if name == "unit" else name + power


def _first_closes_last(text: str) -> bool:
    """Whether the bracket a text begins with is the one it ends with."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0 and character in _CLOSE:
            return index == len(text) - 1
    return text.startswith(r"\langle") and depth == 0


def _split(text: str) -> list[str]:
    """The items of a list without its brackets."""
    text = _WORD_SEPARATOR.sub(", ", text) if _WORD_SEPARATOR.search(text) else text
    return [item.strip() for item in _split_at(text.replace(";", ","), ",") if item.strip()]


def _split_at(text: str, separator: str) -> list[str]:
    """The text cut at separators that stand in no bracket."""
    items, depth = [""], 0
    for character in text:
        depth += (character in _OPEN) - (character in _CLOSE)
        if character == separator and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items
