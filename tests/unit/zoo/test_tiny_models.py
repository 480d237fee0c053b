import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reroll.models.load import load_model, load_tokenizer
from reroll_zoo.tiny_models import CHARACTERS, make_tiny, tiny_tokenizer

TOKENIZER = tiny_tokenizer(words=("hello", " world", "12"))


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet=CHARACTERS, max_size=40))
def test_text_comes_back_exactly(text):
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids) == text


def test_words_are_single_tokens():
    assert len(TOKENIZER("hello world12").input_ids) == 3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
def test_the_stored_tokenizer_is_the_one_made(tmp_path, family):
    tokenizer = load_tokenizer(str(make_tiny(tmp_path, family=family)))
    text = "Two  spaces,\na line; user\n and ~!"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|pad|>"


def test_the_chat_template_opens_the_assistants_turn(tmp_path):
    tokenizer = load_tokenizer(str(make_tiny(tmp_path)))
    messages = [{"role": "user", "content": "1+2="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 10
    assert tokenizer.decode(ids) == text


def test_the_seed_decides_the_weights(tmp_path):
    folders = [make_tiny(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    first, same, other = (
        load_model(str(folder), dtype=torch.float32, device="cpu").get_input_embeddings().weight for folder in folders
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_making_a_model_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    make_tiny(tmp_path)
    assert torch.equal(torch.rand(3), want)
