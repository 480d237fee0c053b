"""References of every kind that mathematical tasks have, with answers that say the same and answers that do not.

All are made by rules from a seed: a value is drawn, written down as the reference, then written down again in other ways, and
changed. So what is right and wrong is known by construction and by nobody's opinion. Where careful readers would differ (is
3.14 a fair answer to `\\pi`? is `{1, 2}` a fair answer to `(1, 2)`?) there is no case.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import sympy
from verdict_tables import FORMULAS, SETS_IN_WORDS, SYMBOLS, WORDS


@dataclass(frozen=True, slots=True)
class Case:
    """A reference, and what goes into the answer's box."""

    kind: str
    gold: str
    same: tuple[str, ...]
    other: tuple[str, ...]


Drawn = tuple[str, list[str], list[str]]
"""A reference, other writings of it, and wrong answers."""


def make_cases(num_per_kind: int, *, seed: int) -> list[Case]:
    """So many different references of each kind, always the same ones."""
    cases = []
    for kind, draw in KINDS.items():
        rng = random.Random(f"{seed}/{kind}")
        drawn = {}
        for _ in range(20 * num_per_kind):
            gold, same, other = draw(rng)
            drawn.setdefault(gold, (same, other))
            if len(drawn) == num_per_kind:
                break
        for gold, (same, other) in drawn.items():
            right = dict.fromkeys([gold, *layouts(gold), *same])
            wrong = dict.fromkeys(answer for answer in [*other, *evasions(gold)] if answer not in right)
            cases.append(Case(kind, gold, tuple(right), tuple(wrong)))
    return cases


def layouts(gold: str) -> list[str]:
    """The same letters, set otherwise."""
    written = [f" {gold} ", rf"\displaystyle {gold}"]
    if r"\frac" in gold:
        written.append(gold.replace(r"\frac", r"\dfrac"))
    if "(" in gold and r"\left" not in gold and gold.count("(") == gold.count(")"):
        written.append(gold.replace("(", r"\left(").replace(")", r"\right)"))
    return written


def evasions(gold: str) -> list[str]:
    """What names the reference without giving it as the answer, or gives nothing."""
    return ["", "?", rf"\text{{not }} {gold}", rf"{gold} \text{{ or }} 987654321"]


def signed(number: int | Fraction, first: bool = False) -> str:
    """`+ 3`, `- 3`; without the plus at the beginning."""
    sign = "-" if number < 0 else "" if first else "+"
    return f"{sign}{abs(number)}"


def frac(value: Fraction, command: str = r"\frac") -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def nonzero(rng: random.Random, bound: int) -> int:
    return rng.choice([-1, 1]) * rng.randint(1, bound)


def integer(rng: random.Random) -> Drawn:
    n = nonzero(rng, 10 ** rng.randint(1, 8))
    grouped = f"{n:,}"
    same = [grouped, grouped.replace(",", r",\!"), grouped.replace(",", "{,}"), grouped.replace(",", r"\,"), f"{n}.0"]
    same += [rf"\frac{{{3 * n}}}{{3}}", f"{n + 4} - 4", f"({n})", rf"\text{{{n}}}", f"x = {n}"]
    return (
        str(n),
        same,
        [
            str(n + 1),
            str(-n),
            f"{n}0",
            f"{n}.5" if abs(n) < 10**5 else f"{n}1",
            f"{n}x",
            f"{n}^2" if abs(n) > 1 else "2",
            f"{n}, {n + 1}",
        ],
    )


def decimal(rng: random.Random) -> Drawn:
    digits = rng.randint(1, 3)
    n = nonzero(rng, 9999)
    n += n % 10 == 0
    value = Fraction(n, 10**digits)
    gold = f"{n / 10**digits:.{digits}f}"
    same = [
        f"{gold}0",
        frac(value) if value.denominator > 1 else str(value),
        rf"{n} \times 10^{{-{digits}}}",
        f"{n}/{10**digits}",
    ]
    if abs(value) < 1:
        same.append(gold.replace("0.", ".", 1))
    wrong = [
        f"{(n + 1) / 10**digits:.{digits}f}",
        f"{n / 10 ** (digits + 1):.{digits + 1}f}",
        str(n),
        f"{-n / 10**digits:.{digits}f}",
    ]
    return gold, same, wrong


