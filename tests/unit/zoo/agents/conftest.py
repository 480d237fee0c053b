import pytest

from reroll.observe.journal import Journal


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal") as journal:
        yield journal
