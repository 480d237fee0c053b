r"""Where a text states its final answer: in `\boxed{}`, after "the answer is", in its last formula, or as its last number."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BOX = re.compile(r"(?:\\|\b)(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?P<bare>[^\s{}$]+)")
# Possessive: the classes overlap, and giving back what one has taken to the next would cost time to their fifth power.
_JOINT = re.compile(
    r"[\s$.;,]*+(?:\\[)\]]|\\quad|\\;)?+[\s$;,]*+(?:and|or|\\text\{\s*+(?:and|or)\s*+\})?+[\s$;,]*+"
    r"(?:\\[(\[])?+\s*+(?:\w{1,2}\s*+=)?+[\s$]*+"
)
_MAX_JOINT = 80
"""Boxes further apart are two statements, not one."""
_MAX_BOXES = 8
"""How many of the last boxes are looked at."""
_MAX_TAIL = 4000
"""Only the end of a longer text is searched for an answer that is not boxed."""

_MARKER = re.compile(r"####[ \t]*([^\n]+)")
_DECLARATION = re.compile(r"\b(?:answer|result|solution)\b\**(?:\s+(?:\w+\s+){0,4}?is\b|\s*[:=])[\s:*]*", re.IGNORECASE)
_CLAUSE_END = re.compile(r"(?<=[^\s.])[.?](?=\s|$)|\n|,?\s+(?=(?:because|since|as|where|which|not)\b)")
_DENIAL = re.compile(r"(?:not|never|neither|nor|cannot|\w{1,12}n['’]t)")
_DENIED = re.compile(
    r"(?:not|never|neither)\b[^,;\n]{0,200}?(?:[,;\n]|(?<=[^\s.])\.(?=\s|$)|\bbut\b|\brather\b|$)", re.IGNORECASE
)
_LINKS = frozenset(("equal", "equals", "to", "be", "the", "simply", "just", "exactly", "really"))
_FORMULA = (
    r"\$\$(?P<display>.+?)\$\$|\\\[(?P<bracketed>.+?)\\\]|\\\((?P<inline>.+?)\\\)|(?<!\\)\$(?P<dollars>[^$\n]+?)(?<!\\)\$"
)
_TOKEN = re.compile(
    rf"{_FORMULA}|(?P<break>\n)|\\begin\{{(?P<env>\w+\*?)\}}.*?\\end\{{(?P=env)\}}|(?:\\(?:text\w*|mathrm|mbox)\{{[^{{}}]*\}}|[^\s$]|\$)+",
    re.DOTALL,
)
_FONT = re.compile(r"\\(?:text\w*|mathrm|mbox)\{[^{}]*\}")
_SIGN = re.compile(r"[\d\\+*/^=<>|%≤≥√π∞±×÷½⅓¼¾∪°−(){}\[\],:!-]")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}(?![A-Za-z]*[({])")
_NAME = re.compile(
    r"[B-HJ-Zb-z]|(?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp|sqrt|pi|infinity|and|or|cm|mm|km|kg|percent|degrees"
)
_VALUE = re.compile(r"[\d\\π∞½⅓¼¾]|[A-Za-z]\s*[-+*/^=]\s*[A-Za-z]")


def final_answer(text: str, *, require_boxed: bool) -> str | None:
    """The answer a reader would take the text to give; None if it gives none. The last statement counts."""
    if require_boxed or has_box(text):
        return last_boxed(text)
    tail = text[-_MAX_TAIL:].strip()
    if marked := _MARKER.findall(tail):
        return str(marked[-1]).strip()
    declarations = list(_DECLARATION.finditer(tail))
    if declarations and declarations[-1].end() < len(tail):
        return _declared(tail[declarations[-1].end() :])
    statements = list(_statements(tail))
    if statements:
        return statements[-1]
    return tail.rpartition("\n")[2].strip("*`. ") or None


def has_box(text: str) -> bool:
    """Whether a text puts anything in a box, closed or not."""
    return _BOX.search(text) is not None


def last_boxed(text: str) -> str | None:
    """What the last box holds; None without a box, and where the text breaks off inside it.

    Boxes joined by nothing but "and", "or" or a comma are one answer, a list: naming two values is not naming one.
    """
    boxes: list[tuple[int, int, str]] = []
    is_open = False
    for match in list(_BOX.finditer(text))[-_MAX_BOXES:]:
        if boxes and match.start() < boxes[-1][1]:
            continue
        end = match.end() - 1 if match["bare"] else closing_brace(text, match.end())
        is_open = end is None
        if end is not None:
            boxes.append((match.start(), end + 1, match["bare"] or text[match.end() + 1 : end]))
    if not boxes or is_open:
        return None
    start, _, answer = boxes.pop()
    while boxes and start - boxes[-1][1] <= _MAX_JOINT and _JOINT.fullmatch(text, boxes[-1][1], start):
        start, _, earlier = boxes.pop()
        if earlier.strip() != answer.strip():
            answer = f"{earlier}, {answer}"
    return answer.strip()


def closing_brace(text: str, start: int) -> int | None:
    """Where the brace that opens at `start` closes; None if it does not. Escaped braces do not count."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return match.start()
    return None


def _declared(rest: str) -> str | None:
    """The answer in what follows "the answer is": the first mathematics of the clause, or else its words.

    What is denied is none: of `not 5, it is 6` the rest counts, if there is any.
    """
    if denied := _DENIED.match(rest):
        return next(_statements(rest[denied.end() :]), None)
    if formula := re.compile(_FORMULA, re.DOTALL).match(rest):
        line_end = rest.find("\n", formula.end())
        clause = rest[: line_end if line_end >= 0 else len(rest)]
    else:
        clause = _CLAUSE_END.split(rest, maxsplit=1)[0]
    return next(_statements(clause), None) or clause.strip("*`. ") or None


def _statements(text: str) -> Iterator[str]:
    """The runs of a text that are mathematics and say a value, in order: `3x + 2` of `it is 3x + 2, as asked`. One that is
    denied (`not 5`, `isn't equal to 5`) says none."""
    run: list[str] = []
    has_formula = is_denied = False
    for token in _TOKEN.finditer(text + "\n"):
        formula = token["display"] or token["bracketed"] or token["inline"] or token["dollars"]
        word = token[0].strip("*`") if formula is None else formula.strip()
        bare = word.rstrip(".;?") if word.endswith((".", ";", "?")) else word
        if formula is not None or token["env"] or (not token["break"] and _is_mathematics(bare.rstrip(","))):
            run.append(bare)
            has_formula |= formula is not None
            if bare == word:
                continue
        answer = re.sub(r"^(?:and|or)\b|[\s,]+(?:and|or)$", "", " ".join(run)).strip(" ,;:")
        if answer and not is_denied and (has_formula or _VALUE.search(answer)):
            yield answer
        said = word.casefold()
        is_denied = _DENIAL.fullmatch(said) is not None or (is_denied and not run and said in _LINKS)
        run, has_formula = [], False


def _is_mathematics(word: str) -> bool:
    """A word with a digit, an operator or a command in it, or one letter, or the name of a function; not prose."""
    rest = _FONT.sub("", word)
    if rest != word and not rest:
        return True
    return bool(_NAME.fullmatch(rest)) or bool(_SIGN.search(rest) and not _PROSE.search(rest))