def fraction(rng: random.Random) -> Drawn:
    value = Fraction(0)
    while value.denominator == 1:
        value = Fraction(nonzero(rng, 60), rng.randint(2, 40))
    p, q = value.numerator, value.denominator
    same = [
        f"{p}/{q}",
        rf"\frac{{{3 * p}}}{{{3 * q}}}",
        rf"\frac{{{-p}}}{{{-q}}}",
        rf"\frac{{{p}}}{{{q}}}",
        rf"{p} \cdot \frac{{1}}{{{q}}}",
    ]
    same += [rf"{p}\left(\frac{{1}}{{{q}}}\right)", rf"{p} \div {q}", rf"\tfrac{{{p}}}{{{q}}}"]
    if abs(p) > q:
        whole, rest = divmod(abs(p), q)
        same.append(f"{'-' if p < 0 else ''}{whole}\\frac{{{rest}}}{{{q}}}")
    if q in (2, 4, 5, 8, 10, 16, 20, 25, 40):
        same.append(str(float(value)))
    wrong = [
        frac(value + 1),
        frac(-value),
        rf"\frac{{{p}}}{{{q + 1}}}",
        frac(Fraction(1) / value) if abs(p) > 1 else str(q),
        f"{p}{q}",
    ]
    if abs(value - round(float(value), 2)) > 1e-3:
        wrong.append(f"{float(value):.2f}")
    return frac(value), same, wrong


def radical(rng: random.Random) -> Drawn:
    a, b, c = rng.choice([0, nonzero(rng, 9)]), rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    root = rf"{b}\sqrt{{{c}}}"
    if not a:
        same = [
            rf"{b} \cdot \sqrt{{{c}}}",
            rf"\sqrt{{{b * b * c}}}",
            rf"\frac{{{b * c}}}{{\sqrt{{{c}}}}}",
            rf"{b} \cdot {c}^{{1/2}}",
            f"{b}√{c}",
        ]
        return root, same, [rf"{b + 1}\sqrt{{{c}}}", rf"\sqrt{{{b * c}}}", str(b * c), rf"-{root}", rf"{b}\sqrt[3]{{{c}}}"]
    same = [
        rf"{root}{signed(a)}",
        rf"{a} + \sqrt{{{b * b * c}}}",
        rf"\frac{{{2 * a}+{2 * b}\sqrt{{{c}}}}}{{2}}",
        rf"{a}+{b}\cdot\sqrt {c}",
    ]
    wrong = [rf"{a}-{root}", rf"{a}+{b}\sqrt{{{c + 1}}}", rf"{a + 1}+{root}", root, rf"{a}+{b + 1}\sqrt{{{c}}}"]
    return f"{a}+{root}", same, wrong


def scientific(rng: random.Random) -> Drawn:
    m, power = rng.randint(11, 99), rng.choice([1, -1]) * rng.randint(3, 30)
    m += m % 10 == 0
    gold = rf"{m / 10:.1f} \times 10^{{{power}}}"
    same = [
        rf"{m / 10:.1f} \cdot 10^{{{power}}}",
        f"{m / 10:.1f}e{power}",
        rf"{m} \times 10^{{{power - 1}}}",
        rf"{m / 10:.1f}\times 10^{{{power}}}",
    ]
    if 0 < power < 9:
        same.append(str(m * 10 ** (power - 1)))
    wrong = [
        rf"{m / 10:.1f} \times 10^{{{power + 1}}}",
        rf"{m / 10:.1f} \times 10^{{{-power}}}",
        rf"{(m + 1) / 10:.1f} \times 10^{{{power}}}",
    ]
    return gold, same, [*wrong, rf"{m / 10:.1f} \times 20^{{{power}}}", f"{m / 10:.1f}", "0"]


def percent(rng: random.Random) -> Drawn:
    p = rng.randint(1, 99)
    gold = rf"{p}\%"
    same = [
        rf"{p} \%",
        f"{p}%",
        rf"{p} \text{{ percent}}",
        str(p / 100),
        frac(Fraction(p, 100)) if p % 100 else "1",
        rf"{p}.0\%",
    ]
    return gold, same, [rf"{p + 1}\%", rf"{p / 10}\%", str((p + 1) / 100), rf"-{p}\%", str(p * 1000)]


