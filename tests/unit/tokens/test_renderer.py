from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from reroll.errors import DataError, ModelError
from reroll.tokens.renderer import Renderer
from reroll.types import Message
from reroll_zoo.tiny_models import CHARACTERS, tiny_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITH_DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{{ '<|header|>' + message['role'] + '<|/header|>\n\n' + message['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
QWEN_TOOLS = (
    "{% set first = messages[0]['content'] if messages[0]['role'] == 'system' else 'Be kind.' %}"
    "{% if tools %}{{ '<|im_start|>system\n' + first + '\n\nTools:' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    """{{ '\nCall as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' }}"""
    "{% else %}{{ '<|im_start|>system\n' + first + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OTHER_TOOLS = (
    "{% if tools %}{{ '<|header|>system<|/header|>Answer with JSON only.' }}"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
) + LLAMA3
STRICT_TURNS = (
    "{% for message in messages if message['role'] != 'system' %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
) + CHATML
TEMPLATES = {
    "chatml": CHATML,
    "chatml_default_system": CHATML_WITH_DEFAULT_SYSTEM,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "plain": PLAIN,
    "qwen_tools": QWEN_TOOLS,
    "other_tools": OTHER_TOOLS,
    "strict_turns": STRICT_TURNS,
}

TEXT = st.text(alphabet=CHARACTERS, min_size=1, max_size=12).filter(lambda text: text.strip() == text)


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(words=("<tool_call>", "</tool_call>"))
    marks = ["<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"]
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks], special_tokens=True)
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


RENDERERS = {name: Renderer(make_tokenizer(name)) for name in TEMPLATES}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def raw(renderer: Renderer, ids: tuple[int, ...]) -> str:
    text = renderer.tokenizer.decode(list(ids), skip_special_tokens=False)
    assert isinstance(text, str)
    return text


def encode(renderer: Renderer, text: str) -> tuple[int, ...]:
    return tuple(renderer.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", TEMPLATES)
def test_start_is_the_template_with_its_cue_and_decodes_to_the_text(name: str) -> None:
    renderer = RENDERERS[name]
    ids = renderer.start([user("2+2?")])
    expected = renderer.tokenizer.apply_chat_template([user("2+2?")], tokenize=False, add_generation_prompt=True)
    assert raw(renderer, ids) == expected
    assert "2+2?" in renderer.decode(ids)
    assert "<|" not in renderer.decode(ids)


@settings(max_examples=80)
@given(st.sampled_from(sorted(TEMPLATES)), TEXT, TEXT, TEXT, st.booleans())
def test_extend_keeps_every_sampled_token_and_reads_like_the_template(
    name: str, question: str, answer: str, reply: str, is_truncated: bool
) -> None:
    renderer = RENDERERS[name]
    prompt = renderer.start([user(question)])
    written = encode(renderer, answer) + (() if is_truncated else renderer.stop_token_ids[-1:])
    ids = renderer.extend(prompt, written, [user(reply)])
    assert ids[: len(prompt) + len(written)] == prompt + written
    if name not in ("plain", "qwen3"):  # One has no end-of-turn token, the other edits history.
        whole = [user(question), assistant(answer), user(reply)]
        assert raw(renderer, ids) == renderer.tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("chatml", "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
        ("llama3", "<|header|>user<|/header|>\n\nno<|eot|><|header|>assistant<|/header|>\n\n"),
        ("plain", "\nuser: no\nassistant: "),
    ],
)
def test_a_finished_completion_is_followed_by_what_the_template_puts_after_the_end_of_turn(name: str, tail: str) -> None:
    renderer = RENDERERS[name]
    prompt = renderer.start([user("2+2?")])
    written = (*encode(renderer, "5"), renderer.stop_token_ids[-1])
    assert raw(renderer, renderer.extend(prompt, written, [user("no")])[len(prompt) + len(written) :]) == tail


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("llama3", "<|eot|>"), ("plain", "")])
def test_a_truncated_completion_is_closed_first(name: str, end: str) -> None:
    renderer = RENDERERS[name]
    prompt, written = renderer.start([user("2+2?")]), encode(renderer, "4 becau")
    finished = (*written, renderer.stop_token_ids[-1])
    cut_tail = raw(renderer, renderer.extend(prompt, written, [user("no")])[len(prompt) + len(written) :])
    full_tail = raw(renderer, renderer.extend(prompt, finished, [user("no")])[len(prompt) + len(finished) :])
    assert cut_tail == end + full_tail


def test_a_template_that_strips_thinking_from_history_does_not_strip_sampled_tokens() -> None:
    renderer = RENDERERS["qwen3"]
    prompt = renderer.start([user("2+2?")])
    written = encode(renderer, "let me see</think>\n4<|im_end|>")
    ids = renderer.extend(prompt, written, [user("sure?")])
    assert raw(renderer, ids).count("let me see</think>") == 1
    again = renderer.extend(ids, written, [user("really?")])
    assert again[: len(ids) + len(written)] == ids + written


def test_a_completion_that_ended_with_eos_is_not_closed_twice() -> None:
    renderer = RENDERERS["llama3"]
    eos = renderer.tokenizer.eos_token_id
    written = (*encode(renderer, "4"), eos)
    assert "<|eot|>" not in raw(renderer, renderer.extend((), written, [user("no")])).split("no")[0]


def test_stop_tokens_are_eos_and_the_end_of_turn() -> None:
    names = {name: [raw(renderer, (token,)) for token in renderer.stop_token_ids] for name, renderer in RENDERERS.items()}
    assert names["chatml"] == ["<|im_end|>"]
    assert names["llama3"] == ["<|im_end|>", "<|eot|>"]
    assert names["plain"] == ["<|im_end|>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_training_row_has_loss_exactly_on_what_the_assistant_says_and_on_ending_its_turn(name: str) -> None:
    renderer = RENDERERS[name]
    messages = [user("2+2?"), assistant("4"), user("3+3?"), assistant("is 6"), user("bye")]
    ids, mask = renderer.training_row(messages)
    assert len(ids) == len(mask)
    said = raw(renderer, tuple(token for token, in_loss in zip(ids, mask, strict=True) if in_loss))
    end = raw(renderer, (renderer.stop_token_ids[-1],))
    assert said == f"4{end}is 6{end}"
    assert "bye" not in raw(renderer, ids)


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_a_training_row_reads_like_the_template(name: str) -> None:
    renderer = RENDERERS[name]
    messages = [user("2+2?"), assistant("4"), user("3+3?"), assistant("6")]
    ids, _ = renderer.training_row(messages)
    assert renderer.tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n") == raw(renderer, ids)


@settings(max_examples=40)
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(TEXT, min_size=1, max_size=3))
def test_a_training_row_is_what_a_rollout_of_the_same_words_would_be(name: str, answers: list[str]) -> None:
    renderer = RENDERERS[name]
    messages: list[Message] = [message for answer in answers for message in (user("go on"), assistant(answer))]
    ids = renderer.start(messages[:1])
    for turn, answer in enumerate(answers):
        written = (*encode(renderer, answer), renderer.stop_token_ids[-1])
        ids = renderer.extend(ids, written, [user("go on")]) if turn < len(answers) - 1 else (*ids, *written)
    assert renderer.training_row(messages)[0] == ids


@pytest.mark.parametrize("messages", [[user("hi")], [], [assistant("hello"), user("hi")]])
def test_a_conversation_without_something_to_imitate_is_a_data_error(messages: list[Message]) -> None:
    with pytest.raises(DataError, match="assistant message"):
        RENDERERS["chatml"].training_row(messages)


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_fix() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template: use an instruct model"):
        Renderer(tokenizer)


def test_a_template_that_drops_the_assistant_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ModelError, match="leaves out what the assistant says"):
        Renderer(tokenizer)


def test_a_template_that_refuses_the_roles_says_which() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    renderer = Renderer(tokenizer)
    with pytest.raises(ModelError, match="roles system, user: no system"):
        renderer.start([{"role": "system", "content": "x"}, user("y")])


# Tools.

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def test_a_template_that_knows_tools_describes_them() -> None:
    renderer = RENDERERS["qwen_tools"]
    messages: list[Message] = [{"role": "system", "content": "Count."}, user("1+1?")]
    expected = renderer.tokenizer.apply_chat_template(messages, tools=[ADD], tokenize=False, add_generation_prompt=True)
    assert raw(renderer, renderer.start(messages, tools=[ADD])) == expected
    assert '"name": "add"' in expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_that_a_message_brings_are_tools_of_the_conversation(name: str) -> None:
    renderer = RENDERERS[name]
    bringing: Message = {"role": "system", "content": "Count.", "tools": [ADD]}
    bare: Message = {"role": "system", "content": "Count."}
    assert renderer.start([bringing, user("1+1?")]) == renderer.start([bare, user("1+1?")], tools=[ADD])
    assert renderer.start([bringing, user("1+1?")]) != renderer.start([bare, user("1+1?")])


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3", "plain", "other_tools", "strict_turns"])
@pytest.mark.parametrize("system", ["Count.", None])
def test_where_the_template_teaches_no_tools_or_other_calls_the_system_message_describes_them(
    name: str, system: str | None
) -> None:
    renderer = RENDERERS[name]
    messages: list[Message] = [user("1+1?")] if system is None else [{"role": "system", "content": system}, user("1+1?")]
    text = raw(renderer, renderer.start(messages, tools=[ADD]))
    assert text.count('"name": "add"') == 1
    assert '<tool_call>{"name": tool name, "arguments": JSON object}</tool_call>' in text
    assert "Answer with JSON only." not in text
    assert text.count("system") == 1
    assert text.index(system or "You can call") <= text.index("You can call") < text.index("1+1?")


def test_a_conversation_without_tools_is_as_it_was() -> None:
    for renderer in RENDERERS.values():
        text = raw(renderer, renderer.start([user("1+1?")]))
        assert "tool" not in text.lower()


@settings(max_examples=60)
@given(st.sampled_from(sorted(TEMPLATES)), TEXT, st.lists(TEXT, min_size=1, max_size=3), st.booleans())
def test_results_follow_a_call_without_a_sampled_token_changing(
    name: str, thought: str, results: list[str], is_truncated: bool
) -> None:
    renderer = RENDERERS[name]
    prompt = renderer.start([user("1+1?")], tools=[ADD])
    # Spelled out, though the tokenizer has single tokens for the tags: no text gives these ids.
    spelled = tuple(token for letter in thought + CALL for token in encode(renderer, letter))
    assert spelled != encode(renderer, thought + CALL)
    written = spelled + (() if is_truncated else renderer.stop_token_ids[-1:])
    messages = [tool(result) for result in results]
    ids = renderer.extend(prompt, written, messages)
    assert ids[: len(prompt) + len(written)] == prompt + written
    shown = raw(renderer, ids[len(prompt) + len(written) :])
    blocks = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
    assert "\n".join(blocks) in shown
    again = renderer.extend(ids, written, messages)
    assert again[: len(ids) + len(written)] == ids + written
    if name == "qwen_tools":
        whole = [user("1+1?"), assistant(thought + CALL), *messages]
        expected = renderer.tokenizer.apply_chat_template(whole, tools=[ADD], tokenize=False, add_generation_prompt=True)
        assert raw(renderer, ids) == expected


def test_results_are_the_users_words_where_the_template_does_not_know_them() -> None:
    renderer = RENDERERS["strict_turns"]
    prompt = renderer.start([user("1+1?")], tools=[ADD])
    written = (*encode(renderer, CALL), renderer.stop_token_ids[-1])
    shown = raw(renderer, renderer.extend(prompt, written, [tool("2"), tool("3")])[len(prompt) + len(written) :])
    blocks = "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert shown == f"\n<|im_start|>user\n{blocks}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_training_row_with_tools_is_what_a_rollout_of_the_same_words_would_be(name: str) -> None:
    renderer = RENDERERS[name]
    opening: list[Message] = [{"role": "system", "content": "Count.", "tools": [ADD]}, user("1+1?")]
    ids, mask = renderer.training_row([*opening, assistant(CALL), tool("2"), assistant("it is 2")])
    end = renderer.stop_token_ids[-1]
    rollout = renderer.extend(renderer.start(opening), (*encode(renderer, CALL), end), [tool("2")])
    assert ids == (*rollout, *encode(renderer, "it is 2"), end)
    said = raw(renderer, tuple(token for token, in_loss in zip(ids, mask, strict=True) if in_loss))
    assert said == f"{CALL}{raw(renderer, (end,))}it is 2{raw(renderer, (end,))}"
