"""Whether two formulas are equal, by sympy and math-verify. Nothing here has a time limit: who calls it can be killed."""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Any

MAX_CHARS = 500
MAX_OPERATIONS = 200
MAX_SYMBOLS = 8
MAX_LOG10 = 100_000.0
"""What a formula may measure: its text, its operations, its variables, and the decimal digits of any number it works out."""
MAX_POWER = 6
"""The highest power in an inequality that is solved, to compare it with an interval."""
_POINTS = (0.7310585786, -1.4142135623, 2.2360679774, 0.2718281828, -0.5772156649, 3.3219280948)
"""Where formulas with variables are compared: any points that solve no textbook equation would do."""
_FAR_POINTS = (118.6180339887, -141.5772156649)
"""And where formulas with a bend are compared besides: `|9-x|` is `9-x` at all of the former."""
_DIGITS = 30
"""How many digits are computed; exact formulas must agree on all but the last ten."""
_MAX_SIZE = int(MAX_LOG10)
"""How many more are computed of large numbers, so that their last digit counts."""
_MAX_CANCELLED = 400
_ZERO = 1e-300
"""How many digits may cancel in a difference, and what is zero then."""
# The parser takes I for the imaginary unit, and A^T for A: both are given letters that nobody writes.
_MISREAD = [
    (re.compile(r"(?<![\\A-Za-z])I(?![A-Za-z])"), r"\\Upsilon "),
    (re.compile(r"\^\s*\{\s*T\s*\}"), r"^{\\varpi}"),
]
# It works these out, and takes letters for numbers without a common divisor.
_DIVISORS_OF_LETTERS = re.compile(r"\\(?:gcd|lcm)[^A-Za-z)]*[A-Za-z]")
_BARE_LOGARITHM = re.compile(r"\\log(?![A-Za-z])(?!\s*_)")