UNITS = {
    "cm": "centimeters",
    "km": "kilometers",
    "kg": "kilograms",
    "m": "meters",
    "hours": "hours",
    "minutes": "minutes",
    "ft": "feet",
}


def unit(rng: random.Random) -> Drawn:
    n, short = rng.randint(2, 500), rng.choice(list(UNITS))
    other = rng.choice([name for name in UNITS if name != short])
    gold = rf"{n} \text{{ {short}}}"
    same = [
        str(n),
        rf"{n}\,\text{{{short}}}",
        rf"{n} \mathrm{{~{short}}}",
        rf"{n} \text{{ {UNITS[short]}}}",
        f"{n} {UNITS[short]}",
        rf"{n}.0\text{{ {short}}}",
    ]
    return (
        gold,
        same,
        [
            rf"{n + 1} \text{{ {short}}}",
            rf"{n} \text{{ {other}}}",
            str(n + 1),
            rf"-{n} \text{{ {short}}}",
            rf"\text{{{short}}}",
        ],
    )


def money(rng: random.Random) -> Drawn:
    n = rng.randint(2, 9000)
    same = [str(n), rf"{n} \text{{ dollars}}", rf"\${n}.00", rf"\$ {n}", rf"\${n:,}"]
    return rf"\${n}", same, [rf"{n} \text{{ cents}}", rf"\${n + 1}", str(n - 1), rf"\${n}.50", rf"-\${n}"]


def angle(rng: random.Random) -> Drawn:
    degrees = rng.choice(
        [15, 18, 20, 30, 36, 40, 45, 54, 60, 72, 75, 90, 105, 108, 120, 135, 140, 150, 160, 210, 240, 270, 300, 330]
    )
    turn = Fraction(degrees, 180)
    radians = rf"\frac{{{turn.numerator if turn.numerator != 1 else ''}\pi}}{{{turn.denominator}}}"
    same = [
        str(degrees),
        rf"{degrees}^{{\circ}}",
        rf"{degrees} \text{{ degrees}}",
        f"{degrees}°",
        radians,
        rf"{degrees}.0^\circ",
    ]
    return (
        rf"{degrees}^\circ",
        same,
        [
            rf"{degrees + 1}^\circ",
            rf"{180 + degrees}^\circ",
            rf"\frac{{{turn.numerator + turn.denominator}\pi}}{{{turn.denominator}}}",
            str(degrees * 2),
        ],
    )


def complex_number(rng: random.Random) -> Drawn:
    a, b = nonzero(rng, 20), rng.choice([-1, 1]) * rng.randint(2, 20)
    same = [
        f"{b}i{signed(a)}",
        f"{a} {signed(b)} i",
        rf"{a}{signed(b)}\cdot i",
        rf"\frac{{{2 * a}{signed(2 * b)}i}}{{2}}",
        rf"{a}{signed(b)}\mathrm{{i}}",
    ]
    return (
        f"{a}{signed(b)}i",
        same,
        [f"{a}{signed(-b)}i", f"{a + 1}{signed(b)}i", str(a + b), f"{b}{signed(a)}i" if a != b else "0", f"{a}{signed(b)}x"],
    )


def interval(rng: random.Random) -> Drawn:
    a = rng.randint(-20, 20)
    b = a + rng.randint(1, 20)
    left, right = rng.choice("(["), rng.choice(")]")
    low, high = "<" if left == "(" else r"\le", "<" if right == ")" else r"\leq"
    same = [
        f"{left}{a}, {b}{right}",
        rf"\left{left}{a},{b}\right{right}",
        rf"{a} {low} x {high} {b}",
        rf"x \in {left}{a},{b}{right}",
    ]
    same += [rf"\{{x \mid {a} {low} x {high} {b}\}}"]
    flipped = "[" if left == "(" else "("
    wrong = [
        f"{flipped}{a},{b}{right}",
        f"{left}{a},{b + 1}{right}",
        f"{left}{a - 1},{b}{right}",
        str(a),
        rf"{left}{a},\infty)",
    ]
    return f"{left}{a},{b}{right}", same, wrong


