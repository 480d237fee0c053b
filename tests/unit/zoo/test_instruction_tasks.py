from __future__ import annotations

import hashlib
import json
from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError

from reroll.data.sources import load_source
from reroll.errors import DataError
from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn
from reroll_zoo.ifeval.config import INSTRUCTION_IDS, InstructionsConfig, InstructionTasksConfig
from reroll_zoo.ifeval.instructions import INSTRUCTIONS, are_compatible
from reroll_zoo.ifeval.verifier import Instructions
from reroll_zoo.ifeval.words import FORBIDDEN, TOPICS

GOLDEN = "e2399eabfdfb123f"
VERIFIER = Instructions(InstructionsConfig(kind="instructions"))


def tasks(**options: Any) -> list[Prompt]:
    return load_source(InstructionTasksConfig.model_validate({"kind": "instructions", "domain": "follow", **options}))


def text_of(task: Prompt) -> str:
    return task.messages[-1]["content"]


def score(task: Prompt, text: str | None) -> float:
    assert text is not None
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    turn = Turn(prompt_ids=(0,), completion=completion, text=text)
    return VERIFIER(task, Trajectory(id="s", turns=(turn,), status=Status.COMPLETED)).value


def has_ceiling(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether any short text follows the instruction, and a long one with everything in it does not."""
    return name in ("keywords:forbidden_words", "punctuation:no_comma") or "less than" in kwargs.values()


def test_the_config_names_every_instruction_and_each_can_be_asked_for() -> None:
    assert tuple(INSTRUCTIONS) == INSTRUCTION_IDS
    assert all(kind.phrases and kind.__doc__ for kind in INSTRUCTIONS.values())
    named = {other for kind in INSTRUCTIONS.values() for other in (*kind.conflicts, *(kind.only_with or ()))}
    assert named <= INSTRUCTIONS.keys()


def test_tasks_of_a_seed_stay_what_they_were() -> None:
    rows = json.dumps([[text_of(task), task.answer, task.extra["kwargs"]] for task in tasks(size=300, difficulty="medium")])
    assert hashlib.sha256(rows.encode()).hexdigest()[:16] == GOLDEN


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
def test_every_given_answer_follows_all_instructions(difficulty: str, split: str) -> None:
    generated = tasks(size=2000, difficulty=difficulty, split=split, seed=3)
    assert [task.id for task in generated if score(task, task.answer) != 1.0] == []
    assert {name for task in generated for name in task.extra["instruction_id_list"]} == set(INSTRUCTION_IDS)


@pytest.mark.parametrize("name", INSTRUCTION_IDS)
def test_every_compatible_pair_can_be_followed_together(name: str) -> None:
    partners = [other for other in INSTRUCTION_IDS if are_compatible(name, other)]
    assert partners
    for other in partners:
        for difficulty in ("easy", "hard"):
            for task in tasks(size=8, families=[name, other], num_instructions=[2], difficulty=difficulty):
                assert sorted(task.extra["instruction_id_list"]) == sorted([name, other])
                assert score(task, task.answer) == 1.0, (text_of(task), task.answer)


def test_empty_answers_earn_nothing() -> None:
    assert not any(score(task, "") or score(task, " \n") for task in tasks(size=500))


def test_garbage_earns_nothing_unless_short_is_all_that_was_asked() -> None:
    short, long = "?", ", ".join(["the and people about you with can that", *FORBIDDEN, "by WEAK VIPS KEEP BABY"]) + ". "
    for task in tasks(size=2000):
        ceilings = [has_ceiling(*each) for each in zip(task.extra["instruction_id_list"], task.extra["kwargs"], strict=True)]
        assert score(task, short) == float(all(ceilings)), text_of(task)
        assert not any(ceilings) or score(task, long * 20) == 0.0, text_of(task)


def test_tasks_are_rows_like_those_of_the_published_data() -> None:
    for task in tasks(size=200):
        row = json.loads(json.dumps(dict(task.extra)))
        assert row.keys() == {"instruction_id_list", "kwargs"}
        assert len(row["instruction_id_list"]) == len(row["kwargs"])
        assert row == task.extra


def test_the_same_seed_gives_the_same_tasks_and_a_larger_size_adds_to_them() -> None:
    assert tasks(size=50, seed=1) == tasks(size=80, seed=1)[:50]
    assert {text_of(task) for task in tasks(size=50, seed=1)} != {text_of(task) for task in tasks(size=50, seed=2)}


def test_no_task_comes_twice() -> None:
    assert len({text_of(task) for task in tasks(size=2000, families=["punctuation:no_comma"], num_instructions=[1])}) == 2000


def test_held_out_tasks_are_about_other_topics() -> None:
    def topics(split: str) -> set[str]:
        texts = [text_of(task).partition("\n")[0] for seed in range(3) for task in tasks(size=500, split=split, seed=seed)]
        return {topic for topic in TOPICS if any(topic in text for text in texts)}

    train, held_out = topics("train"), topics("held_out")
    assert train | held_out == set(TOPICS)
    assert not train & held_out
    assert len(held_out) == len(TOPICS) // 5


def test_a_task_carries_as_many_instructions_as_asked_and_none_that_contradict() -> None:
    for task in tasks(size=500, num_instructions=[3]):
        names = task.extra["instruction_id_list"]
        assert len(names) == 3
        assert all(are_compatible(one, other) for one, other in combinations(names, 2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("change_case:english_lowercase", "change_case:capital_word_frequency"),
        ("change_case:english_lowercase", "change_case:english_capital"),
        ("detectable_format:json_format", "startend:quotation"),
        ("detectable_format:number_bullet_lists", "length_constraints:number_paragraphs"),
        ("language:response_language", "change_case:english_capital"),
        ("punctuation:no_comma", "punctuation:no_comma"),
    ],
)
def test_contradicting_instructions_never_meet(one: str, other: str) -> None:
    assert not are_compatible(one, other)
    assert not are_compatible(other, one)
    with pytest.raises(DataError, match="add families"):
        tasks(size=1, families=[one, other], num_instructions=[2])


def test_more_tasks_than_there_are_is_an_error_that_says_how_many_were_found() -> None:
    families = ["detectable_format:constrained_response"]
    with pytest.raises(DataError, match=r"only 1[0-9]{3} different ones were found .* not 9000"):
        tasks(size=9000, families=families, num_instructions=[1], split="held_out")


def test_ids_limit_and_system_message_are_those_of_any_source() -> None:
    source = InstructionTasksConfig(kind="instructions", domain="follow", size=9, limit=2, system="Be brief.")
    prompts = load_source(source)
    assert [prompt.id for prompt in prompts] == ["follow/0", "follow/1"]
    assert prompts[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in prompts[0].messages] == ["system", "user"]


@pytest.mark.parametrize(
    "options", [{"families": ["style:funny"]}, {"families": []}, {"num_instructions": [4]}, {"difficulty": "impossible"}]
)
def test_impossible_sources_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        tasks(**options)
