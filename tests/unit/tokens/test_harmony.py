"""gpt-oss' channels: read as text, written from text, continued token by token. The conversations are spelled out by hand after
the format's public description."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from reroll.config.actions import LastLineActionConfig
from reroll.envs.actions import parse_action
from reroll.errors import DataError
from reroll.tokens.renderer import Renderer
from reroll.tokens.tool_calls import Call, MalformedCall, find_calls
from reroll.types import Message
from reroll_zoo.tiny_models import CHARACTERS, tiny_tokenizer

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
TEMPLATE = (
    "{{ '<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|># Tools' }}"
    "{% for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif message.role == 'tool' %}{{ raise_exception('no call before this result') }}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "description": "-", "parameters": {"type": "object"}}}
THOUGHT = "<|channel|>analysis<|message|>7 + 8 = 15<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>15"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 7}<|call|>'
TAGS = ("<|", "think>")
# What a text says is put between the marks as it is, as every chat template does: marks in it are marks.
TEXT = st.text(alphabet=CHARACTERS, min_size=1, max_size=12).filter(lambda text: not any(tag in text for tag in TAGS))


def make_renderer() -> Renderer:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in MARKS], special_tokens=True)
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = TEMPLATE
    return Renderer(tokenizer)


RENDERER = make_renderer()


def encode(text: str) -> tuple[int, ...]:
    return tuple(RENDERER.tokenizer.encode(text, add_special_tokens=False))


def spell(ids: tuple[int, ...]) -> str:
    return RENDERER.decode(ids, with_special=True)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_thinking_and_answer_read_as_of_any_other_model() -> None:
    text = RENDERER.decode(encode(f"{THOUGHT}{FINAL}<|return|>"))
    assert text == "<think>7 + 8 = 15</think>\n15"
    assert parse_action(text, LastLineActionConfig(kind="last_line")) == "15"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (f"{THOUGHT}{FINAL}", "<think>7 + 8 = 15</think>\n15"),  # cut in its answer
        ("<|channel|>analysis<|message|>7 +", "<think>7 +"),  # cut in its thinking: no answer at all
        ("<|channel|>anal", ""),
        (
            "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant" + CALL,
            'I add.\n<tool_call>{"name": "add"',
        ),
        ("plain words", "plain words"),
        ("15<|return|>", "15"),
    ],
)
def test_whatever_was_written_has_a_text(said: str, text: str) -> None:
    assert RENDERER.decode(encode(said)).startswith(text)
    assert bool(text) == bool(RENDERER.decode(encode(said)))


def test_a_call_is_read_wherever_its_recipient_stands_and_ends_the_turn() -> None:
    by_role = ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 7}<|call|>'
    for said in (CALL, by_role):
        assert find_calls(RENDERER.decode(encode(said))) == [Call("add", {"a": 7})]
        assert encode(said)[-1] in RENDERER.stop_token_ids
    assert encode("<|end|>")[0] not in RENDERER.stop_token_ids  # The thinking ends, the turn goes on.


@pytest.mark.parametrize("arguments", ["{a: 7}", "7", "", '"{}', '{"a": "</tool_call>"}', "[" * 200])
def test_arguments_that_are_none_are_said_to_be_none(arguments: str) -> None:
    calls = find_calls(RENDERER.decode(encode(f"<|channel|>commentary to=functions.add<|message|>{arguments}<|call|>")))
    assert calls
    assert all(isinstance(call, MalformedCall) for call in calls)


def test_marks_that_are_spelled_out_are_words() -> None:
    spelled = [id for character in "<|channel|>final<|message|>15" for id in encode(character)]
    assert RENDERER.decode(spelled) == "<|channel|>final<|message|>15"


def test_a_tools_result_follows_the_call_under_its_name() -> None:
    start = RENDERER.start([user("7 + 8?")], tools=[ADD])
    assert "<|start|>developer<|message|># Tools add<|end|><|start|>user<|message|>7 + 8?<|end|>" in spell(start)
    after = RENDERER.extend(start, encode(CALL), [{"role": "tool", "content": "it's 15"}])
    shown = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"it\'s 15"<|end|><|start|>assistant'
    assert after == (*start, *encode(CALL), *encode(shown))


@pytest.mark.parametrize(("end", "added"), [("<|return|>", ""), ("", "<|end|>")])
def test_a_turn_is_closed_only_if_it_was_cut(end: str, added: str) -> None:
    start, said = RENDERER.start([user("7 + 8?")]), encode(f"{THOUGHT}{FINAL}{end}")
    after = RENDERER.extend(start, said, [user("sure?")])
    assert spell(after[len(start) + len(said) :]) == f"{added}<|start|>user<|message|>sure?<|end|><|start|>assistant"


def test_what_is_imitated_has_channels_and_loss_on_all_of_them() -> None:
    ids, mask = RENDERER.training_row([user("7 + 8?"), assistant("<think>7 + 8 = 15</think>\n15")])
    assert spell(tuple(id for id, counts in zip(ids, mask, strict=True) if counts)) == f"{THOUGHT}{FINAL}<|return|>"
    assert spell(ids).count("<|start|>assistant") == 2
    with pytest.raises(DataError, match="several calls"):
        RENDERER.training_row([user("?"), assistant(2 * '<tool_call>{"name": "add"}</tool_call>')])


def test_a_conversation_with_a_call_is_imitated_as_it_would_be_played() -> None:
    rows = [user("7 + 8?"), assistant('<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>')]
    ids, _ = RENDERER.training_row([*rows, {"role": "tool", "content": "15"}, assistant("15")])
    played = RENDERER.extend(RENDERER.start(rows[:1]), encode(CALL), [{"role": "tool", "content": "15"}])
    assert ids == (*played, *encode("<|channel|>final<|message|>15<|return|>"))


def test_history_is_shown_without_its_thinking() -> None:
    ids = RENDERER.start([user("a"), assistant("<think>hm</think>\nb"), user("c")])
    assert spell(ids).endswith(
        "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|end|>"
        "<|start|>user<|message|>c<|end|><|start|>assistant"
    )
    assert spell(RENDERER.whole([user("a"), assistant("b")])).endswith("<|channel|>final<|message|>b<|end|>")


@given(thought=TEXT, answer=TEXT.map(lambda text: text.lstrip("\n")))
def test_what_is_written_reads_as_it_was(thought: str, answer: str) -> None:
    ids, mask = RENDERER.training_row([user("?"), assistant(f"<think>{thought}</think>\n{answer}")])
    said = tuple(id for id, counts in zip(ids, mask, strict=True) if counts)
    assert RENDERER.decode(said) == f"<think>{thought}</think>\n{answer}"
