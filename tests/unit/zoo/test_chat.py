"""A conversation with a model: pieces as they are written, turns that extend each other."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from reroll.cli import app
from reroll.models.load import load_tokenizer
from reroll.tokens.renderer import Renderer
from reroll.types import SamplingParams
from reroll_zoo.chat.chat import Chat

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def test_an_answer_is_what_the_model_finds_likeliest_and_comes_in_pieces(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = list(Renderer(tokenizer).start([{"role": "user", "content": "say 3"}]))
    start = len(ids)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    expected = Renderer(tokenizer).decode(ids[start:])

    pieces = list(Chat(str(tiny_model), sampling=GREEDY).say("say 3"))

    assert "".join(pieces) == expected
    assert len(pieces) > 1


def test_a_second_turn_goes_on_from_the_first_and_a_new_conversation_does_not(tiny_model: Path) -> None:
    chat = Chat(str(tiny_model), sampling=GREEDY)
    first = "".join(chat.say("say 3"))
    second = "".join(chat.say("say 3"))
    chat.begin()
    assert "".join(chat.say("say 3")) == first
    assert "".join(chat.say("say 3")) == second
    assert chat.was_cut


def test_an_answer_that_is_left_early_stays_in_the_conversation_as_far_as_it_went(tiny_model: Path) -> None:
    chat = Chat(str(tiny_model), sampling=GREEDY)
    pieces = chat.say("say 3")
    assert len(list(islice(pieces, 2))) == 2
    pieces.close()
    assert not chat.was_cut
    assert "".join(chat.say("and now?"))


def test_a_conversation_that_outgrows_the_model_says_so(tiny_model: Path) -> None:
    chat = Chat(str(tiny_model), sampling=GREEDY)
    with pytest.raises(ValueError, match="the model takes"):
        list(chat.say("1 " * chat.max_length))


def test_the_command_answers_each_message_on_a_line(tiny_model: Path) -> None:
    words = ["chat", str(tiny_model), "-m", "say 3", "-m", "say 4", "--max-tokens", "4", "--temperature", "0"]
    said, piped = CliRunner().invoke(app, words), CliRunner().invoke(app, [*words[:2], *words[6:]], input="say 3\n\nsay 4\n")
    assert said.exit_code == piped.exit_code == 0
    assert said.stdout == piped.stdout
    assert len(said.stdout.splitlines()) >= 2
