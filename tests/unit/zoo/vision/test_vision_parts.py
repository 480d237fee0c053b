import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reroll_zoo.vision.parts import as_image, message, opened, plain_content
from reroll_zoo.vision.store import MARK, PICTURES

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def png(pixels=PIXELS) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def seen(image: str) -> np.ndarray:
    return np.array(opened(PICTURES.find(PICTURES.read(image))))


def test_text_and_pictures_become_text_with_marks():
    words = [{"type": "text", "text": text} for text in ("a ", "b")]
    text, images = plain_content([words[0], {"type": "image", "image": png()}, words[1]])
    assert text == f"a {MARK}b"
    assert [seen(image).tolist() for image in images] == [PIXELS.tolist()]


def test_files_bytes_images_pixels_and_urls_all_give_the_same_picture(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    forms = [
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        f"file://{tmp_path}/a.png",
        png(),
        Image.fromarray(PIXELS),
        PIXELS,
        url,
        {"bytes": png(), "path": None},
        {"url": url},
    ]
    assert all(seen(as_image(form)).tolist() == PIXELS.tolist() for form in forms)


def test_files_are_looked_for_in_the_folder_of_the_data(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    assert as_image("a.png", folder=tmp_path) == str(tmp_path / "a.png")


def test_parts_as_openai_sends_them():
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    assert plain_content([{"type": "image_url", "image_url": {"url": url}}]) == (MARK, [url])


def test_a_message_of_texts_and_pictures():
    made = message("user", "look: ", PIXELS)
    assert made["content"] == f"look: {MARK}"
    assert seen(made["images"][0]).tolist() == PIXELS.tolist()
    assert message("user", "no picture") == {"role": "user", "content": "no picture"}


def test_a_mark_that_a_text_brings_along_is_no_picture():
    assert plain_content([{"type": "text", "text": f"a{MARK}b"}]) == ("ab", [])


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (7, "part 0 is 7"),
        ({"type": "video", "video": "a.mp4"}, "of type 'video'"),
        ({"type": "text"}, "no `text`"),
        ({"type": "image"}, "a picture without one"),
        ({"type": "image", "image": "gone.png"}, "part 0: there is no file gone.png"),
        ({"type": "image", "image": "https://a.org/b.png"}, "lies on the web"),
        ({"type": "image", "image": "data:image/png,abc"}, "no data URL in base64"),
        ({"type": "image", "image": b"text"}, "the bytes is no picture that Pillow can read"),
        ({"type": "image", "image": np.zeros((3, 3))}, "of float64 is no picture"),
        ({"type": "image", "image": 3.5}, "3.5 is a float"),
        ({"type": "image", "image": {}}, "neither bytes nor path nor url"),
    ],
)
def test_a_wrong_part_is_told_by_its_place(part, fault):
    with pytest.raises(ValueError, match=fault):
        plain_content([part])


def test_a_file_that_is_no_picture_is_told(tmp_path: Path):
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(ValueError, match=r"a\.png is no picture"):
        as_image(tmp_path / "a.png")
