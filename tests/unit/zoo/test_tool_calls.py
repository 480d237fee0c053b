from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from reroll.config.actions import ActionConfig
from reroll.config.envs import EnvConfig
from reroll.envs.actions import parse_action
from reroll.envs.base import InvalidAction
from reroll.envs.worker import HostedEnv, LoopThread
from reroll.errors import ConfigError, DataError, EnvError
from reroll.tokens.renderer import Renderer
from reroll.tokens.tool_calls import Call, MalformedCall, find_calls, write_call
from reroll_zoo.tiny_models import tiny_tokenizer
from reroll_zoo.tool_use.answers import final_answer, same_answer, same_number
from reroll_zoo.tool_use.config import ToolEnvConfig, ToolLimitsConfig
from reroll_zoo.tool_use.env import Task, ToolLoop
from reroll_zoo.tool_use.schema import describe_function, find_problem
from reroll_zoo.tool_use.tasks import ToolTasks
from reroll_zoo.tool_use.tool import Tool, ToolError, function_tool, run_call

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def weather(city: str, days: int = 1, *, unit: Literal["C", "F"] = "C") -> str:
    """Tell the weather
    of a city.

    Args:
        city: its name,
            in English
        unit (str): of the temperature

    Returns:
        A sentence.
    """
    if city == "Atlantis":
        raise LookupError("no such city")
    return f"{city}: {20 * days} {unit}"


# Calls in a text.


@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3)), max_size=3))
def test_calls_come_back_as_they_were_written_whatever_stands_between_them(calls: list[tuple[str, dict[str, Any]]]) -> None:
    written = [write_call(name, arguments) for name, arguments in calls]
    if any("tool_call>" in json.dumps(call) for call in calls):
        return
    assert find_calls("I look.\n" + "\nand\n".join(written) + " done") == [Call(*call) for call in calls]


@pytest.mark.parametrize(
    ("block", "call"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', Call("f", {"a": 1})),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', Call("f", {"a": 1})),
        ('<tool_call>{"name": "f"}</tool_call>', Call("f", {})),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', Call("f", {"a": 1})),
        ('<tool_call>{"name": "f", "arguments": {"code": "x\n\ty"}}</tool_call>', Call("f", {"code": "x\n\ty"})),
        (r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d\ude00"}}</tool_call>', Call("f", {"a": "\U0001f600"})),
    ],
)
def test_calls_are_read_as_models_write_them(block: str, call: Call) -> None:
    assert find_calls(block) == [call]


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("{name: f}", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is no JSON number"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "not JSON"),
        ("[1]", "no JSON object with a name"),
        ('{"arguments": {}}', "no JSON object with a name"),
        ('{"name": 3}', "no JSON object with a name"),
        ('{"name": "f", "arguments": [1]}', "arguments of this call are no JSON object"),
        ('{"name": "f", "arguments": "x"}', "not JSON"),
        (r'{"name": "f", "arguments": {"\uD800": 1}}', "surrogates not allowed"),
        (r'{"name": "\udc00"}', "surrogates not allowed"),
        (r'{"name": "f", "arguments": "{\"a\": \"\\ud800\"}"}', "surrogates not allowed"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 400 + "]" * 400 + "}}", "nested more than 50 deep"),
    ],
)
def test_a_malformed_call_is_found_and_says_what_is_right(block: str, problem: str) -> None:
    (call,) = find_calls(f"<tool_call>{block}</tool_call>")
    assert isinstance(call, MalformedCall)
    assert problem in call.problem
    assert '<tool_call>{"name": ' in call.problem
    call.problem.encode()  # The policy is told so.


def test_words_without_the_tag_are_no_call() -> None:
    assert find_calls('{"name": "f", "arguments": {}} and </tool_call>') == []


# Schemas of functions.


def test_a_schema_is_made_from_signature_and_docstring() -> None:
    description, parameters = describe_function(weather)
    assert description == "Tell the weather of a city."
    assert parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name, in English"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"], "description": "of the temperature"},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_every_json_type_has_its_schema() -> None:
    def function(
        a: float,
        b: bool,
        c: list[int],
        d: dict[str, float],
        e: str | None,
        f: Annotated[int, "how many"],
        g: Any,
        h: list,  # type: ignore[type-arg]
        i: tuple[str, ...],
        j,  # type: ignore[no-untyped-def]
    ) -> None: ...

    assert describe_function(function)[1]["properties"] == {
        "a": {"type": "number"},
        "b": {"type": "boolean"},
        "c": {"type": "array", "items": {"type": "integer"}},
        "d": {"type": "object", "additionalProperties": {"type": "number"}},
        "e": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "f": {"type": "integer", "description": "how many"},
        "g": {},
        "h": {"type": "array"},
        "i": {"type": "array", "items": {"type": "string"}},
        "j": {},
    }


