import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from reroll.errors import DataError, ModelError
from reroll.models.tiny import CHARACTERS, tiny_tokenizer
from reroll.tokens.renderer import Renderer
from reroll.types import Message

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
TEMPLATES = {
    "chatml": CHATML,
    "chatml_default_system": CHATML_WITH_DEFAULT_SYSTEM,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "plain": PLAIN,
}

TEXT = st.text(alphabet=CHARACTERS, min_size=1, max_size=12).filter(lambda text: text.strip() == text)


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
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
    text = renderer._tokenizer.decode(list(ids), skip_special_tokens=False)
    assert isinstance(text, str)
    return text


def encode(renderer: Renderer, text: str) -> tuple[int, ...]:
    return tuple(renderer._tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", TEMPLATES)
def test_start_is_the_template_with_its_cue_and_decodes_to_the_text(name: str) -> None:
    renderer = RENDERERS[name]
    ids = renderer.start([user("2+2?")])
    expected = renderer._tokenizer.apply_chat_template([user("2+2?")], tokenize=False, add_generation_prompt=True)
    assert raw(renderer, ids) == expected
    assert "2+2?" in renderer.decode(ids)
    assert "<|" not in renderer.decode(ids)


@settings(deadline=None, max_examples=80)
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
        assert raw(renderer, ids) == renderer._tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)


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
    eos = renderer._tokenizer.eos_token_id
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
    assert renderer._tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n") == raw(renderer, ids)


@settings(deadline=None, max_examples=40)
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
