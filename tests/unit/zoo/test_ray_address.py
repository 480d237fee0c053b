"""A cluster that is not there is told at once: Ray would try for minutes, and then end the process."""

import socket

import pytest

from reroll.errors import RerollError
from reroll.runtime import make_runtime
from reroll_zoo.ray.config import RayRuntimeConfig


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def test_an_address_where_nobody_listens_is_an_error_that_says_what_to_do(closed_port: int) -> None:
    config = RayRuntimeConfig(kind="ray", address=f"127.0.0.1:{closed_port}")
    with pytest.raises(RerollError, match=rf"no Ray cluster answers at 127.0.0.1:{closed_port} .*ray status"):
        make_runtime(config)


def test_the_address_of_auto_is_looked_at_too(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    with pytest.raises(RerollError, match=f"no Ray cluster answers at 127.0.0.1:{closed_port}"):
        make_runtime(RayRuntimeConfig(kind="ray", address="auto"))
