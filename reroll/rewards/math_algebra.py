"""Whether two formulas are equal, by sympy and math-verify. Nothing here has a time limit: who calls it can be killed."""

from __future__ import annotations

import logging
import math
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
_DIGITS = 30
"""How many digits are computed; exact formulas must agree on all but the last ten."""
_MAX_SIZE = 5000
"""How many more are computed of large numbers, so that their last digit counts."""


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
        if len(tidied) > MAX_CHARS:
            return None
        try:
            formula = self._latex.latex2sympy(
                tidied.replace(" degrees", r" \cdot \frac{\pi}{180}"),
                is_real=None,
                normalization_config=self._normalization,
                conversion_config=self._conversion,
            )
            return formula if self._is_workable(formula) else None
        except Exception:  # The parser raises whatever it trips over; for us all of it says: not mathematics.
            return None

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
        num_compared = 0
        # All digits of large numbers are computed only where the first ones agree.
        for num_digits in sorted({_DIGITS, _DIGITS + int(size)}):
            slack = sympy.Float(10) ** (10 - num_digits)
            relative_slack = max(tolerance, 1e-12) if has_decimal else slack
            for start in range(len(_POINTS) if names else 1):
                expected, received = (self._value(side, names, start, num_digits) for side in (gold, given))
                if expected is None or received is None:
                    continue
                num_compared += 1
                if abs(expected - received) > relative_slack * abs(expected) + slack:
                    return False
        return True if num_compared else None

    def _value(self, formula: Any, names: set[str], start: int, num_digits: int) -> Any | None:
        """The formula's value where each variable has a number of its own; None where it has none."""
        sympy = self._sympy
        points = {
            name: sympy.Float(_POINTS[(start + 2 * k) % len(_POINTS)], _DIGITS) + sympy.Rational(k, 7)
            for k, name in enumerate(sorted(names))
        }
        points["i"] = sympy.I
        value = formula.subs({symbol: points[symbol.name] for symbol in formula.free_symbols}).evalf(num_digits)
        is_value = value.is_number and value.is_finite and not value.has(sympy.Integral, sympy.Sum, sympy.Limit)
        return value if is_value else None

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
    if isinstance(formula, sympy.factorial | sympy.binomial | sympy.gamma):
        return (largest + 1) * math.pow(10.0, min(largest, 9.0))
    if isinstance(formula, sympy.Add | sympy.Mul):
        return math.fsum(inner)
    return largest
