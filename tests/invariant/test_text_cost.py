"""Whatever the policy writes is read in time that grows with its length, by everything that reads it on the event loop.

Work is compared with work: a text four times as long may cost some four times as much, never sixteen. A reader that is quick
on the longer text is not measured further. Patterns of a user's, which nobody can vouch for, are given up instead.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from reroll.config.actions import LastLineActionConfig, RegexActionConfig, TagActionConfig, TextActionConfig
from reroll.config.reward_base import RewardConfig
from reroll.envs.actions import parse_action
from reroll.envs.base import InvalidAction
from reroll.rewards.base import Verifier
from reroll.runtime import patterns
from reroll.runtime.patterns import last_match
from reroll.tokens.tool_calls import find_calls
from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn
from reroll_zoo.code.answer import find_answer
from reroll_zoo.code.reward import _CPP_SYNTAX, _PYTHON_SYNTAX
from reroll_zoo.code.values import Equality, as_reply, read_replies, same_output
from reroll_zoo.full_text import query_words
from reroll_zoo.games.grid import parse_actions
from reroll_zoo.ifeval.instructions import INSTRUCTIONS as IFEVAL
from reroll_zoo.judge.config import JudgeConfig
from reroll_zoo.judge.text import ScoreReader, Template
from reroll_zoo.math import answer as math_answer
from reroll_zoo.text.choice import Choice, ChoiceConfig
from reroll_zoo.text.match import Exact, ExactRewardConfig, Numeric, NumericRewardConfig
from reroll_zoo.text.overlap import F1, F1Config, Substring, SubstringConfig
from reroll_zoo.text.penalties import Language, LanguageConfig, Repetition, RepetitionConfig
from reroll_zoo.tool_use.answers import final_answer, same_answer
from reroll_zoo.webshop.env import _ACTION

NUM_CHARS = 2000
QUICK_S = 0.01
"""Too little to be told from noise, and nothing that an event loop would feel."""
MAX_GROWTH = 9.0
"""Between the 4 of linear and the 16 of quadratic work, when the text grows fourfold."""
MAX_TRIES = 6

Read = Callable[[str], object]

INSTRUCTIONS: dict[str, dict[str, Any]] = {
    "keywords:existence": {"keywords": ["fox"]},
    "keywords:frequency": {"keyword": "fox", "frequency": 3, "relation": "at least"},
    "keywords:forbidden_words": {"forbidden_words": ["fox", "a"]},
    "keywords:letter_frequency": {"letter": "a", "let_frequency": 3, "let_relation": "at least"},
    "language:response_language": {"language": "en"},
    "length_constraints:number_sentences": {"num_sentences": 3, "relation": "at least"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 3},
    "length_constraints:number_words": {"num_words": 3, "relation": "at least"},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 3, "nth_paragraph": 1, "first_word": "x"},
    "detectable_content:number_placeholders": {"num_placeholders": 3},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 3},
    "detectable_format:number_highlighted_sections": {"num_highlights": 3},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 3},
    "combination:repeat_prompt": {"prompt_to_repeat": "hello"},
    "startend:end_checker": {"end_phrase": "bye"},
    "change_case:capital_word_frequency": {"capital_frequency": 3, "capital_relation": "at least"},
}


def judged(verifier: Verifier, **row: Any) -> Read:
    """A verifier as a reader of texts."""
    prompt = Prompt(id="p", messages=(), domain="d", **row)
    completion = Completion(token_ids=(0,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))

    def read(text: str) -> object:
        turn = Turn(prompt_ids=(0,), completion=completion, text=text)
        return verifier(prompt, Trajectory(id="s", turns=(turn,), status=Status.COMPLETED))

    return read


def acted(config: Any) -> Read:
    def read(text: str) -> None:
        with suppress(InvalidAction):
            parse_action(text, config)

    return read


def moved(text: str) -> None:
    with suppress(InvalidAction):
        parse_actions(text, at_most=5)


def replied(text: str) -> object:
    return [as_reply(line) for line in read_replies(json.dumps({"value": text}) + "\n" + text)]


def near_misses(text: str) -> object:
    """A set of as many numbers as the text has words, none of which is the one expected."""
    numbers = range(len(text) // 20)
    return Equality(tolerance=1e-6, loose=True).same({n + 0.5 for n in numbers}, frozenset(n + 0.75 for n in numbers))


def judge(**options: Any) -> JudgeConfig:
    model = {"kind": "endpoint", "url": "http://localhost", "model": "m"}
    return JudgeConfig.model_validate({"kind": "judge", "model": model, **options})


READERS: dict[str, Read] = {
    "exact": judged(Exact(ExactRewardConfig(kind="exact", ignore_case=True)), answer="5"),
    "numeric": judged(Numeric(NumericRewardConfig(kind="numeric")), answer="5"),
    "choice": judged(Choice(ChoiceConfig(kind="choice")), answer="B"),
    "choice of words": judged(Choice(ChoiceConfig(kind="choice")), answer="B", extra={"options": ["red fox", "dog", "x y"]}),
    "f1": judged(F1(F1Config(kind="f1")), answer="a red fox"),
    "substring": judged(Substring(SubstringConfig(kind="substring")), answer="a red fox"),
    "repetition": judged(Repetition(RepetitionConfig(kind="repetition"))),
    "language": judged(Language(LanguageConfig(kind="language", scripts=["latin"]))),
    "math's final answer": lambda text: math_answer.final_answer(text, require_boxed=False),
    **{name: lambda text, name=name: IFEVAL[name].check(text, **INSTRUCTIONS.get(name, {})) for name in IFEVAL},  # type: ignore[misc]
    "program": lambda text: find_answer(text, language="auto", after="", require_fence=False),
    "printed": lambda text: same_output("1.5 2\n3", text, tolerance=1e-6),
    "compiler": lambda text: (_CPP_SYNTAX.search(text), _PYTHON_SYNTAX.search(text)),
    "replies": replied,
    "set of numbers": near_misses,
    "judge's template": lambda text: Template(None).fill(question="q", answer=text, reference=None, scale="x"),
    "judge's score": lambda text: ScoreReader(judge()).read(text, answer="a"),
    "judge's words": lambda text: ScoreReader(judge(words={"yes": 1, "no": 0})).read(f"Score: {text}", answer="a"),
    "action in a tag": acted(TagActionConfig(kind="tag")),
    "action on the last line": acted(LastLineActionConfig(kind="last_line")),
    "action in words": acted(TextActionConfig(kind="text")),
    "action by pattern": acted(RegexActionConfig(kind="regex", pattern=r"move (\w+)", rule="Move.")),
    "answer with tools": lambda text: (final_answer(text), same_answer(text, "5"), same_answer(text, "a fox")),
    "calls": find_calls,
    "moves": moved,
    "shop": lambda text: (_ACTION.fullmatch(text), query_words(text)),
}

MEASURED_AS = {"code": "program", "judge": "judge's score", "instructions": "keywords:existence"}
"""Rewards that have several readers, each with one of them."""
READ_NO_TEXT = {"overlong", "length", "env_reward", "reward_model", "stack", "cascade"}
"""They count tokens, hand the text to a worker, or to the rewards that they consist of."""

UNITS = (
    " ", "\n", "\t", "$", "`", "```", "*", "(", "[", "{", r"\boxed{", r"\boxed{A} ", "boxed", "A ", "a", "1", "1,", "1,000,",
    "1/", ".", "- ", "the ", "answer is ", "option ", r"\text{", r"\text{a}", "<", "<<", ">>", "<|", "<think>", "<answer>",
    "<tool_call>", '"', "_", "#### ", "P. ", "WORD-", "Section 1", "score", "score: 1 ", r"\(", r"\begin{a}", "$$", "and ",
    "x=", "é", "中", "。", "€", "0.", "-", "\\", '{"a":', "[1,", "U.S. ", "search [", "error: ", ":1: ", "\u2028",
)  # fmt: skip


def texts(num_chars: int) -> Iterator[tuple[str, str]]:
    """Texts of about that length that invite a reader to try again from every place, each with a name."""
    for unit in UNITS:
        many = unit * (num_chars // len(unit))
        yield f"{unit!r}", many
        yield f"{unit!r}, then x", f"{many}x"
        yield f"a box, {unit!r}, a box", rf"\boxed{{A}}{many}x \boxed{{B}}"
        yield f"a fence, {unit!r}, a fence", f"```{many}`"
        yield f"words, {unit!r}, words", f"the answer is A score: {many}x answer"
        yield f"{unit!r} and spaces", (unit + " " * 20) * (num_chars // (len(unit) + 20)) + "x"


def cost_s(read: Read, text: str) -> float:
    start_s = time.process_time()
    read(text)
    return time.process_time() - start_s


def grows_too_fast(read: Read, short: str, long: str) -> bool:
    """Whether no try shows the longer text to be worth its length. Load disturbs a try; it does not disturb all alike."""
    growth = min(cost_s(read, long) / max(cost_s(read, short), 1e-6) for _ in range(MAX_TRIES))
    return growth > MAX_GROWTH


@pytest.mark.parametrize("name", READERS)
def test_no_text_costs_a_reader_more_than_its_length(name: str) -> None:
    read = READERS[name]
    for (what, short), (_, long) in zip(texts(NUM_CHARS), texts(4 * NUM_CHARS), strict=True):
        if cost_s(read, long) > QUICK_S:
            assert not grows_too_fast(read, short, long), what


def test_every_reward_that_judges_on_the_event_loop_is_measured() -> None:
    there = {kind for kind, node in RewardConfig.kinds().items() if not node.in_process}
    assert there >= READ_NO_TEXT
    assert {MEASURED_AS.get(kind, kind) for kind in there - READ_NO_TEXT} <= set(READERS)


def test_the_measure_finds_a_pattern_that_tries_again_from_every_place() -> None:
    trap = re.compile(r"\s+x")
    assert grows_too_fast(trap.search, " " * 1000, " " * 4000)
    assert not grows_too_fast(re.compile(r"(?<!\s)\s++x").search, " " * 100 * NUM_CHARS, " " * 400 * NUM_CHARS)


def test_two_boxes_with_blank_lines_between_them_are_two_statements() -> None:
    # Of time to the fifth power: 200 of them took half a minute.
    text = r"I first thought \boxed{A}" + "\n" * 400 + r"x \boxed{B}"
    assert math_answer.last_boxed(text) == "B"
    assert math_answer.last_boxed(r"\boxed{A}" + " " * 400 + r"\boxed{B}") == "B"


def test_a_users_pattern_that_would_take_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "PATIENCE_S", 0.05)
    endless = r"((?:a|aa)+)$"
    with pytest.raises(InvalidAction):
        parse_action("a" * 200 + "b", RegexActionConfig(kind="regex", pattern=endless, rule="Write."))
    assert ScoreReader(judge(pattern=endless)).read("a" * 200 + "b", answer="") is None
    assert last_match(r"(?:a|b)(\w)", "ax by") == "y"
    assert last_match(r"\w+", "ax by") == "by"
    assert last_match(r"c(d)?", "c") is None
