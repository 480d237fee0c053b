from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from reroll_zoo.ifeval.instructions import INSTRUCTIONS
from reroll_zoo.ifeval.text import count_sentences

CASES: dict[str, list[tuple[str, dict[str, Any], bool]]] = {
    "keywords:existence": [
        ("The river met the Sea.", {"keywords": ["river", "sea"]}, True),
        ("Seaside rivers.", {"keywords": ["river", "sea"]}, True),
        ("The river ran dry.", {"keywords": ["river", "sea"]}, False),
        ("I know C++.", {"keywords": ["c++"]}, True),
        ("aaa", {"keywords": ["a.a"]}, False),
    ],
    "keywords:frequency": [
        ("tea, TEA and more tea", {"keyword": "tea", "frequency": 3, "relation": "at least"}, True),
        ("tea and TEA", {"keyword": "tea", "frequency": 3, "relation": "at least"}, False),
        ("tea and TEA", {"keyword": "tea", "frequency": 3, "relation": "less than"}, True),
        ("a teapot full of tea for the team", {"keyword": " tea ", "frequency": 3, "relation": "less than"}, False),
        ("coffee", {"keyword": "tea", "frequency": 1, "relation": "less than"}, True),
    ],
    "keywords:forbidden_words": [
        ("A calm lake.", {"forbidden_words": ["storm", "rain"]}, True),
        ("A calm lake. Then RAIN!", {"forbidden_words": ["storm", "rain"]}, False),
        ("The train was late.", {"forbidden_words": ["rain"]}, True),
        ("I write C++ daily.", {"forbidden_words": ["C++"]}, False),
        ("rain-soaked", {"forbidden_words": ["rain"]}, False),
    ],
    "keywords:letter_frequency": [
        ("Otto sees eels.", {"letter": "e", "let_frequency": 4, "let_relation": "at least"}, True),
        ("Otto sees eels.", {"letter": "e", "let_frequency": 5, "let_relation": "at least"}, False),
        ("Otto sees eels.", {"letter": "O", "let_frequency": 3, "let_relation": "less than"}, True),
        ("Otto sees eels.", {"letter": "t", "let_frequency": 2, "let_relation": "less than"}, False),
        ("#one #two", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, True),
    ],
    "language:response_language": [
        ("Le chat dort sur la chaise et il ne veut pas sortir.", {"language": "fr"}, True),
        ("The cat sleeps on the chair and does not want to go out.", {"language": "fr"}, False),
        ("猫は椅子の上で寝ています。", {"language": "ja"}, True),
        ("猫在椅子上睡觉。", {"language": "zh-cn"}, True),
        ("猫在椅子上睡觉。", {"language": "ja"}, False),
    ],
    "length_constraints:number_sentences": [
        ("One. Two! Three?", {"num_sentences": 3, "relation": "at least"}, True),
        ("One. Two! Three?", {"num_sentences": 4, "relation": "at least"}, False),
        ("Dr. Lee paid 3.50 at shop.com. He left.", {"num_sentences": 3, "relation": "less than"}, True),
        ("Well... No. Yes", {"num_sentences": 3, "relation": "less than"}, False),
        ("! ! ! !", {"num_sentences": 1, "relation": "at least"}, False),
    ],
    "length_constraints:number_paragraphs": [
        ("one\n***\ntwo", {"num_paragraphs": 2}, True),
        ("***\none\n***\ntwo\n***", {"num_paragraphs": 2}, True),
        ("one\n\ntwo", {"num_paragraphs": 2}, False),
        ("one\n***\n\n***\ntwo", {"num_paragraphs": 2}, False),
        ("one\n***\n***\ntwo", {"num_paragraphs": 3}, False),
    ],
    "length_constraints:number_words": [
        ("one two three", {"num_words": 3, "relation": "at least"}, True),
        ("one two three", {"num_words": 4, "relation": "at least"}, False),
        ("one two three", {"num_words": 4, "relation": "less than"}, True),
        ("one two three", {"num_words": 3, "relation": "less than"}, False),
        ("don't", {"num_words": 2, "relation": "at least"}, True),
        ("- - - … !", {"num_words": 1, "relation": "at least"}, False),
    ],
    "length_constraints:nth_paragraph_first_word": [
        ("One.\n\nSummer is here.", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "summer"}, True),
        ('One.\n\n"Summer, at last."', {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Summer"}, True),
        ("One.\n\nThe summer.", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "summer"}, False),
        ("One.\nSummer.", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "summer"}, False),
        ("One.\n\nSummer.\n\nThree.", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "summer"}, False),
        ("One.\n\n\n\nSummer.\n\n", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "summer"}, True),
        ("One.", {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "one"}, False),
    ],
    "detectable_content:number_placeholders": [
        ("Dear [name], come to [city].", {"num_placeholders": 2}, True),
        ("Dear [name], come to (city).", {"num_placeholders": 2}, False),
        ("[] [ ] []", {"num_placeholders": 1}, False),
        ("[broken\nline]", {"num_placeholders": 1}, False),
        ("[a][b][c]", {"num_placeholders": 2}, True),
    ],
    "detectable_content:postscript": [
        ("Bye.\nP.S. Write soon.", {"postscript_marker": "P.S."}, True),
        ("bye.\np. s. write soon.", {"postscript_marker": "P.S."}, True),
        ("Bye.\nPS write soon.", {"postscript_marker": "P.S."}, False),
        ("Bye. P.P.S. One more thing.", {"postscript_marker": "P.P.S"}, True),
        ("Bye. P.S. One more thing.", {"postscript_marker": "P.P.S"}, False),
    ],
    "detectable_format:number_bullet_lists": [
        ("* one\n* two", {"num_bullets": 2}, True),
        ("Intro:\n- one\n  - two\n* three", {"num_bullets": 3}, True),
        ("* one\n* two\n* three", {"num_bullets": 2}, False),
        ("**Bold** line\n* one", {"num_bullets": 1}, True),
        ("*\n-\n---", {"num_bullets": 3}, False),
        ("1. one\n2. two", {"num_bullets": 2}, False),
    ],
    "detectable_format:constrained_response": [
        ("My answer is yes.", {}, True),
        ("Well then. My answer is maybe. Sorry.", {}, True),
        ("my answer is no.", {}, False),
        ("My answer is yes", {}, False),
        ("Yes.", {}, False),
    ],
    "detectable_format:number_highlighted_sections": [
        ("*one* and *two*", {"num_highlights": 2}, True),
        ("**one** and *two*", {"num_highlights": 2}, True),
        ("**one** and two", {"num_highlights": 2}, False),
        ("** ** * * ****", {"num_highlights": 1}, False),
        ("*broken\nline*", {"num_highlights": 1}, False),
    ],
    "detectable_format:multiple_sections": [
        ("Section 1\nOne.\nSection 2\nTwo.", {"section_spliter": "Section", "num_sections": 2}, True),
        ("SECTION 1\nOne.\nSECTION 2\nTwo.", {"section_spliter": "Section", "num_sections": 2}, False),
        ("Section one\nOne.\nSection two\nTwo.", {"section_spliter": "Section", "num_sections": 2}, False),
        ("Section 1\nSection 2\nTwo.", {"section_spliter": "Section", "num_sections": 2}, False),
        ("Day 1: rest. Day 2: more rest. Day 3: work.", {"section_spliter": " Day ", "num_sections": 2}, True),
    ],
    "detectable_format:json_format": [
        ('{"a": 1}', {}, True),
        ("```json\n[1, 2]\n```", {}, True),
        ('```\n{"a": null}\n```', {}, True),
        ("{'a': 1}", {}, False),
        ('Here it is: {"a": 1}', {}, False),
        ("7", {}, False),
        ("[" * 100_000, {}, False),
    ],
    "detectable_format:title": [
        ("<<A title>>\nText.", {}, True),
        ("Text with <<a title>> inside.", {}, True),
        ("<A title>", {}, False),
        ("<<>> << >>", {}, False),
        ("<<broken\nline>>", {}, False),
    ],
    "combination:two_responses": [
        ("one\n******\ntwo", {}, True),
        ("******\none\n******\ntwo\n******", {}, True),
        ("one\n******\none", {}, False),
        ("one\n******\ntwo\n******\nthree", {}, False),
        ("one\n***\ntwo", {}, False),
        ("one\n******\n", {}, False),
    ],
    "combination:repeat_prompt": [
        ("Say hello.\nHello.", {"prompt_to_repeat": "Say hello."}, True),
        ("  say HELLO. Hello.", {"prompt_to_repeat": "Say hello. "}, True),
        ("Sure! Say hello. Hello.", {"prompt_to_repeat": "Say hello."}, False),
        ("Say hello", {"prompt_to_repeat": "Say hello."}, False),
    ],
    "startend:end_checker": [
        ("That is it. The end.", {"end_phrase": "The end."}, True),
        ('"That is it. THE END."  ', {"end_phrase": " The end. "}, True),
        ("The end. Or not.", {"end_phrase": "The end."}, False),
        ("That is the end", {"end_phrase": "The end."}, False),
    ],
    "startend:quotation": [
        ('"All of it."', {}, True),
        ('  "One.\n\nTwo."\n', {}, True),
        ('"Only" this', {}, False),
        ("“All of it.”", {}, False),
        ('"', {}, False),
        ('""', {}, False),
    ],
    "change_case:capital_word_frequency": [
        ("NASA and the U.S. met", {"capital_frequency": 2, "capital_relation": "at least"}, True),
        ("NASA and the us met", {"capital_frequency": 2, "capital_relation": "at least"}, False),
        ("WELL-KNOWN fact", {"capital_frequency": 2, "capital_relation": "less than"}, True),
        ("I SAW IT", {"capital_frequency": 3, "capital_relation": "less than"}, False),
        ("2024 and 7", {"capital_frequency": 1, "capital_relation": "less than"}, True),
    ],
    "change_case:english_capital": [
        ("THE CAT SAT ON THE MAT.", {}, True),
        ("THE CAT SAT ON the MAT.", {}, False),
        ("DER HUND IST NICHT IN DEM HAUS UND DIE KATZE AUCH NICHT.", {}, False),
        ("1234", {}, False),
        ("XKCD QWRT ZZYX BRRF", {}, False),
    ],
    "change_case:english_lowercase": [
        ("the cat sat on the mat.", {}, True),
        ("the cat sat on the Mat.", {}, False),
        ("le chat ne veut pas sortir de la maison.", {}, False),
        ("...", {}, False),
        ("xkcd qwrt zzyx brrf", {}, False),
    ],
    "punctuation:no_comma": [
        ("No pause at all", {}, True),
        ("A; b. c: d", {}, True),
        ("Well, no", {}, False),
        ("1,000", {}, False),
    ],
}
"""By instruction: a text, the arguments, and whether the text follows."""