def union(rng: random.Random) -> Drawn:
    a = rng.randint(-20, 20)
    b = a + rng.randint(1, 20)
    first, second = rf"(-\infty,{a})", rf"({b},\infty)"
    same = [
        rf"{second}\cup {first}",
        rf"{first} ∪ {second}",
        rf"x < {a} \text{{ or }} x > {b}",
        rf"x \in {first} \cup {second}",
    ]
    wrong = [
        first,
        second,
        rf"(-\infty,{a}]\cup {second}",
        rf"{first}\cup ({b + 1},\infty)",
        f"({a},{b})",
        rf"{first}\cap {second}",
    ]
    return rf"{first}\cup {second}", same, wrong


def some_set(rng: random.Random) -> Drawn:
    items = rng.sample(range(-30, 60), rng.randint(2, 4))
    turned = list(reversed(items))
    written = [
        rf"\{{{', '.join(map(str, turned))}\}}",
        rf"\left\{{{','.join(map(str, items))}\right\}}",
        rf"\lbrace {', '.join(map(str, items))} \rbrace",
    ]
    written += [
        ", ".join(map(str, items)),
        rf"{', '.join(map(str, items[:-1]))} \text{{ and }} {items[-1]}",
        rf"\{{{','.join(f'{n}.0' for n in items)}\}}",
    ]
    wrong = [
        rf"\{{{','.join(map(str, group))}\}}"
        for group in (items[1:], [*items, 77], [items[0] + 100, *items[1:]], [-n for n in items])
    ]
    return (
        rf"\{{{','.join(map(str, items))}\}}",
        written,
        [*wrong, str(items[0]), str(sum(items))] if sorted(-n for n in items) != sorted(items) else wrong[:3],
    )


def some_tuple(rng: random.Random) -> Drawn:
    items = [Fraction(rng.randint(-9, 9), rng.choice([1, 1, 2, 3])) for _ in range(rng.randint(2, 3))]
    if items == items[::-1]:
        items[0] += 1
    plain = [str(x) if x.denominator == 1 else frac(x) for x in items]
    same = [f"({', '.join(plain)})", rf"\left({','.join(plain)}\right)", f"({','.join(map(str, items))})"]
    same.append("(" + ",".join(rf"\frac{{{2 * x.numerator}}}{{{2 * x.denominator}}}" for x in items) + ")")
    wrong = [
        f"({','.join(reversed(plain))})",
        f"({','.join([*plain[:-1], str(items[-1] + 1)])})",
        f"({','.join([*plain, '5'])})",
        plain[0],
    ]
    return f"({','.join(plain)})", same, wrong


def matrix(rng: random.Random) -> Drawn:
    rows = [[rng.randint(-9, 9) for _ in range(rng.choice([2, 2, 3]))]]
    rows += [[rng.randint(-9, 9) for _ in rows[0]]]
    rows[0][1] = rows[1][0] + 1

    def write(entries: list[list[object]], style: str = "pmatrix", gap: str = " ") -> str:
        return (
            rf"\begin{{{style}}}"
            + rf"{gap}\\{gap}".join(f"{gap}&{gap}".join(map(str, row)) for row in entries)
            + rf"\end{{{style}}}"
        )

    changed = [[rows[0][0] + 1, *rows[0][1:]], rows[1]]
    negated = [[-n for n in row] for row in rows]
    transposed = [list(column) for column in zip(*rows, strict=True)]
    doubled = [[rf"\frac{{{2 * n}}}{{2}}" for n in row] for row in rows]
    same = [
        write(rows, "bmatrix"),
        write(rows, gap=""),
        write(rows, gap="  "),
        write(doubled),
        rf"\left({write(rows, 'matrix')}\right)",
    ]
    return (
        write(rows),
        same,
        [write(changed), write(rows[::-1]), write(transposed), write(rows[:1])]
        + ([write(negated)] if any(map(any, rows)) else []),
    )


def expanded(coefficients: list[int], x: str = "x") -> str:
    """A polynomial by its coefficients, highest power first."""
    terms = []
    for power, coefficient in zip(range(len(coefficients) - 1, -1, -1), coefficients, strict=True):
        if coefficient:
            factor = "" if abs(coefficient) == 1 and power else str(abs(coefficient))
            name = "" if power == 0 else x if power == 1 else f"{x}^{power}" if power < 10 else f"{x}^{{{power}}}"
            terms.append(("-" if coefficient < 0 else "+" if terms else "") + factor + name)
    return "".join(terms) or "0"


