"""One way of writing mathematics out of many: LaTeX, plain text and Unicode brought to the same plain LaTeX."""

from __future__ import annotations

import re
import unicodedata

from reroll_zoo.math.answer import closing_brace

MAX_CHARS = 1000
MAX_DEPTH = 12
MAX_COMMAS = 64
MAX_DIGITS = 400
"""What an answer may measure. Honest ones are far smaller; larger ones cost the reader more time than they are worth."""

_SYMBOLS = {
    **dict.fromkeys("−–—‐‑", "-"), **dict.fromkeys("·⋅∙", r"\cdot "), **dict.fromkeys("÷∕⁄", "/"), "×": r"\times ",
    **dict.fromkeys("≤⩽", r"\leq "), **dict.fromkeys("≥⩾", r"\geq "), "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
    "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "°": r"^\circ ", "′": "'", "…": "...",
    "⟨": r"\langle ", "⟩": r"\rangle ", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ",
    **{sign: rf"\frac{{{top}}}{{{bottom}}}" for sign, top, bottom in ("½12", "⅓13", "⅔23", "¼14", "¾34", "⅛18")},
    **dict.fromkeys("\u00a0\u2009\u202f", " "), **dict.fromkeys("\u200b£€¥", ""),
}  # fmt: skip
_RAISED = re.compile("[⁺⁻⁰¹²³⁴-⁹ⁿ]+")
_LOWERED = re.compile("[₀-₉]+")
_GROUPED = re.compile(r"(?<=\d),\s*\\!\s*(?=\d)")
_DOLLARS = re.compile(r"\\\$\s*(-?\d+(?:,\d{3})*(?:\.\d+)?)")
_FENCES = re.compile(r"\\[()\[\]]|(?<!\\)\$+|\\\$|^\s*\*\*|\*\*\s*$|`")
_SPACING = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|q?quad|thinspace)(?![A-Za-z])"
    r"|\\phantom\{[^{}]*\}|(?<!\\)\\[,;:! ]|~"
)
_TEXT = re.compile(
    r"\\(?:text|mathrm|textrm|textbf|textit|mathbf|mathit|mathsf|bm|mbox|operatorname\*?|boxed|fbox|underline)\s*\{"
)
_SYNONYMS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(mathbb|mathcal|mathfrak|mathscr)\s+([A-Za-z])(?![A-Za-z])", r"\\\1{\2}"),
        (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\w)(?!\w)", r"\1{\2}"),
        (r"\\sqrt\s+(?=\{)", r"\\sqrt"),
        (r"\\sqrt\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\\l(?:e|eqslant)(?![A-Za-z])|<=", r"\\leq "),
        (r"\\g(?:e|eqslant)(?![A-Za-z])|>=", r"\\geq "),
        (r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\ne(?![A-Za-z])|!=", r"\\neq "),
        (r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset "),
        (r"(?i)^\s*(?:the\s+)?(?:empty\s+set|no\s+(?:real\s+)?solutions?)\s*\.?\s*$", r"\\emptyset "),
        (r"(?i)^\s*(?:the\s+set\s+of\s+)?(?:all\s+)?(?:the\s+)?real(?:s|\s+numbers)\s*\.?\s*$", r"\\mathbb{R}"),
        (r"(?i)^\s*(?:the\s+set\s+of\s+)?(?:all\s+)?(?:the\s+)?integers\s*\.?\s*$", r"\\mathbb{Z}"),
        (r"\\[lr]vert(?![A-Za-z])|\\\|", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\(?:cdots|ldots|dots)(?![A-Za-z])", "..."),
        (r"\\(?:degree|degrees)(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ", " degrees "),
        (r"\{\s*,\s*\}", ","),
        (r"^\s*\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:)\s*(.*\b\1\b.*)\\\}\s*$", r"\2"),
        (r"\\%|(?<=[\d})\s])percent\b", "%"),
        (r"\*\*", "^"),
        (r"\^\s*(?:\{\s*)?\\(?:top|intercal)(?![A-Za-z])(?:\s*\})?", "^{T}"),
        (r"\^\s*([A-Za-z])(?![A-Za-z])", r"^{\1}"),
        (r"(?<![\\A-Za-z])(gcd|lcm|max|min)(?=\s*(?:[({]|\\\{))", r"\\\1"),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp)(?=\s*[({^_\d])", r"\\\1"),
        (r"(?<![\\A-Za-z])sqrt\s*(?=[({])", r"\\sqrt"),
        (r"(?<=[\d)}])\s*\*\s*|\s*\*\s*(?=[\d({\\])|(?<=\w)\*(?=\w)", r"\\cdot "),
        (r"(?<=\d)\s*x\s*(?=10\s*\^)", r"\\times "),
        # A number before a bracket multiplies it, be there a fraction in it or not: 2(1/3) is no 2 1/3.
        (r"(?<![\\A-Za-z_^.\d])((?:\d+\.)?\d+)\s*(?=\()", r"\1\\cdot "),
        # 0.333... repeats for ever: three periods of it are taken as a promise.
        (r"(?<=\.)(\d*?)(\d{1,6}?)\2{2,}\s*\.\.\.", r"\1\\overline{\2}"),
    ]
]
# Sympy works these out while it reads them.
_WORKED_OUT_AT_ONCE = re.compile(r"binom\s*\{?[^}]*(?:\d{6}|\d\s*\^|!)|\d{6}\s*\\choose|(?:gcd|lcm)\s*\(?[^)A-Za-z]*[\^!]")
_IN_ANY_ORDER = re.compile(r"\\(gcd|lcm|max|min)\s*(?:\(|\\\{)((?:[^(){}\\]|\{[^{}]*+\})*+)(?:\)|\\\})")
_STEPS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_ARITHMETIC = re.compile(r"\\(?:frac|sqrt|cdot|times|div|pm|overline)(?![A-Za-z])")
_ROUND_ARGUMENT = re.compile(r"(?:\\sqrt|\^|\\sqrt\[\d+\])\(")


def is_reasonable(text: str) -> bool:
    """Whether an answer is small enough to be worth reading: length, depth, lists, digits and towers of powers."""
    return (
        len(text) <= MAX_CHARS
        and _depth(text) <= MAX_DEPTH
        and text.count(",") <= MAX_COMMAS
        and not re.search(rf"\d{{{MAX_DIGITS + 1}}}|!\s*\)?\s*!\s*\)?\s*!|\d{{5,}}\s*!", text)
        and not _WORKED_OUT_AT_ONCE.search(text)
        and text.count("^") <= 40
    )


def is_well_formed(tidied: str) -> bool:
    """Whether a formula could mean something that is not for us to work out, such as `\\aleph_0` or `G/N \\cong K`: it names
    something, and its brackets close, of whatever kind they are."""
    depth = 0
    for character in tidied:
        depth += _STEPS.get(character, 0)
        if depth < 0:
            return False
    return depth == 0 and any(map(str.isalpha, _ARITHMETIC.sub("", tidied)))


def tidy(text: str) -> str:
    """The same mathematics in plain LaTeX: no fences, no layout, one name for each sign. Words stay words, apart by spaces."""
    text = _RAISED.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match[0]).replace("−", "-") + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + unicodedata.normalize("NFKC", match[0]) + "}", text)
    text = "".join(_SYMBOLS.get(character, character) for character in text)
    text = _DOLLARS.sub(r"\1 dollars ", _GROUPED.sub(",", text))
    text = unicodedata.normalize("NFKC", text)
    text = _SPACING.sub(" ", _FENCES.sub(" ", text))
    text = _unwrap(text)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    text = _IN_ANY_ORDER.sub(_in_order, _brace_round_arguments(text))
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"^[=:]\s*|(?<!\.)[.,;:]$|(?<=[\w}])\s+\.$", "", text).strip()


