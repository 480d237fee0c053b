r"""Numbers as people write them, read exactly: `1,234.5`, `2 1/3`, `-\frac{3}{4}`, `6.02 \times 10^{23}`, `0.\overline{3}`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)?(?:\.\d*)?(?:\\overline\{\d{1,40}\})?"
_NUMBER = re.compile(
    rf"(?P<signs>[-+ ]*)(?P<whole>{_DECIMAL})"
    rf"(?:[eE](?P<e>[-+]?\d{{1,3}})|\s*(?:\\times|\\cdot)\s*10\s*\^\s*\{{?\s*(?P<power>[-+]?\s*\d{{1,3}})\s*\}}?)?"
    rf"\s*(?:\\frac\s*\{{\s*(?P<top>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>-?{_DECIMAL})\s*\}}"
    rf"|(?:(?<=\d) (?P<up>\d+))?\s*/\s*(?P<down>{_DECIMAL}))?"
    rf"\s*(?P<percent>%)?"
)
_POWER = re.compile(r"(?P<sign>[-+]?)\s*10\s*\^\s*\{?\s*(?P<power>[-+]?\d{1,3})\s*\}?")


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """A number and how it was written."""

    value: Fraction
    is_decimal: bool
    """Written with a point, so that it may have been rounded."""
    is_percent: bool = False

    def equals(self, other: WrittenNumber, *, tolerance: float) -> bool:
        """Whether both say the same. Decimals may be off by `tolerance`, relative to self; `50%` is both 50 and 0.5."""
        if self.is_percent == other.is_percent:
            return self._is_near(self.value, other.value, other, tolerance)
        plain, percent = (other.value, self.value) if self.is_percent else (self.value, other.value)
        readings = (percent, percent / 100)
        return any(
            self._is_near(reading, plain, other, tolerance)
            if self.is_percent
            else self._is_near(plain, reading, other, tolerance)
            for reading in readings
        )

    def _is_near(self, expected: Fraction, given: Fraction, other: WrittenNumber, tolerance: float) -> bool:
        is_exact = not (self.is_decimal or other.is_decimal) or (expected.denominator == given.denominator == 1)
        return expected == given if is_exact else abs(expected - given) <= Fraction(repr(tolerance)) * abs(expected)


def read_number(text: str) -> WrittenNumber | None:
    """The number that all of a tidied text is; None if it is anything else, or divides by zero."""
    if power := _POWER.fullmatch(text):
        value = Fraction(10) ** int(power["power"])
        return WrittenNumber(-value if power["sign"] == "-" else value, is_decimal=False)
    match = _NUMBER.fullmatch(text)
    if match is None or not re.search(r"\d", text):
        return None
    try:
        value = _magnitude(match)
    except (ValueError, ZeroDivisionError):
        return None
    is_negative = match["signs"].count("-") % 2 == 1
    is_decimal = "." in text and r"\overline" not in text
    return WrittenNumber(-value if is_negative else value, is_decimal=is_decimal, is_percent=match["percent"] is not None)


def _magnitude(match: re.Match[str]) -> Fraction:
    whole = match["whole"]
    if match["top"] is not None:
        part = _decimal(match["top"]) / _decimal(match["bottom"])
        return part if not whole else _mixed(_decimal(whole), part)
    if match["up"] is not None:
        return _mixed(_decimal(whole), _decimal(match["up"]) / _decimal(match["down"]))
    value = _decimal(whole) * Fraction(10) ** int((match["e"] or match["power"] or "0").replace(" ", ""))
    return value / _decimal(match["down"]) if match["down"] is not None else value


def _mixed(whole: Fraction, part: Fraction) -> Fraction:
    if whole.denominator != 1 or not 0 <= part < 1:
        raise ValueError("2.5 1/2 and 2 3/2 are no mixed numbers")
    return whole + part


def _decimal(text: str) -> Fraction:
    digits, _, period = text.replace(",", "").replace(" ", "").partition(r"\overline{")
    if not period:
        return Fraction(digits)
    period = period.rstrip("}")
    if "." not in digits:
        raise ValueError("a period follows a decimal point")
    scale = 10 ** len(digits.partition(".")[2])
    return Fraction(digits.rstrip(".") or 0) + Fraction(int(period), scale * (10 ** len(period) - 1))
