import pytest

from reroll.observe.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        yield ledger
