r"""Multiple choice: the option a text settles on, said as `\boxed{B}`, "the answer is B", "(B)", "B." or in its words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.reward_base import AnswerRewardConfig
from reroll.errors import RewardError
from reroll.rewards.base import extract, reference
from reroll.types import Prompt, Score, Trajectory
from reroll_zoo.math.answer import has_box, last_boxed
from reroll_zoo.text.overlap import normal_words

_FRAME = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|[*_`$]|\\[()\[\]]")
_DECLARATION = re.compile(
    r"\b(?:answer|choice|option)\b(?:\s+(?:\w+\s+){0,3}?is\b|\s*[:=])[\s:]*(?:(?:option|choice|letter)\s+)?",
    re.IGNORECASE,
)
_LETTER = re.compile(r"[(\[{]?\s*([A-Za-z])\s*[)\]}]?(?P<rest>.*)", re.DOTALL)
_MARKED = re.compile(
    r"(?<!\w)\(([A-Za-z])\)|\[([A-Z])\]|^[ \t]*+([A-Z])[ \t]*+(?:[.):]|$)|(?<![\w'])([A-Z])(?=[ \t]*+[.)]?+[ \t]*+$)",
    re.MULTILINE,
)
_RIVAL = re.compile(r"\s*(?:,|/|&|or|and)\s*(?:option\s+)?[(\[]?\s*[A-Za-z]\b(?!\s+[a-z])", re.IGNORECASE)
_LISTED_BEFORE = re.compile(r"(?<![\w'])([A-Z])[)\].]?\s*(?:,|/|&|\bor\b|\band\b)?\s*[(\[]?$")
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|except|without|exclude|eliminate)|n't)\s+(?:(?:the|be|option|choice|letter)\s+){0,2}[(\[]?$",
    re.IGNORECASE,
)
_MAX_TAIL = 4000
"""Only the end of a longer text is searched."""
_MAX_DECLARATIONS = 8
_MAX_DECLARED = 400
"""How many of the last declarations are looked at, and how many characters of each."""
_MAX_BEFORE = 40
"""How many characters before a letter tell whether it is one of a list, or denied."""


class ChoiceConfig(AnswerRewardConfig):
    """Multiple choice: the letter the text settles on, or the words of that option, against the reference letter."""

    runs: ClassVar[str] = "reroll_zoo.text.choice:Choice"

    kind: Literal["choice"] = "choice"
    num_options: int = Field(default=10, ge=2, le=26)
    """How many letters, from A, are choices; where the row lists its options, their number counts instead."""
    options_key: str = "options"
    """The row's column with the options, as a list or as a mapping from letters; rows without it are judged by letter alone."""


class Choice:
    """The option that the text settles on is the reference. Cheap and pure."""

    def __init__(self, config: ChoiceConfig) -> None:
        self._config = config

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        config = self._config
        options = _options(prompt, options_key=config.options_key)
        letters = ascii_uppercase[: len(options) or config.num_options]
        answer = reference(prompt)
        expected = _read(_bare(last_boxed(answer) or answer), letters, options)
        if expected is None:
            raise RewardError(
                f"the reference answer of prompt {prompt.id} is no choice of {letters[0]} to {letters[-1]}: {prompt.answer!r}. "
                "Correct the row, or set num_options"
            )
        text = extract(trajectory.text, config.pattern)
        given = None if text is None else chosen(text, letters=letters, options=options)
        return Score(value=config.correct if given == expected else config.wrong, answer=given)


def chosen(text: str, *, letters: str, options: Sequence[str] = ()) -> str | None:
    """The letter of the option a text settles on, None if it names none or several at once. The last declaration counts:
    a box, then "the answer is …"; without either the last letter that is marked as an option."""
    if has_box(text):
        return _read(_bare(last_boxed(text) or ""), letters, options)
    plain = _bare(text[-_MAX_TAIL:])
    if whole := _read(plain, letters, options):
        return whole
    for match in reversed(list(_DECLARATION.finditer(plain))[-_MAX_DECLARATIONS:]):
        said = plain[match.end() : match.end() + _MAX_DECLARED].partition("\n")[0]
        letter = _declared(said, letters, options)
        if letter is not None:
            return letter or None
    return _last_marked(plain, letters)


def _last_marked(plain: str, letters: str) -> str | None:
    """The last letter that is marked as an option and not denied; None where it ends a list of several."""
    for match in reversed(list(_MARKED.finditer(plain))):
        letter = next(group for group in match.groups() if group).upper()
        before = plain[max(0, match.start() - _MAX_BEFORE) : match.start()]
        if letter not in letters or _DENIED_BEFORE.search(before):
            continue
        listed = _LISTED_BEFORE.search(before)
        return letter if listed is None or listed[1] not in letters or listed[1] == letter else None
    return None


def _read(text: str, letters: str, options: Sequence[str]) -> str | None:
    """What all of a short text says: a letter, a letter with its option, or an option's words."""
    words = normal_words(text)
    by_words = [letter for letter, option in zip(letters, options, strict=False) if words and normal_words(option) == words]
    if len(by_words) == 1:
        return by_words[0]
    match = _LETTER.fullmatch(text.strip())
    if match is None or match[1].upper() not in letters:
        return None
    letter, rest = match[1].upper(), match["rest"].strip().lstrip(".):- ").strip()
    option = options[letters.index(letter)] if options else None
    if not rest or (option is not None and normal_words(rest) == normal_words(option)):
        return letter
    return None


def _declared(said: str, letters: str, options: Sequence[str]) -> str | None:
    """The choice in what follows "the answer is"; empty if it names several, None if it names none."""
    clause = re.split(r"(?<=\w)[.;](?=\s|$)|,?\s+(?=because\b|since\b|as\b)", said, maxsplit=1)[0]
    for words in (said, clause):
        if letter := _read(words, letters, options):
            return letter
    match = re.match(r"[(\[{]?\s*(?P<letter>[A-Za-z])\s*(?P<close>[)\]}.:,]|$|(?=[\s/&]))", said.strip())
    if match is None or match["letter"].upper() not in letters:
        return None
    rest = said.strip()[match.end() :]
    if _RIVAL.match(match["close"] + rest if match["close"] == "," else rest):
        return ""
    # "the answer is a mistake": a small letter counts only where something closes it.
    is_closed = match["letter"].isupper() or bool(match["close"].strip()) or not rest.strip()
    return match["letter"].upper() if is_closed else None


def _bare(text: str) -> str:
    return _FRAME.sub(lambda match: match[1] or "", text).strip()


def _options(prompt: Prompt, *, options_key: str) -> list[str]:
    """The row's options in order of their letters; none if it has no such column."""
    options = prompt.extra.get(options_key)
    if isinstance(options, Mapping):
        return [str(options[letter]) for letter in sorted(options)]
    return [str(option) for option in options] if isinstance(options, list | tuple) else []
