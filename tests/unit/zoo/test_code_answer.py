from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reroll_zoo.code.answer import ProgramAnswer, fenced_blocks, find_answer


def find(
    text: str, *, language: Literal["python", "cpp", "auto"] = "python", after: str = "", require_fence: bool = False
) -> ProgramAnswer | None:
    return find_answer(text, language=language, after=after, require_fence=require_fence)


def test_the_last_block_of_the_language_is_the_answer() -> None:
    text = "```python\nfirst\n```\n```py\nsecond\n```\n```text\noutput\n```"
    assert find(text) == ProgramAnswer("second", "python")
    assert find(text + "\n```C++\nint x;\n```", language="cpp") == ProgramAnswer("int x;", "cpp")


def test_without_a_block_of_the_language_the_last_block_is_the_answer_and_without_any_the_text() -> None:
    assert find("```\na\n```\n```text\nb\n```") == ProgramAnswer("b", "python")
    assert find("def f(): pass") == ProgramAnswer("def f(): pass", "python")
    assert find("def f(): pass", require_fence=True) is None


def test_auto_goes_by_the_tag_and_then_by_the_look() -> None:
    assert find("```cpp\nint x;\n```", language="auto") == ProgramAnswer("int x;", "cpp")
    assert find("```python3\nx = 1\n```\n```sh\nls\n```", language="auto") == ProgramAnswer("x = 1", "python")
    assert find("#include <map>", language="auto") == ProgramAnswer("#include <map>", "cpp")
    assert find("x = 1", language="auto") == ProgramAnswer("x = 1", "python")


def test_only_what_follows_the_last_marker_counts() -> None:
    text = "```python\ndraft\n```</think>```python\nbetween\n```</think>\n```python\nfinal\n```"
    assert find(text, after="</think>") == ProgramAnswer("final", "python")
    assert find("```python\ndraft\n```", after="</think>") is None
    assert find("```python\ndraft\n```</think>", after="</think>") is None


def test_a_block_that_stays_open_reaches_to_the_end() -> None:
    assert find("Sure:\n```python\nx = 1\ny = 2") == ProgramAnswer("x = 1\ny = 2", "python")


def test_longer_fences_hold_shorter_ones_and_ticks_in_a_line_close_nothing() -> None:
    assert fenced_blocks("````python\n```\ninner\n```\n````") == [("python", "```\ninner\n```")]
    assert fenced_blocks("```py\ns = '```'\n```") == [("python", "s = '```'")]
    assert fenced_blocks('```python title="a.py"\nx\n```') == [("python", "x")]


@pytest.mark.parametrize("text", ["", "  \n ", "```python\n```", "```python\n\n  \n```", "```"])
def test_nothing_is_no_answer(text: str) -> None:
    assert find(text) is None


@given(st.text(alphabet="`\n pyx", max_size=200))
def test_any_text_is_read_without_an_error(text: str) -> None:
    answer = find(text)
    assert answer is None or answer.source.strip()


@given(st.lists(st.sampled_from(["x = 1", "", "# `a`", "  y"]), min_size=1).filter(lambda lines: any(map(str.strip, lines))))
def test_what_is_fenced_comes_out_as_it_was(lines: list[str]) -> None:
    code = "\n".join(lines)
    assert find(f"before\n```python\n{code}\n```\nafter") == ProgramAnswer(code, "python")