def polynomial(rng: random.Random) -> Drawn:
    k, roots = rng.choice([1, 1, 2, 3, -2]), [nonzero(rng, 7) for _ in range(rng.choice([2, 2, 3]))]
    coefficients = [k]
    for root in roots:
        shifted = [*coefficients, 0]
        coefficients = [shifted[i] - root * ([0, *coefficients][i]) for i in range(len(shifted))]
    factored = ("" if k == 1 else str(k)) + "".join(f"(x{signed(-root)})" for root in roots)
    terms = [expanded([c if i == place else 0 for i, c in enumerate(coefficients)]) for place in range(len(coefficients))]
    backwards = "+".join(term for term in reversed(terms) if term != "0").replace("+-", "-")
    same = [
        factored,
        backwards,
        expanded(coefficients).replace("+", " + ").replace("-", " - ").strip(),
        rf"\left({expanded(coefficients)}\right)",
    ]
    same.append(f"{coefficients[-1]} + x({expanded(coefficients[:-1])})")
    changed = [
        [*coefficients[:-1], coefficients[-1] + 1],
        [coefficients[0] + 1, *coefficients[1:]],
        [-c for c in coefficients],
        coefficients[:-1],
    ]
    return expanded(coefficients), same, [expanded(wrong) for wrong in changed] + [expanded(coefficients, "y")]


def quotient(rng: random.Random) -> Drawn:
    a, b, c, d = nonzero(rng, 9), nonzero(rng, 9), rng.randint(1, 9), nonzero(rng, 9)
    while a * d == b * c:
        d = nonzero(rng, 9)
    top, bottom = expanded([a, b]), expanded([c, d])
    same = [
        f"({top})/({bottom})",
        rf"\frac{{{expanded([3 * a, 3 * b])}}}{{{expanded([3 * c, 3 * d])}}}",
        rf"\frac{{{expanded([-a, -b])}}}{{{expanded([-c, -d])}}}",
    ]
    same += [
        rf"\frac{{{expanded([a, 0])}}}{{{bottom}}}{'+' if b > 0 else '-'}\frac{{{abs(b)}}}{{{bottom}}}",
        rf"({top})({bottom})^{{-1}}",
    ]
    wrong = [
        rf"\frac{{{bottom}}}{{{top}}}",
        rf"\frac{{{expanded([a, b + 1])}}}{{{bottom}}}",
        rf"-\frac{{{top}}}{{{bottom}}}",
        top,
    ]
    return rf"\frac{{{top}}}{{{bottom}}}", same, wrong


def equation(rng: random.Random) -> Drawn:
    m, b = rng.choice([-1, 1]) * rng.randint(2, 9), nonzero(rng, 9)
    line = expanded([m, b])
    same = [
        f"{line} = y",
        f"y = {b}{'+' if m > 0 else '-'}{abs(m)}x",
        f"{expanded([m, b])}-y = 0",
        f"2y = {expanded([2 * m, 2 * b])}",
        f"y={line}",
    ]
    return (
        f"y = {line}",
        same,
        [
            f"y = {expanded([m + 1, b])}",
            f"y = {expanded([m, -b])}",
            f"y = {expanded([-m, b])}",
            f"y = {expanded([m, b + 1])}",
            f"x = {expanded([m, b], 'y')}",
        ],
    )


def inequality(rng: random.Random) -> Drawn:
    a = nonzero(rng, 30)
    relation, turned, ends = rng.choice([("<", ">", ")"), (r"\le", r"\ge", "]")])
    same = [
        f"{a} {turned} x",
        rf"(-\infty,{a}{ends}",
        rf"x \in (-\infty,{a}{ends}",
        f"2x {relation} {2 * a}",
        f"x{relation} {a}",
        rf"\{{x : x {relation} {a}\}}",
    ]
    other = r"\leq" if relation == "<" else "<"
    return (
        f"x {relation} {a}",
        same,
        [f"x {other} {a}", f"x {turned} {a}", f"x {relation} {a + 1}", f"x = {a}", str(a), rf"({a},\infty)"],
    )


