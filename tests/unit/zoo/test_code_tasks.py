from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from reroll.data.sources import load_source
from reroll.errors import DataError
from reroll.types import Prompt
from reroll_zoo.code_tasks.config import CodeTasksConfig
from reroll_zoo.code_tasks.draw import LEVELS, code_rows
from reroll_zoo.code_tasks.family import FUNCTIONS, PARAMETERS

FAMILIES = [family for families in LEVELS.values() for family in families]


def source(**options: Any) -> CodeTasksConfig:
    return CodeTasksConfig.model_validate({"kind": "code_tasks", **options})


def solution_of(prompt: Prompt) -> str:
    assert prompt.answer is not None
    return prompt.answer.removeprefix("```python\n").removesuffix("\n```")


def passes(solution: str, tests: Any) -> bool:
    """What the reward would say of our own programs, without a sandbox."""
    names: dict[str, Any] = {}
    try:
        exec(solution, names)
        return all(names[tests["function"]](*call["args"]) == call["returns"] for call in tests["calls"])
    except (ArithmeticError, ValueError, IndexError, TypeError):
        return False


def with_one_constant_off(solution: str) -> Iterator[str]:
    """The solution with each number of its that the task names changed by one."""
    for number in re.finditer(r"(?<![\w.\]])\d+", solution):
        if int(number[0]) > 2:
            yield f"{solution[: number.start()]}{int(number[0]) + 1}{solution[number.end() :]}"


def test_there_are_families_enough_on_every_level_and_their_names_differ() -> None:
    assert {level: len(families) >= 10 for level, families in LEVELS.items()} == {1: True, 2: True, 3: True}
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 30


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_solution_of_every_family_passes_its_tests(family: Any) -> None:
    for seed in range(5):
        for prompt in load_source(source(families=[family.name], size=6, seed=seed)):
            assert passes(solution_of(prompt), prompt.extra["tests"]), prompt


def test_a_wrong_constant_fails_in_every_task() -> None:
    num_wrong = 0
    for seed in range(6):
        for prompt in load_source(source(size=400, seed=seed, num_tests=4)):
            solution, text = solution_of(prompt), prompt.messages[0]["content"]
            for wrong in with_one_constant_off(solution):
                changed = set(re.findall(r"\d+", solution)) - set(re.findall(r"\d+", wrong))
                if any(re.search(rf"(?<!\w){number}\b", text) for number in changed):
                    num_wrong += 1
                    assert not passes(wrong, prompt.extra["tests"]), (text, wrong, prompt.extra["tests"])
    assert num_wrong > 1000


def test_no_task_is_solved_by_one_answer_for_everything() -> None:
    for prompt in load_source(source(size=500)):
        returns = [call["returns"] for call in prompt.extra["tests"]["calls"]]
        assert any(value != returns[0] for value in returns), prompt


def test_equal_sources_give_equal_tasks_and_other_seeds_others() -> None:
    assert load_source(source(size=50)) == load_source(source(size=50))
    texts, others = ({row["prompt"] for row in code_rows(source(size=50, seed=seed))} for seed in (0, 1))
    assert len(texts & others) < 10


def test_ten_thousand_tasks_are_all_different_and_none_of_them_is_held_out() -> None:
    train = {row["prompt"] for row in code_rows(source(size=10_000, num_tests=2))}
    held_out = {row["prompt"] for row in code_rows(source(size=2000, seed=0, split="held_out", num_tests=2))}
    assert len(train) == 10_000
    assert len(held_out) == 2000
    assert not train & held_out


def test_a_held_out_task_has_constants_that_no_training_task_has() -> None:
    options: dict[str, Any] = {"families": ["scale_and_shift"], "size": 300, "num_tests": 2}

    def constants(split: str) -> set[tuple[str, ...]]:
        prompts = load_source(source(split=split, **options))
        return {tuple(re.findall(r"\d+", solution_of(prompt))) for prompt in prompts}

    assert not constants("train") & constants("held_out")


def test_a_prompt_says_the_signature_and_carries_solution_and_tests() -> None:
    [prompt] = load_source(source(families=["add_scaled"], size=1, domain="code", system="Be brief.", num_tests=3))
    assert prompt.id == "code/0"
    assert prompt.domain == "code"
    system, user = prompt.messages
    assert system == {"role": "system", "content": "Be brief."}
    signature = re.search(
        r"^Write a Python function `(\w+\(\w+, \w+\))` that .*\. Answer with one code block\.$", user["content"]
    )
    assert signature
    assert solution_of(prompt).startswith(f"def {signature[1]}:\n    return ")
    assert prompt.extra["family"] == "add_scaled"
    assert len(prompt.extra["tests"]["calls"]) == 3
    assert prompt.extra["tests"]["function"] == signature[1].partition("(")[0]


def test_levels_families_and_limits_choose_the_tasks() -> None:
    names = {prompt.extra["family"] for prompt in load_source(source(levels=[2], size=300))}
    assert names == {family.name for family in LEVELS[2]}
    assert len(load_source(source(size=100, limit=3))) == 3


def test_asking_for_too_much_or_for_the_unknown_says_what_there_is() -> None:
    with pytest.raises(DataError, match=r"only \d+ different tasks were found of 5000 .*lower `size`"):
        load_source(source(families=["largest"], size=5000))
    with pytest.raises(DataError, match=r"no family nothing in levels \[1\] \(there are: add_scaled,"):
        load_source(source(families=["nothing"], levels=[1]))
    with pytest.raises(ValidationError):
        source(levels=[])


def test_no_name_of_a_parameter_or_function_is_used_in_a_solution_for_something_else() -> None:
    locals_used = {name for family in FAMILIES for name in re.findall(r"(?<![{\w.'])[a-z_]+(?![\w}'(])", family.body)}
    assert not locals_used & {name for names in PARAMETERS.values() for name in names}
    assert not {name for family in FAMILIES for name in re.findall(r"\b([a-z]+)\(", family.body)} & set(FUNCTIONS)