def test_a_function_that_json_cannot_fill_is_refused_with_the_fix() -> None:
    def of_paths(path: Path) -> None: ...

    def of_many(*numbers: int) -> None: ...

    with pytest.raises(ValueError, match=r"parameter path of of_paths .* use str"):
        describe_function(of_paths)
    with pytest.raises(ValueError, match="takes numbers otherwise than by name"):
        describe_function(of_many)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"city": "Oslo"}, None),
        ({"city": "Oslo", "days": 2, "unit": "F"}, None),
        ({}, "city is missing"),
        ({"city": 3}, "city is 3, but must be string"),
        ({"city": "Oslo", "days": True}, "days is true, but must be integer"),
        ({"city": "Oslo", "days": 1.5}, "days is 1.5, but must be integer"),
        ({"city": "Oslo", "days": "2"}, 'days is "2", but must be integer'),
        ({"city": "Oslo", "unit": "K"}, 'unit is "K", but must be one of "C", "F"'),
        ({"city": "Oslo", "town": "x"}, "town is unknown; there is city, days, unit"),
        ({"city": ["x" * 100]}, "city is [" + '"' + "x" * 58 + "..., but must be string"),
    ],
)
def test_arguments_are_held_against_the_schema(arguments: dict[str, Any], problem: str | None) -> None:
    assert find_problem(arguments, describe_function(weather)[1]) == problem


@pytest.mark.parametrize(
    ("schema", "good", "bad", "problem"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None, 3, "x is 3, but must be string or null"),
        ({"type": ["integer", "null"]}, None, "a", 'x is "a", but must be integer or null'),
        ({"type": "array", "items": {"type": "integer"}}, [1], [1, "a"], 'x[1] is "a", but must be integer'),
        ({"const": 5}, 5, 6, "x is 6, but must be one of 5"),
        ({"enum": [1]}, 1, True, "x is true, but must be one of 1"),
        ({"minimum": 2, "maximum": 3}, 2, 4, "x is 4, but must be at most 3"),
        ({"minimum": 2}, 2, 1, "x is 1, but must be at least 2"),
        ({"$ref": "#/$defs/Size"}, "big", "huge", 'x is "huge", but must be one of "big"'),
        ({"allOf": [{"type": "integer"}, {"minimum": 0}]}, 1, -1, "x is -1, but must be at least 0"),
        ({"properties": {"y": {"type": "null"}}, "required": ["y"]}, {"y": None}, {}, "x.y is missing"),
        ({"additionalProperties": {"type": "integer"}}, {"a": 1}, {"a": "b"}, 'x.a is "b", but must be integer'),
        (False, ..., 1, "x is not allowed"),
        ({"type": "file", "$ref": "#/nowhere"}, 1, ..., ""),
    ],
)
def test_the_shapes_that_servers_describe_are_checked(schema: Any, good: Any, bad: Any, problem: str) -> None:
    whole = {"type": "object", "properties": {"x": schema}, "$defs": {"Size": {"enum": ["big"]}}}
    if good is not ...:
        assert find_problem({"x": good}, whole) is None
    if bad is not ...:
        assert find_problem({"x": bad}, whole) == problem


@given(st.dictionaries(st.sampled_from(["city", "days", "unit", "other"]), JSON))
def test_arguments_without_a_problem_can_be_passed_to_the_function(arguments: dict[str, Any]) -> None:
    if find_problem(arguments, describe_function(weather)[1]) is None:
        weather(**arguments)


# Tools.

TOOLS = {"weather": function_tool(weather)}
HANGS_S = 120.0
"""What takes longer than this hangs, however busy the machine is."""


def test_a_call_runs_the_function_and_what_goes_wrong_is_told() -> None:
    def call(name: str, **arguments: Any) -> str:
        return run_call(TOOLS, Call(name, arguments), timeout_s=HANGS_S)

    assert call("weather", city="Oslo", days=2) == "Oslo: 40 C"
    with pytest.raises(ToolError, match=r"There is no tool 'rain'. There is: weather."):
        call("rain")
    with pytest.raises(ToolError, match=r"The arguments of weather do not fit: city is missing."):
        call("weather")
    with pytest.raises(ToolError, match="LookupError: no such city"):
        call("weather", city="Atlantis")


def test_results_are_text_or_json_and_async_functions_are_awaited() -> None:
    async def numbers(n: int) -> list[int]:
        return list(range(n))

    assert function_tool(numbers).run({"n": 3}, HANGS_S) == "[0, 1, 2]"


