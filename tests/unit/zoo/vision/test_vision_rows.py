import json

import pytest
from PIL import Image

from reroll.config.data import JsonlSourceConfig
from reroll.data.sources import load_source
from reroll.errors import DataError
from reroll_zoo.offline.rows import load_conversations
from reroll_zoo.vision.store import MARK


@pytest.fixture
def source(tmp_path):
    for number in range(2):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{number}.png")

    def make(*rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return JsonlSourceConfig(path=tmp_path / "rows.jsonl")

    make.folder = tmp_path
    return make


def test_a_row_with_an_image_shows_it_before_its_prompt(source):
    [prompt] = load_source(source({"prompt": "Which?", "image": "0.png", "answer": "7", "kind": "x"}))
    assert prompt.messages == ({"role": "user", "content": f"{MARK}Which?", "images": [str(source.folder / "0.png")]},)
    assert (prompt.answer, prompt.extra) == ("7", {"kind": "x"})


def test_marks_in_a_prompt_say_where_its_pictures_stand(source):
    [prompt] = load_source(source({"prompt": "<image> or <image>?", "images": ["0.png", "1.png"]}))
    assert prompt.messages[0]["content"] == f"{MARK} or {MARK}?"
    assert [image[-5:] for image in prompt.messages[0]["images"]] == ["0.png", "1.png"]


def test_parts_of_messages_name_their_pictures_or_take_those_of_the_row(source):
    own = {"type": "image", "image": "1.png", "text": None}
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, own]
    [prompt] = load_source(source({"messages": [{"role": "user", "content": parts}], "images": ["0.png"]}))
    assert prompt.messages[0]["content"] == f"a{MARK}{MARK}"
    assert [image[-5:] for image in prompt.messages[0]["images"]] == ["0.png", "1.png"]


def test_content_in_parts_of_text_alone_is_text(source):
    [prompt] = load_source(source({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}))
    assert prompt.messages == ({"role": "user", "content": "a"},)


def test_conversations_to_imitate_may_show_pictures(source):
    [conversation] = load_conversations(source({"prompt": "Which?", "images": ["0.png"], "answer": "7"}))
    assert [message["content"] for message in conversation] == [f"{MARK}Which?", "7"]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "Which?", "image": "gone.png"}, r"messages\[0\].content`: part 0: there is no file gone.png"),
        ({"prompt": "<image>, <image>", "images": ["0.png"]}, "2 marks <image> and 1 pictures"),
        ({"messages": [{"role": "user", "content": "a"}], "images": ["0.png"]}, "1 of its pictures stand nowhere"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a picture without one"),
        ({"messages": [{"role": "user", "content": "a", "images": ["0.png"]}]}, "a picture for each place of one"),
    ],
)
def test_a_bad_row_is_told_by_its_line(source, row, fault):
    with pytest.raises(DataError, match=fault) as error:
        load_source(source(row))
    assert "line 1" in str(error.value)