def drawn_numbers(rng: random.Random) -> dict[str, int]:
    """The numbers of a table's case, by name."""
    k, n, p, m = rng.randint(2, 9), rng.randint(2, 5), rng.choice([2, 3, 5, 7]), rng.randint(6, 12)
    small = {"k": k, "k1": k + 1, "kk": 2 * k, "kp": k * p, "n": n, "n1": n + 1, "p": p, "pn": p**n}
    return small | {"t": 10 * k, "t1": 10 * k + 1, "h": 100 * n, "h1": 100 * n - 1, "m": m, "mc": m * (m - 1) // 2}


def drawn_from(table: str) -> Callable[[random.Random], Drawn]:
    """Draws a case of a table."""
    entries = [entry.split("\n") for entry in re.split(r"\n(?=\S)", table.strip())]

    def draw(rng: random.Random) -> Drawn:
        numbers = drawn_numbers(rng)
        gold, *lines = (
            re.sub(r"@(t1|h1|k1|n1|kk|kp|pn|mc|\w)", lambda name: str(numbers[name[1]]), line) for line in rng.choice(entries)
        )
        same, other = ([line.strip()[4:] for line in lines if line.strip().startswith(sign)] for sign in ("==", "!="))
        return gold, same, other

    return draw


def algebra(rng: random.Random) -> Drawn:
    """A formula of two variables as sympy writes it, and as it writes it expanded, factored, joined and taken apart."""
    x, y = sympy.symbols("x y")
    leaves = [
        x,
        y,
        x**2,
        sympy.sqrt(x),
        sympy.exp(-x),
        sympy.sin(y),
        sympy.log(x),
        sympy.Rational(rng.randint(1, 9), rng.randint(2, 7)),
    ]
    value = rng.choice([x, y]) + nonzero(rng, 9)
    for _ in range(rng.randint(1, 3)):
        leaf = rng.choice(leaves) + rng.choice([0, 0, nonzero(rng, 5)])
        value = rng.choice([value + leaf, value * leaf, value - 2 * leaf, value / leaf if leaf else value, value**2 - leaf])
    ways = [
        sympy.expand,
        sympy.factor,
        sympy.together,
        lambda formula: sympy.expand(formula / 3) * 3,
        lambda formula: -sympy.expand(-formula),
    ]
    wrong = [value + sympy.Rational(1, 7), -value, 2 * value, value.subs(x, x + 1), value.subs({x: y, y: x}, simultaneous=True)]
    somewhere = {x: sympy.Rational(137, 100), y: sympy.Rational(73, 100)}
    other = [sympy.latex(formula) for formula in wrong if abs((formula - value).subs(somewhere).evalf()) > 1e-6]
    return sympy.latex(value), [sympy.latex(way(value)) for way in ways], other


def words(rng: random.Random) -> Drawn:
    word, other = rng.sample(WORDS, 2)
    same = [
        word,
        rf"\textbf{{{word}}}",
        rf"\mathrm{{{word}}}",
        rf"\text{{{word.lower()}}}",
        rf"\text{{{word.capitalize()}}}",
        rf"\text{{{word}.}}",
    ]
    return (
        rf"\text{{{word}}}",
        same,
        [rf"\text{{{other}}}", rf"\text{{not {word}}}", rf"\text{{{word} or {other}}}", rf"\text{{{word[:-1]}}}", "5"],
    )


KINDS: dict[str, Callable[[random.Random], Drawn]] = {
    "integers": integer, "decimals": decimal, "fractions": fraction, "radicals": radical, "powers of ten": scientific,
    "percent": percent, "units": unit, "money": money, "angles": angle, "complex numbers": complex_number,
    "intervals": interval, "unions": union, "sets": some_set, "tuples": some_tuple, "matrices": matrix,
    "polynomials": polynomial, "quotients": quotient, "equations": equation, "inequalities": inequality,
    "algebra": algebra, "formulas": drawn_from(FORMULAS), "words": words, "sets in words": drawn_from(SETS_IN_WORDS),
    "symbols": drawn_from(SYMBOLS),
}  # fmt: skip