def test_a_function_that_hangs_or_exits_is_only_a_failed_call() -> None:
    gate = threading.Event()

    def hang() -> None:
        gate.wait(60)

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(ToolError, match=r"hang took more than 0.05 s"):
        function_tool(hang).run({}, 0.05)
    gate.set()
    with pytest.raises(ToolError, match="SystemExit: 3"):
        function_tool(leave).run({}, 5)


# The loop.


class Riddle(ToolLoop):
    """The answer is the seed plus one."""

    def __init__(self, tools: Sequence[Tool] = tuple(TOOLS.values()), *, max_calls: int = 3, **limits: Any) -> None:
        super().__init__(ToolLimitsConfig(kind="riddle", max_calls=max_calls, **limits), tools=tools)

    def draw_task(self, seed: int) -> Task:
        return Task(messages=({"role": "user", "content": f"{seed} + 1?"},), answer=str(seed + 1))


OSLO = write_call("weather", {"city": "Oslo"})


def test_the_first_message_brings_the_tools_and_says_how_to_answer() -> None:
    first, second = Riddle().reset(4)
    assert first["role"] == "system"
    assert "<answer>" in first["content"]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["weather"]
    assert second == {"role": "user", "content": "4 + 1?"}


def test_every_call_of_a_turn_is_answered_in_order() -> None:
    env = Riddle()
    env.reset(4)
    outcome = env.step(f"Let me see. {OSLO} {write_call('rain', {})}")
    assert [message["role"] for message in outcome.messages] == ["tool", "tool"]
    assert outcome.messages[0]["content"] == "Oslo: 20 C"
    assert outcome.messages[1]["content"].startswith("Error: There is no tool")
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (0.0, False, False)
    assert outcome.info == {"effective": 1.0, "num_calls": 2.0, "failed_calls": 1.0, "success": 0.0}


@pytest.mark.parametrize(("text", "reward"), [("<answer>5</answer>", 1.0), ("It is\n5", 1.0), ("It is 5", 0.0), ("6", 0.0)])
def test_a_turn_without_a_call_is_the_answer(text: str, reward: float) -> None:
    env = Riddle()
    env.reset(4)
    outcome = env.step(text)
    assert (outcome.reward, outcome.terminated, outcome.messages) == (reward, True, ())
    assert outcome.info == {"effective": 1.0, "success": reward}
    with pytest.raises(EnvError, match="call reset"):
        env.step(text)


def test_a_turn_in_which_no_call_works_is_not_effective() -> None:
    env = Riddle()
    env.reset(4)
    assert env.step("<tool_call>oops</tool_call>").info["effective"] == 0.0


def test_calls_run_out_the_policy_is_told_and_then_cut() -> None:
    env = Riddle(max_calls=2)
    env.reset(4)
    assert "No calls are left" not in env.step(OSLO).messages[0]["content"]
    last = env.step(OSLO)
    assert last.messages[0]["content"].endswith("No calls are left: answer now.")
    cut = env.step(OSLO)
    assert (cut.truncated, cut.terminated, cut.reward, cut.info["success"]) == (True, False, 0.0, 0.0)


def test_a_flood_of_calls_is_answered_up_to_the_limit_and_in_one_line_beyond_it() -> None:
    env = Riddle(max_calls=2)
    env.reset(4)
    outcome = env.step(OSLO * 500)
    assert [message["content"] for message in outcome.messages] == [
        "Oslo: 20 C",
        "Oslo: 20 C",
        "498 further calls were not made. No calls are left: answer now.",
    ]
    assert env.step("5").reward == 1.0


def test_an_empty_turn_is_invalid_and_changes_nothing() -> None:
    env = Riddle()
    env.reset(4)
    with pytest.raises(InvalidAction, match="Call a tool, or answer"):
        env.step(" \n")
    assert env.step("5").reward == 1.0


def test_a_long_result_is_cut_in_the_middle() -> None:
    def count(n: int) -> str:
        return "a" + "-" * n + "z"

    env = Riddle([function_tool(count)], max_result_chars=100)
    env.reset(0)
    text = env.step(write_call("count", {"n": 5000})).messages[0]["content"]
    assert text.startswith("a")
    assert text.endswith("z")
    assert "... 4902 characters left out ..." in text
    assert len(text) < 150


def test_a_slow_tool_is_an_error_message_and_the_episode_goes_on() -> None:
    gate = threading.Event()

    def hang() -> None:
        gate.wait(60)

    env = Riddle([function_tool(hang)], call_timeout_s=0.05)
    env.reset(4)
    assert "took more than 0.05 s" in env.step(write_call("hang", {})).messages[0]["content"]
    gate.set()
    assert env.step("5").reward == 1.0


