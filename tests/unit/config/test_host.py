from __future__ import annotations

from pathlib import Path

import pytest

from reroll.config.host import num_visible_gpus, parse_devices
from reroll.config.parts import Devices


@pytest.mark.parametrize(
    ("devices", "parsed"),
    [
        ("auto", ("0", "1", "2", "3")),
        ("cpu", ("cpu",)),
        (2, ("2",)),
        ("2", ("2",)),
        ("0-3", ("0", "1", "2", "3")),
        ("1-1", ("1",)),
        ([3, 0], ("3", "0")),
    ],
)
def test_devices_are_read_as_the_config_writes_them(devices: Devices, parsed: tuple[str, ...]) -> None:
    assert parse_devices(devices, num_gpus=4) == parsed


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_devices("auto", num_gpus=0) == ("cpu",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parse_devices("auto") == ("cpu",)


@pytest.mark.parametrize("devices", ["gpu", "3-0", "", "0-", "-1", "0;1", [], [-1], [1, 1]])
def test_what_names_no_device_or_one_twice_is_refused(devices: Devices) -> None:
    with pytest.raises(ValueError, match="names no devices"):
        parse_devices(devices)


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,1,2", 3), ("2, 5", 2), ("0,-1,1", 1), ("GPU-8932f937,GPU-1", 2)]
)
def test_visible_gpus_are_counted_as_cuda_counts_them(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_visible_gpus() == count


def test_without_the_variable_the_device_files_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    files = [Path("/dev") / name for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(files))
    assert num_visible_gpus() == 2
