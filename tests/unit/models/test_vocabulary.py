from pathlib import Path

import pytest

from reroll.errors import ModelError
from reroll.models.load import shared_vocabulary
from reroll_zoo.tiny_models import make_tiny


def tiny(folder: Path, **options: object) -> str:
    return str(make_tiny(folder, hidden=8, layers=1, heads=2, kv_heads=1, **options))  # type: ignore[arg-type]


def test_models_with_one_tokenizer_share_its_ids_whatever_their_heads_are_padded_to(tmp_path: Path) -> None:
    student, teacher = tiny(tmp_path / "student", vocab_size=128), tiny(tmp_path / "teacher", vocab_size=160)
    assert shared_vocabulary(student, teacher) == shared_vocabulary(student, student) < 128


def test_a_teacher_may_know_more_tokens_but_not_fewer(tmp_path: Path) -> None:
    plain, more = tiny(tmp_path / "plain"), tiny(tmp_path / "more", words=("<think>",))
    assert shared_vocabulary(plain, more) == shared_vocabulary(plain, plain)
    with pytest.raises(ModelError, match=r"1 of \d+ tokens differ.*'<think>'.*no token at all for the teacher"):
        shared_vocabulary(more, plain)


def test_ids_that_mean_different_tokens_are_named(tmp_path: Path) -> None:
    student, teacher = tiny(tmp_path / "student", characters="abc"), tiny(tmp_path / "teacher", characters="acb")
    with pytest.raises(
        ModelError, match=r"2 of \d+ tokens differ, the first is 'b', id 5 for the student, id 6 for the teacher"
    ):
        shared_vocabulary(student, teacher)