def test_the_state_names_the_results_seen_not_the_words_that_asked_for_them() -> None:
    states = []
    for said in (OSLO, f"First {OSLO}", write_call("weather", {"city": "Rome"})):
        env = Riddle()
        env.reset(4)
        states.append(env.step(said).state)
    assert states[0] == states[1] != states[2]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools have the name weather"):
        Riddle([*TOOLS.values(), *TOOLS.values()])


def test_what_a_policy_thinks_aloud_calls_no_tool_where_all_text_is_the_action() -> None:
    form: ActionConfig = TypeAdapter(ActionConfig).validate_python({"kind": "text"})
    env = Riddle()
    env.reset(4)
    assert env.step(parse_action(f"<think>{OSLO}{OSLO}</think>{OSLO}", form)).info["num_calls"] == 1.0
    assert env.step(parse_action("<think>7?</think><answer>5</answer>", form)).reward == 1.0


# Answers.


def test_the_last_tag_is_the_answer_else_the_last_line() -> None:
    assert final_answer("<answer>1</answer> or <answer> 2 </answer>!") == "2"
    assert final_answer("so\n 3 \n") == "3"


@pytest.mark.parametrize(
    ("said", "expected", "is_same"),
    [
        ("1,234", "1234", True),
        ("1234.0", "1234", True),
        ("$5.", "5", True),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.33333333", False),
        ("12345678901234567890", "12345678901234567891", False),
        ("9" * 2000, "9", False),
        ("1e999", "9", False),
        ("9" * 400, "0.5", False),
        ("nan", "5", False),
        ("five", "5", False),
        ("3/4", "0.75", True),
        ("75%", "0.75", True),
        ("1,23", "123", False),
        ("well-known", "well known", True),
        ("The", "", False),
        ("The  Old Mill!", "old mill", True),
        ("old mills", "old mill", False),
        ("", "old mill", False),
    ],
)
def test_answers_are_compared_as_numbers_where_the_right_one_is_a_number_else_as_words(
    said: str, expected: str, is_same: bool
) -> None:
    assert same_answer(said, expected) is is_same


def test_words_are_no_number() -> None:
    assert not same_number("abc", "abc")


# Tasks of a source.


@pytest.fixture
def node(tmp_path: Path) -> dict[str, Any]:
    rows = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "Capital of Norway?", "answer": "Oslo"}]
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {"kind": "jsonl", "path": str(tmp_path / "tasks.jsonl"), "system": "Be brief."}
    return {"kind": "tools", "tasks": source, "tools": [{"kind": "python"}, {"kind": "import", "path": f"{__name__}:weather"}]}


def make(node: dict[str, Any]) -> ToolTasks:
    config = ToolEnvConfig.model_validate(node)
    return ToolTasks(config)


def test_the_rows_of_a_source_are_played_round_with_the_tools_of_the_config(node: dict[str, Any]) -> None:
    env = make(node)
    first, second = env.reset(3)
    assert first["content"] == "Be brief. When you know the answer, write it as <answer>...</answer>."
    assert [tool["function"]["name"] for tool in first["tools"]] == ["python", "weather"]
    assert second["content"] == "Capital of Norway?"
    assert env.step(write_call("python", {"code": "print('Os' + 'lo')"})).messages[0]["content"] == "Oslo"
    assert env.step("<answer>oslo</answer>").reward == 1.0
    env.close()


def test_a_row_without_an_answer_is_refused(node: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bare.jsonl").write_text('{"prompt": "hi"}')
    node["tasks"]["path"] = str(tmp_path / "bare.jsonl")
    with pytest.raises(DataError, match="default/0 has no answer"):
        make(node)


def test_a_config_without_tools_is_refused(node: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        ToolEnvConfig.model_validate({**node, "tools": []})


def test_without_the_mcp_package_the_install_line_is_given(node: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reroll_zoo.tool_use.mcp", None)
    env = make({**node, "tools": [{"kind": "mcp_stdio", "command": "x"}]})
    with pytest.raises(ConfigError, match=r"pip install 'reroll\[mcp\]'"):
        env.reset(0)


def test_what_a_tool_answers_to_half_a_character_can_be_shown_to_the_policy() -> None:
    renderer = Renderer(tiny_tokenizer())
    env = HostedEnv(
        TypeAdapter(EnvConfig).validate_python({"kind": "retrieval_qa", "num_people": 10}), LoopThread(), max_message_chars=2000
    )
    env.open(0)
    for arguments in (r'{"query": "x", "\ud800": 1}', r'{"query": "\udfff"}', '{"query": ' + "[" * 940 + "]" * 940 + "}"):
        answers = env.step(f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>').messages
        assert renderer.extend((1,), (2,), answers)[:2] == (1, 2)
    env.close()
