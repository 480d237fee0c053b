"""What a strategy writes beside its model."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from reroll.training.saved import read_state, write_state

STATE = {"step": 3, "masters": {"weight": torch.arange(1 << 16)}}


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """As a disk that is full does, a write beyond this fails half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_state(STATE, tmp_path / "trainer.pt")
    state = read_state(tmp_path / "trainer.pt", strategy="torch", device=torch.device("cpu"))
    assert state["step"] == 3
    assert torch.equal(state["masters"]["weight"], STATE["masters"]["weight"])  # type: ignore[index]


@pytest.mark.parametrize("num_bytes", [1000, 100_000])
def test_a_write_that_fails_half_way_says_why(tmp_path: Path, num_bytes: int) -> None:
    with no_file_larger_than(num_bytes), pytest.raises(OSError, match="File too large"):
        write_state(STATE, tmp_path / "trainer.pt")


def test_a_device_that_is_full_says_so() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        write_state(STATE, Path("/dev/full"))