class Algebra:
    """Reads formulas and compares them. Made late: sympy takes half a second to import."""

    def __init__(self) -> None:
        # It warns, once per process, that it runs without a time limit.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        import math_verify
        import sympy
        from latex2sympy2_extended import latex2sympy2

        self._sympy = sympy
        self._verify = math_verify.verify
        self._latex = latex2sympy2
        self._conversion = latex2sympy2.ConversionConfig(lowercase_symbols=False)
        self._normalization = latex2sympy2.NormalizationConfig(
            basic_latex=True, malformed_operators=True, nits=True, boxed="none"
        )
        self.read = lru_cache(maxsize=1024)(self._read)

    def _read(self, tidied: str) -> Any | None:
        """The formula as a sympy object; None if it is none, is not finite, or would be too much work."""
        if len(tidied) > MAX_CHARS or _DIVISORS_OF_LETTERS.search(tidied):
            return None
        text = tidied.replace(" degrees", r" \cdot \frac{\pi}{180}")
        for pattern, replacement in _MISREAD:
            text = pattern.sub(replacement, text)
        try:
            formula = self._latex.latex2sympy(
                text,
                is_real=None,
                normalization_config=self._normalization,
                conversion_config=self._conversion,
            )
            return formula if self._is_workable(formula) else None
        except Exception:  # The parser raises whatever it trips over; for us all of it says: not mathematics.
            return None

    def readings(self, tidied: str) -> list[Any]:
        r"""What a text may mean: `\log` is the logarithm to base 10 or, as mathematicians write, the natural one."""
        found = [self.read(tidied)]
        if _BARE_LOGARITHM.search(tidied):
            found.append(self.read(_BARE_LOGARITHM.sub(r"\\ln ", tidied)))
        return [formula for formula in found if formula is not None]

    def are_equal(self, gold: Any, given: Any, *, tolerance: float) -> bool:
        """Whether two formulas that were read say the same."""
        sympy = self._sympy
        try:
            gold, given = self._only_element(gold), self._only_element(given)
            if self._is_relation(gold) and self._is_relation(given):
                return self._are_same_relations(gold, given)
            if isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr):
                verdict = self._are_equal_everywhere(gold, given, tolerance)
                if verdict is not None:
                    return verdict
            elif isinstance(gold, sympy.Expr) or isinstance(given, sympy.Expr) or _max_power(sympy, gold, given) > MAX_POWER:
                return False
            elif sympy.S.EmptySet in (gold, given):  # What holds for nothing is no way to write it: sympy misjudges it.
                return bool(gold == given)
            return bool(self._verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None))
        except Exception:  # Of two formulas that sympy cannot compare, the answer is not shown to be right.
            return False

    def _only_element(self, formula: Any) -> Any:
        """`{5}` is 5."""
        is_single = isinstance(formula, self._sympy.FiniteSet) and len(formula.args) == 1
        return formula.args[0] if is_single else formula

    def _is_relation(self, formula: Any) -> bool:
        return all(isinstance(part, self._sympy.core.relational.Relational) for part in self._relations(formula))

    def _relations(self, formula: Any) -> list[Any]:
        """`1 < x` and `x < 2` of `1 < x < 2`."""
        return list(formula.args) if isinstance(formula, self._sympy.And) else [formula]

    def _are_same_relations(self, gold: Any, given: Any) -> bool:
        golds, givens = self._relations(gold), self._relations(given)
        return len(golds) == len(givens) and all(any(self._is_same_relation(one, other) for other in givens) for one in golds)

    def _is_same_relation(self, gold: Any, given: Any) -> bool:
        """Whether both sides differ by the same expression up to a factor, which must keep the direction of an inequality."""
        sympy = self._sympy
        (gold_kind, gold_difference), (given_kind, given_difference) = self._directed(gold), self._directed(given)
        if gold_kind is not given_kind or not gold_difference.free_symbols & given_difference.free_symbols:
            return False
        names = {symbol.name for symbol in gold_difference.free_symbols | given_difference.free_symbols}
        factors = []
        for start in range(len(_POINTS)):
            expected, received = (self._value(side, names, start, _DIGITS) for side in (gold_difference, given_difference))
            if expected is not None and received is not None and expected != 0:
                factors.append(received / expected)
        slack = sympy.Float(10) ** (10 - _DIGITS)
        is_constant = len(factors) > 1 and all(abs(factor - factors[0]) <= slack * abs(factors[0]) for factor in factors)
        if not is_constant or factors[0] == 0:
            return False
        return gold_kind in (sympy.Eq, sympy.Ne) or bool(factors[0] > 0)

    def _directed(self, relation: Any) -> tuple[Any, Any]:
        """Its kind, with `<` turned round to `>`, and what is compared with zero."""
        sympy = self._sympy
        if isinstance(relation, sympy.Lt | sympy.Le):
            relation = relation.reversed
        return type(relation), relation.lhs - relation.rhs

    def _are_equal_everywhere(self, gold: Any, given: Any, tolerance: float) -> bool | None:
        """Equality of values, at several points where there are variables; None if the values cannot be had."""
        sympy = self._sympy
        names = {symbol.name for symbol in gold.free_symbols | given.free_symbols} - {"i"}
        has_decimal = gold.has(sympy.Float) or given.has(sympy.Float)
        size = 0.0 if names or has_decimal else min(max(_log10(sympy, gold), _log10(sympy, given)), _MAX_SIZE)
        num_points = (len(_POINTS) + len(_FAR_POINTS) * self._has_bends(gold, given)) if names else 1
        num_compared = 0
        # All digits of large numbers are computed only where the first ones agree.
        for num_digits in sorted({_DIGITS, _DIGITS + int(size)}):
            noise = sympy.Float(10) ** (10 - num_digits)
            slack = max(tolerance, 1e-12) if has_decimal else noise
            for start in range(num_points):
                expected, received = (self._value(side, names, start, num_digits) for side in (gold, given))
                if expected is None or received is None:
                    continue
                num_compared += 1
                distance = abs(expected - received)
                if distance > slack * abs(expected) and (
                    distance > noise or not self._cancels(gold, given, names, start, slack)
                ):
                    return False
        return True if num_compared else None

    def _cancels(self, gold: Any, given: Any, names: set[str], start: int, slack: Any) -> bool:
        """Whether two tiny values are the same, be it zero: at exact points, where sympy computes until digits are left."""
        value = abs(gold.subs(self._points(gold, names, start, exact=True)).evalf(_DIGITS, maxn=_MAX_CANCELLED))
        difference = gold - given
        left = abs(difference.subs(self._points(difference, names, start, exact=True)).evalf(_DIGITS, maxn=_MAX_CANCELLED))
        return bool(left <= slack * value or left < _ZERO)

    def _value(self, formula: Any, names: set[str], start: int, num_digits: int) -> Any | None:
        """The formula's value where each variable has a number of its own; None where it has none."""
        sympy = self._sympy
        value = formula.subs(self._points(formula, names, start)).evalf(num_digits)
        is_value = value.is_number and value.is_finite and not value.has(sympy.Integral, sympy.Sum, sympy.Limit)
        return value if is_value else None

    def _has_bends(self, *formulas: Any) -> bool:
        """Whether formulas may agree in one region and differ in another: with absolute values, the greatest of, or roots."""
        sympy = self._sympy
        kinds = (sympy.Abs, sympy.Max, sympy.Min, sympy.sign, sympy.floor, sympy.ceiling, sympy.Piecewise)
        powers = [power for formula in formulas for power in formula.atoms(sympy.Pow)]
        return any(formula.has(*kinds) for formula in formulas) or any(power.exp.is_integer is False for power in powers)

    def _points(self, formula: Any, names: set[str], start: int, *, exact: bool = False) -> dict[Any, Any]:
        """A number for each variable of the formula."""
        sympy = self._sympy
        is_far = start >= len(_POINTS)  # Exact, since more digits cancel there.
        places = _FAR_POINTS if is_far else _POINTS
        points = {"i": sympy.I}
        for k, name in enumerate(sorted(names)):
            point = places[(start + 2 * k) % len(places)]
            number = sympy.Rational(str(point)) if exact or is_far else sympy.Float(point, _DIGITS)
            points[name] = number + sympy.Rational(k, 7)
        return {symbol: points[symbol.name] for symbol in formula.free_symbols}

    def _is_workable(self, formula: Any) -> bool:
        """Whether comparing it can be expected to end soon."""
        sympy = self._sympy
        if isinstance(formula, sympy.MatrixBase):
            return formula.rows * formula.cols <= 100 and all(self._is_workable(entry) for entry in formula)
        if formula.has(sympy.nan, sympy.zoo) or len(formula.free_symbols) > MAX_SYMBOLS:
            return False
        nodes = list(sympy.preorder_traversal(formula))
        return len(nodes) <= 2 * MAX_OPERATIONS and _log10(sympy, formula) <= MAX_LOG10