def key(tidied: str) -> str:
    """What two writings of one answer share letter by letter: no spaces, words in lower case."""
    text = re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda word: word[0].casefold(), tidied)
    text = re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])", "\\1\0", text)
    text = re.sub(r"\s+", "", text).replace("\0", " ")
    return re.sub(r"([\^_])\{(\w|\\[A-Za-z]+)\}", r"\1\2", text)


def _in_order(match: re.Match[str]) -> str:
    """The greatest of 1 and x is that of x and 1."""
    return rf"\{match[1]}({','.join(sorted(argument.strip() for argument in match[2].split(',')))})"


def _unwrap(text: str) -> str:
    r"""`\text{cm}` becomes ` cm `: what a font or a frame holds, set apart by spaces."""
    while match := _TEXT.search(text):
        end = closing_brace(text, match.end() - 1)
        if end is None:
            return text
        text = f"{text[: match.start()]} {text[match.end() : end]} {text[end + 1 :]}"
    return text


def _brace_round_arguments(text: str) -> str:
    r"""`\sqrt(2)` and `x^(1/2)`, as plain text writes them, with braces."""
    start = 0
    while match := _ROUND_ARGUMENT.search(text, start):
        end = _closing_round(text, match.end() - 1)
        if end is None:
            return text
        text = f"{text[: match.end() - 1]}{{{text[match.end() : end]}}}{text[end + 1 :]}"
        start = match.end()
    return text


def _closing_round(text: str, start: int) -> int | None:
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += _STEPS.get(character, 0)
        deepest = max(deepest, depth)
    return deepest
