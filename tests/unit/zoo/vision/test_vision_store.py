import numpy as np
import pytest

from reroll.errors import DataError
from reroll.tokens.pictures import FIRST_ID
from reroll_zoo.vision.store import MARK, PictureStore, name_of, names_in, runs_in, texts_around, tokens_of


def test_a_pictures_tokens_say_its_name_and_no_vocabulary_has_them():
    name = name_of(b"one")
    ids = tokens_of(name, 9)
    assert names_in(ids) == [name]
    assert len(set(ids)) == 9
    assert min(ids) >= FIRST_ID
    assert max(ids) < 1 << 24  # What the journal has room for.


def test_pictures_are_told_apart_where_they_follow_each_other_and_where_words_stand_in_them():
    first, second = name_of(b"one"), name_of(b"two")
    ids = np.array([5, *tokens_of(first, 4), *tokens_of(second, 6)[:5], 7, tokens_of(second, 6)[5], *tokens_of(first, 4)])
    assert [(run.name, run.places.tolist()) for run in runs_in(ids)] == [
        (first, [1, 2, 3, 4]),
        (second, [5, 6, 7, 8, 9, 11]),
        (first, [12, 13, 14, 15]),
    ]
    assert names_in(ids.tolist()) == [first, second]


def test_text_has_no_pictures():
    assert runs_in(np.arange(100)) == []


def test_what_memory_has_no_room_for_is_not_lost():
    store = PictureStore(max_bytes=10)
    names = [store.keep(bytes([number]) * 8) for number in range(4)]
    assert [store.find(name) for name in names] == [bytes([number]) * 8 for number in range(4)]


def test_a_picture_written_to_a_folder_is_found_there_by_another_process(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(b"pixels")
    kept = PictureStore().write(str(file), tmp_path / "pictures")
    other = PictureStore()
    other.look_in(tmp_path / "pictures")
    assert other.find(other.read(kept)) == b"pixels"
    assert [one.name for one in (tmp_path / "pictures").iterdir()] == [name_of(b"pixels")]


def test_a_picture_that_nobody_kept_is_missed_by_name():
    with pytest.raises(DataError, match="the picture abc is not among those of this run"):
        PictureStore().find("abc")


@pytest.mark.parametrize(("image", "fault"), [("/nowhere.png", "cannot be read"), ("data:image/png;base64,#", "is broken")])
def test_an_entry_that_means_no_picture_is_an_error(image, fault):
    with pytest.raises(DataError, match=fault):
        PictureStore().read(image)


def test_a_message_has_as_many_marks_as_pictures():
    assert texts_around(f"a{MARK}b", 1) == ["a", "b"]
    with pytest.raises(DataError, match="2 images and 1 places"):
        texts_around(f"a{MARK}b", 2)