def _max_power(sympy: Any, *formulas: Any) -> float:
    """The largest number that stands as an exponent: solving an inequality takes as long as it is high."""
    powers = [power.exp for formula in formulas if isinstance(formula, sympy.Basic) for power in formula.atoms(sympy.Pow)]
    return max((float(abs(power)) for power in powers if power.is_number), default=0.0)


def _log10(sympy: Any, formula: Any) -> float:
    """An upper guess at the decimal digits of the largest number that working the formula out would meet."""
    inner: list[float] = [_log10(sympy, part) for part in formula.args]
    largest = max(inner, default=0.0)
    if isinstance(formula, sympy.Number):
        return math.log10(max(abs(int(formula.p)), int(formula.q), 1)) if formula.is_Rational else 20.0
    if isinstance(formula, sympy.Pow):
        base, exponent = max(inner[0], 1.0), math.pow(10.0, min(inner[1], 9.0))
        return max(largest, base * exponent) if formula.exp.is_number else largest
    if isinstance(formula, sympy.exp):
        return math.pow(10.0, min(inner[0], 9.0)) / 2
    if isinstance(formula, sympy.factorial | sympy.binomial | sympy.gamma):
        return (largest + 1) * math.pow(10.0, min(largest, 9.0))
    if isinstance(formula, sympy.Add | sympy.Mul):
        return math.fsum(inner)
    return largest