@pytest.mark.parametrize(
    ("name", "text", "kwargs", "is_followed"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_a_check_tells_texts_that_follow_from_texts_that_do_not(
    name: str, text: str, kwargs: dict[str, Any], is_followed: bool
) -> None:
    assert INSTRUCTIONS[name].check(text, **kwargs) is is_followed


def test_every_instruction_has_cases_on_both_sides() -> None:
    assert CASES.keys() == INSTRUCTIONS.keys()
    for name, cases in CASES.items():
        sides = Counter(is_followed for _, _, is_followed in cases)
        assert len(cases) >= 4, name
        assert sides[True] >= 1, name
        assert sides[False] >= 1, name


def test_there_are_all_25_instructions_of_the_paper() -> None:
    groups = Counter(name.partition(":")[0] for name in INSTRUCTIONS)
    assert groups == {
        "keywords": 4,
        "language": 1,
        "length_constraints": 4,
        "detectable_content": 2,
        "detectable_format": 6,
        "combination": 2,
        "startend": 2,
        "change_case": 3,
        "punctuation": 1,
    }


@pytest.mark.parametrize(
    ("text", "num_sentences"),
    [
        ("", 0),
        ("no mark at all", 1),
        ("One. two. three.", 3),
        ("Really?! Yes.", 2),
        ('He said "Stop." Then he left.', 2),
        ("It costs $3.50 at 5.30 p.m. on weekdays. Come by.", 2),
        ("We met at 5 p.m. Then we ate.", 2),
        ("Mr. and Mrs. Jones met J. R. Smith.", 1),
        ("Fruit, e.g. Apples, keeps well. Nuts etc. do too.", 2),
        ("1. Wake up.\n2. Eat.\n3. Sleep.", 3),
        ("It happened in 1999. Nobody knew.", 2),
        ("The answer is no. I am sure.", 2),
        ("a heading\n\nA sentence.", 1),
        ("Wait... what? Fine…", 2),
        ("今日は晴れです。明日は雨です。", 2),
        ("यह घर है। वह नदी है।", 2),
        ("Bye.\nP.S. Thank you.", 2),
        ("He has... an ego.", 1),
        ("He has… “an ego”.", 1),
        ("He has... An ego.", 2),
        ("Well... Yes... and no.", 2),
        ("Wait!.. and go.", 2),
        ("So it ended...", 1),
    ],
)
def test_sentences_are_counted_as_people_count_them(text: str, num_sentences: int) -> None:
    assert count_sentences(text) == num_sentences
